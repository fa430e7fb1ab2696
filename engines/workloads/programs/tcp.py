"""TCP: listeners (v4, v6), connections inside the container with unread bytes, options."""

import sys

sys.path.insert(0, "/workloads")
import socket

from common import Absent, run, same


def setup():
    listeners = [socket.create_server(("127.0.0.1", 7101), backlog=16)]
    try:
        listeners.append(socket.create_server(("::1", 7102), family=socket.AF_INET6, backlog=16))
    except OSError:
        pass
    listeners.append(socket.create_server(("0.0.0.0", 7103), backlog=16))
    pairs = []
    for listener in listeners:
        try:
            client = socket.create_connection(listener.getsockname()[:2], timeout=5)
        except OSError as failure:
            raise Absent(f"no loopback device: {failure}") from failure
        server, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 123)
        client.settimeout(5)
        server.settimeout(5)
        client.sendall(b"unread")
        pairs.append((client, server, listener))
    big = bytes(range(256)) * 200
    pairs[0][1].sendall(big)
    half = pairs[-1]
    half[0].shutdown(socket.SHUT_WR)

    def verify():
        for client, server, listener in pairs:
            same(server.recv(6), b"unread", "what was under way")
            if client is pairs[0][0]:
                found = b""
                while len(found) < len(big):
                    found += client.recv(65536)
                same(found, big, "50 KiB under way")
            server.sendall(b"back")
            same(client.recv(100), b"back", "the way back")
            same(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), 1, "TCP_NODELAY")
            same(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 123, "TCP_KEEPIDLE")
            fresh = socket.create_connection(listener.getsockname()[:2], timeout=5)
            other, _ = listener.accept()
            fresh.sendall(b"new")
            same(other.recv(10), b"new", "a new connection")
        same(half[1].recv(10), b"", "a half-closed connection")

    return verify


run(setup)
