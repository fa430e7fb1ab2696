"""Talks to itself over 127.0.0.1: prints `tick N` for each answer; new connections too where asked.

Usage: loopback.py [--reconnect]
"""

import contextlib
import socket
import sys
import threading
import time


def serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=echo, args=(connection,), daemon=True).start()


def echo(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := connection.recv(64):
            connection.sendall(data)


listener = socket.create_server(("127.0.0.1", 7001))
threading.Thread(target=serve, args=(listener,), daemon=True).start()
client = socket.create_connection(("127.0.0.1", 7001))
tick = 0
while True:
    tick += 1
    try:
        if "--reconnect" in sys.argv:
            client.close()
            client = socket.create_connection(("127.0.0.1", 7001), timeout=5)
        client.sendall(b"x" * 8)
        if client.recv(8):
            print(f"tick {tick}", flush=True)
    except OSError:
        # A restore cuts a connection in the middle of its answer; the next one is new.
        if "--reconnect" not in sys.argv:
            raise
    time.sleep(0.02)
