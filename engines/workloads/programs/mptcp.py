"""A Multipath TCP listener and a connection to it."""

import sys

sys.path.insert(0, "/workloads")
import socket

from common import Absent, run, same


def setup():
    try:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
    except OSError as error:
        raise Absent(f"no Multipath TCP: {error}") from error
    listener.bind(("127.0.0.1", 7501))
    listener.listen(4)
    client = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
    client.connect(("127.0.0.1", 7501))
    server, _ = listener.accept()
    client.sendall(b"unread")
    return lambda: same(server.recv(10), b"unread", "what was under way")


run(setup)
