"""Raw, packet and netlink sockets."""

import sys

sys.path.insert(0, "/workloads")
import socket

from common import Absent, check, run, same


def setup():
    try:
        raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP)
        netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    except OSError as error:
        raise Absent(f"no raw sockets: {error}") from error
    netlink.bind((0, 0))
    port = netlink.getsockname()[0]
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    raw.settimeout(5)

    def verify():
        same(netlink.getsockname()[0], port, "the netlink port")
        sender.sendto(b"seen from below", ("127.0.0.1", 7999))
        while not (data := raw.recv(200)).endswith(b"seen from below"):
            check(data, "the raw socket")

    return verify


run(setup)
