"""What a node makes of the translations of another, with its kernel played."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from netmig import conntrack
from netmig.conntrack import Entry, Tuple
from netmig.ns import Netns

NODE = Netns(Path("/run/netns/node"), -1)
SENT = Tuple(src="10.88.0.5", dst="10.96.0.1", src_port=41000, dst_port=80)
ANSWERED = Tuple(src="10.89.0.2", dst="10.88.0.5", src_port=8080, dst_port=41000)
ENTRY = Entry(protocol=6, original=SENT, reply=ANSWERED, status=14, timeout_s=60)
OTHER = msgspec.structs.replace(ENTRY, reply=msgspec.structs.replace(ANSWERED, dst_port=6203))


@dataclass
class Kernel:
    """What it answers to each look at an entry, and what it was told to delete."""

    has: Iterator[Entry | None]
    deleted: list[Tuple] = field(default_factory=list[Tuple])

    def asked(
        self, netlink: object, what: int, named: Sequence[tuple[Entry, Tuple]]
    ) -> list[tuple[int, Entry | None]]:
        if what == conntrack._DELETE:
            self.deleted += [one for _, one in named]
        return [(0, next(self.has) if what == conntrack._GET else None) for _ in named]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Kernel:
    kernel = Kernel(iter(request.param))
    monkeypatch.setattr(conntrack, "_opened", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(conntrack, "_asked", kernel.asked)
    return kernel


@pytest.mark.parametrize("kernel", [[OTHER, None, ENTRY]], indirect=True)
def test_what_comes_between_is_removed_again(kernel: Kernel) -> None:
    assert conntrack.restore(NODE, (ENTRY,)) == ()
    assert kernel.deleted == [SENT, ANSWERED, ANSWERED.turned()] * 2


@pytest.mark.parametrize("kernel", [[OTHER] * 9], indirect=True)
def test_another_translation_than_the_old_nodes_is_told(kernel: Kernel) -> None:
    [sentence] = conntrack.restore(NODE, (ENTRY,))
    assert sentence == (
        "TCP 10.88.0.5 port 41000 to 10.96.0.1 port 80 will be reset: the node does not take it over: "
        "another connection has its ports"
    )


class Netlink:
    """A socket to a kernel that acknowledges everything, and has some entries to list."""

    def __init__(self, listed: bytes = b"") -> None:
        self.answers = [listed] if listed else []
        self.n_sent = self.n_waiting = 0

    def send(self, data: bytes) -> None:
        self.n_sent += 1
        while data:
            (length,) = struct.unpack_from("=I", data)
            self.answers.append(struct.pack("=IHHIIi", 20, conntrack._ERROR, 0, 1, 0, 0))
            data = data[length:]
        self.n_waiting = max(self.n_waiting, len(self.answers))

    def recv(self, _: int) -> bytes:
        return self.answers.pop(0)

    def settimeout(self, _: float) -> None: ...


def test_many_are_forgotten_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    netlink = Netlink()
    monkeypatch.setattr(conntrack, "_opened", lambda _: contextlib.nullcontext(netlink))
    conntrack.forget(NODE, (ENTRY,) * 100)
    assert not netlink.answers
    assert (netlink.n_sent, netlink.n_waiting) == (4, 32)  # more answers would not find room


def test_what_others_opened_is_not_even_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel lists all of a node's IPv6 connections, while the pod is frozen."""
    sent = [Tuple(src=f"fd88::{n}", dst="fd96::1", src_port=1, dst_port=80) for n in range(4, 8)]
    entries = [Entry(protocol=6, original=one, reply=one.turned(), status=14, timeout_s=60) for one in sent]
    listed = b"".join(conntrack._message(0, 0, 10, conntrack._attributes(one)) for one in entries)
    netlink = Netlink(listed + struct.pack("=IHHII", 16, conntrack._DONE, 0, 1, 0))
    decoded, real = list[bytes](), conntrack._entry

    def decode(data: bytes) -> Entry | None:
        decoded.append(data)
        return real(data)

    monkeypatch.setattr(conntrack, "_entry", decode)
    monkeypatch.setattr(netlink, "send", lambda _: None)
    monkeypatch.setattr(conntrack, "_opened", lambda _: contextlib.nullcontext(netlink))
    [found] = conntrack.untranslated(NODE, ["fd88::5"])
    assert found.original == sent[1]
    assert len(decoded) == 1
