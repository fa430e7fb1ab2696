"""Addresses and connections for tests that have a network."""

from __future__ import annotations

import os
import socket

from tests.support.containers import command, tool


def free_subnet() -> str:
    """A /24 below 10.0.0.0/8 that no route of this machine touches; differs from process to process."""
    taken = command(tool("ip"), "-4", "route", "show").stdout
    for attempt in range(1000):
        number = (os.getpid() * 7 + attempt) % (40 * 250)
        prefix = f"10.{200 + number // 250}.{number % 250}."
        if prefix not in taken:
            return f"{prefix}0/24"
    raise AssertionError("no free subnet")


class Lines:
    """A client of a line protocol over TCP."""

    def __init__(self, address: str, port: int, *, timeout_s: float = 10.0) -> None:
        self.connection = socket.create_connection((address, port), timeout=timeout_s)
        self.reader = self.connection.makefile("rb")

    def ask(self, text: str) -> str:
        """Send a line; the line that comes back, empty once the peer has closed. Raises OSError."""
        self.connection.sendall(text.encode() + b"\r\n")
        return self.reader.readline().decode().rstrip("\r\n")

    def close(self) -> None:
        """Close the connection."""
        self.reader.close()
        self.connection.close()
