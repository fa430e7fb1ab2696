"""A container's main program for tests: counts aloud, and serves TCP.

Usage: live.py [--port N] [--fill MIB] [--children N] [--file PATH]

Prints `tick N` every 20 ms on standard output. On the port it answers each 8-byte record with the same
record (so that a client can check order and loss). SIGUSR1 prints `sum HEX` (a checksum of the filled
memory), SIGUSR2 prints `pid N ppid M`.
"""

import argparse
import hashlib
import os
import selectors
import signal
import socket
import sys
import time


def say(*words: object) -> None:
    # One write for a line: a signal's answer must not begin within it.
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def child(number: int) -> None:
    while True:
        time.sleep(0.05 + number / 100)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fill", type=int, default=0)
    parser.add_argument("--children", type=int, default=0)
    parser.add_argument("--file", default="")
    options = parser.parse_args()
    memory = bytearray()
    for block in range(options.fill):
        memory += hashlib.shake_128(block.to_bytes(4, "big")).digest(1 << 20)

    def tell_sum(*_: object) -> None:
        say("sum", hashlib.sha256(memory).hexdigest())

    def tell_pid(*_: object) -> None:
        say("pid", os.getpid(), "ppid", os.getppid())

    signal.signal(signal.SIGUSR1, tell_sum)
    signal.signal(signal.SIGUSR2, tell_pid)
    for number in range(options.children):
        if os.fork() == 0:
            child(number)
    log = open(options.file, "a") if options.file else None  # noqa: SIM115
    selector = selectors.DefaultSelector()
    listener = None
    if options.port:
        listener = socket.create_server(("0.0.0.0", options.port), backlog=64)
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
    tick = 0
    due = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= due:
            tick += 1
            # After a restore the clock may have jumped: do not try to catch up.
            due = now + 0.02
            say("tick", tick)
            if log:
                log.write(f"tick {tick}\n")
                log.flush()
        for key, _ in selector.select(max(0.0, due - time.monotonic())):
            if key.fileobj is listener:
                connection, _ = listener.accept()
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(connection, selectors.EVENT_READ)
                continue
            connection = key.fileobj
            try:
                data = connection.recv(65536)
                if data:
                    connection.sendall(data)
                    continue
            except BlockingIOError:
                continue
            except OSError:
                pass
            selector.unregister(connection)
            connection.close()


if __name__ == "__main__":
    sys.exit(main())
