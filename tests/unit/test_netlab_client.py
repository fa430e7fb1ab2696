"""The lab's measuring client notices what goes wrong: it is what the lab's verdict stands on."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.netlab import traffic
from tests.netlab.traffic import Tally

END = 2**64 - 1


def records(*numbers: int) -> bytes:
    return struct.pack(f"!{len(numbers)}Q", *numbers)


def judged(mode: str, serve: Callable[[socket.socket], None]) -> Tally:
    """What the client says of one connection to a server that does `serve`."""
    address = f"127.77.{os.getpid() % 250}.1"
    with socket.create_server((address, 7000)) as listener:

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)
                serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        argv = [sys.executable, "-IS", str(traffic.CLIENT), f"{mode}@{address}@5"]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdin
            assert client.stdout
            assert client.stdout.readline() == "ready\n"
            thread.join(0.3)  # a server that closes by itself has done so
            client.stdin.write("?\n")
            client.stdin.flush()
            client.stdout.readline()  # it sends before it listens to us again
            client.stdin.write("stop\n")
            client.stdin.flush()
            flows: list[dict[str, Any]] = json.loads(client.stdout.readline())
        thread.join()
    return Tally.of(flows)


def drain(connection: socket.socket) -> int:
    """Read until the client shuts down; whole records read."""
    n_bytes = 0
    while data := connection.recv(65536):
        n_bytes += len(data)
    return n_bytes // 8


def honest(connection: socket.socket) -> None:
    connection.sendall(records(0, 1, 2))
    connection.sendall(records(END, drain(connection), 0, 3))


def skips(connection: socket.socket) -> None:
    connection.sendall(records(0, 1, 4))
    connection.sendall(records(END, drain(connection), 0, 5))


def repeats(connection: socket.socket) -> None:
    connection.sendall(records(0, 1, 1, 2))
    connection.sendall(records(END, drain(connection), 0, 3))


def loses_the_last(connection: socket.socket) -> None:
    connection.sendall(records(0, 1))
    connection.sendall(records(END, drain(connection), 0, 3))


def did_not_get_all(connection: socket.socket) -> None:
    connection.sendall(records(END, drain(connection) - 1, 0, 0))


def got_wrong_ones(connection: socket.socket) -> None:
    connection.sendall(records(END, drain(connection), 2, 0))


def closes(connection: socket.socket) -> None:
    connection.sendall(records(0))


def resets(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def swallows_an_echo(connection: socket.socket) -> None:
    data = b""
    while more := connection.recv(65536):
        data += more
    connection.sendall(data[:-8])


def test_nothing_to_complain_of() -> None:
    tally = judged("duplex", honest)
    assert tally.whole
    assert tally.n_tcp == 1


@pytest.mark.parametrize(
    ("mode", "serve", "lost", "repeated"),
    [
        ("duplex", skips, 2, 0),
        ("duplex", repeats, 0, 1),
        ("push", loses_the_last, 1, 0),
        ("sink", did_not_get_all, 1, 0),
        ("duplex", got_wrong_ones, 0, 2),
        ("echo", swallows_an_echo, 1, 0),
    ],
)
def test_what_is_lost_or_comes_twice_is_counted(
    mode: str, serve: Callable[[socket.socket], None], lost: int, repeated: int
) -> None:
    tally = judged(mode, serve)
    assert (tally.lost, tally.repeated) == (lost, repeated)
    assert not tally.whole


@pytest.mark.parametrize("serve", [closes, resets])
def test_a_connection_that_ends_too_early_is_broken(serve: Callable[[socket.socket], None]) -> None:
    tally = judged("duplex", serve)
    assert tally.errors
    assert not tally.whole


def test_a_stall_that_never_ended_is_a_gap() -> None:
    counts = dict.fromkeys(("sent", "received", "lost", "repeated"), 0)
    flow: dict[str, Any] = {"mode": "duplex", "family": 4, **counts, "error": "", "stalled": True}
    flow |= {"gap_s": 7.0, "gap_to_s": 9.0}
    tally = Tally.of([flow])
    assert tally.longest_s == 7.0
    assert not tally.whole


def test_who_else_answers_for_an_address_is_told() -> None:
    counts = {"sent": 9, "lost": 9, "sent_in_gaps": 9, "refused": 3}
    tally = Tally.of([{"mode": "udp", "family": 6, **counts}])
    assert tally.errors == ["udp over IPv6: somebody else answered 3 times"]
    assert not tally.whole
