"""A socket to a hypervisor (vsock)."""

import sys

sys.path.insert(0, "/workloads")
import socket

from common import Absent, run, same


def setup():
    try:
        listener = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
        listener.bind((socket.VMADDR_CID_ANY, 7777))
    except (OSError, AttributeError) as error:
        raise Absent(f"no vsock: {error}") from error
    return lambda: same(listener.getsockname()[1], 7777, "the port")


run(setup)
