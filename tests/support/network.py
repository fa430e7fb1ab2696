"""Addresses and connections for tests that have a network."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from typing import Any

from netmig.ns import Netns
from tests.support.containers import PYTHON, WORKLOADS, command, tool, until


def free_subnet() -> str:
    """A /24 below 10.0.0.0/8 that no route of this machine touches; differs from process to process."""
    taken = command(tool("ip"), "-4", "route", "show").stdout
    for attempt in range(1000):
        number = (os.getpid() * 7 + attempt) % (40 * 250)
        prefix = f"10.{200 + number // 250}.{number % 250}."
        if prefix not in taken:
            return f"{prefix}0/24"
    raise AssertionError("no free subnet")


def until_up(ipr: Any, index: int) -> None:
    """Wait until an interface has its carrier: the kernel gives it an address then, and opens its port."""
    until(lambda: ipr.get_links(index)[0].get_attr("IFLA_OPERSTATE") == "UP", what=f"link {index} is up")


class Lines:
    """A client of a line protocol over TCP."""

    def __init__(self, address: str, port: int, *, timeout_s: float = 30.0) -> None:
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


class Echo:
    """A client of live.py (tests/workloads/echo_client.py), in a network namespace or in ours."""

    def __init__(self, address: str, port: int, netns: Netns | None = None) -> None:
        with netns.inside() if netns else contextlib.nullcontext():
            self._process = subprocess.Popen(
                [PYTHON, "-IS", WORKLOADS / "echo_client.py", address, str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdout
        assert self._process.stdout.readline() == "ready\n", "the client could not connect"

    def ask(self) -> tuple[int, str]:
        """Records received, error or "-"; a record out of order is an error."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        received, _, error = self._process.stdout.readline().split()
        return int(received), error

    def goes_on(self) -> None:
        """Fail unless records arrive, in order; a peer sends again after up to twice what it has waited."""
        before, _ = self.ask()

        def more() -> bool:
            received, error = self.ask()
            assert error == "-", error
            return received > before + 20

        until(more, timeout_s=60, what=f"the client goes on: {self.ask()}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
