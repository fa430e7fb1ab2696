"""UDP: bound, connected and multicast-free sockets on the loopback device."""

import sys

sys.path.insert(0, "/workloads")
import socket

from common import run, same


def setup():
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.bind(("127.0.0.1", 7201))
    bound.settimeout(5)
    connected = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    connected.bind(("127.0.0.1", 7202))
    connected.connect(("127.0.0.1", 7201))
    connected.settimeout(5)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
    size = connected.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    def verify():
        same(connected.getpeername(), ("127.0.0.1", 7201), "the peer")
        same(connected.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF), size, "SO_RCVBUF")
        connected.send(b"there")
        data, sender = bound.recvfrom(100)
        same((data, sender), (b"there", ("127.0.0.1", 7202)), "a datagram")
        bound.sendto(b"back", sender)
        same(connected.recv(100), b"back", "the way back")

    return verify


run(setup)
