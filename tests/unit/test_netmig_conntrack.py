"""What a node makes of the translations of another, with its kernel played."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
    deleted: list[Tuple | None] = field(default_factory=list[Tuple | None])

    def asked(
        self, netlink: object, what: int, entry: Entry, named: Tuple | None = None
    ) -> tuple[int, Entry | None]:
        if what == conntrack._DELETE:
            self.deleted.append(named)
        return 0, next(self.has) if what == conntrack._GET else None


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
