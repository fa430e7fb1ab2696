"""A unix socket connected to a server outside the container."""

import sys

sys.path.insert(0, "/workloads")
import socket

from common import run, same


def setup():
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(5)
    client.connect("/outside/server.sock")

    def verify():
        client.sendall(b"hello")
        same(client.recv(10), b"hello", "the server's echo")

    return verify


run(setup)
