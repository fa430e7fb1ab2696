"""A socket for echo requests (ICMP) that needs no privilege."""

import sys

sys.path.insert(0, "/workloads")
import os
import socket

from common import Absent, run


def setup():
    try:
        endpoint = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
        endpoint.bind(("127.0.0.1", 0))
    except OSError as error:
        raise Absent(f"no unprivileged ICMP sockets: {error}") from error
    return lambda: os.fstat(endpoint.fileno()) and endpoint.getsockname()


run(setup)
