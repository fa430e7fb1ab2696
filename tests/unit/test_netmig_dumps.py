"""A list of the kernel's that was interrupted, and may lack something: with the kernel played."""

from __future__ import annotations

import struct
from contextlib import nullcontext
from pathlib import Path
from socket import AF_INET6
from typing import Any

import pytest

from netmig import queues, rtnl
from netmig.errors import NetworkError
from netmig.ns import Netns

MULTI, INTERRUPTED = 0x2, 0x10
HALF, WHOLE = [(7, MULTI), (9, MULTI | INTERRUPTED)], [(7, MULTI), (8, MULTI), (9, MULTI)]


class Kernel:
    """Answers each request with the next of these lists: a message's interface, and its flags."""

    def __init__(self, *lists: list[tuple[int, int]]) -> None:
        self._lists = iter(lists)
        self.get_addr = self.get_links = self.get_rules = self.get_neighbours = self.nlm_request = self.route

    def route(self, *_: object, **__: object) -> list[dict[str, Any]]:
        return [
            {"index": index, "family": AF_INET6, "header": {"flags": flags}, "attrs": []}
            for index, flags in next(self._lists)
        ]

    def send(self, request: bytes) -> None:
        pass

    def recv(self, size: int) -> bytes:
        data = b""
        for index, flags in next(self._lists):
            body = struct.pack("=BBHiIII", 0, 0, 0, index, 1 << 16, queues.ROOT, 0)
            body += struct.pack("=HH8s", 12, 1, b"htb")
            data += struct.pack("=IHHII", 16 + len(body), 36, flags, 1, 0) + body
        return data + struct.pack("=IHHIII", 20, 3, MULTI, 1, 0, 0)


LISTS = {
    "links": lambda ipr: rtnl.links(ipr),
    "addresses": lambda ipr: rtnl.addresses(ipr),
    "routes": lambda ipr: rtnl.routes(ipr, AF_INET6),
    "rules": lambda ipr: rtnl.rules(ipr, AF_INET6),
}


@pytest.mark.parametrize("what", LISTS)
def test_a_list_that_was_interrupted_is_asked_for_again(what: str) -> None:
    listed = LISTS[what](Kernel(HALF, HALF, WHOLE))
    assert [one.header["index"] for one in listed] == [7, 8, 9]


def test_so_is_each_of_the_two_of_neighbours() -> None:
    listed = rtnl.neighbours(Kernel(HALF, WHOLE, HALF, WHOLE), AF_INET6)
    assert [one.header["index"] for one in listed] == [7, 8, 9] * 2


def test_a_node_that_never_rests_is_told() -> None:
    with pytest.raises(NetworkError, match="it changed while it was read, 10 times; try again when fewer"):
        rtnl.addresses(Kernel(*[HALF] * 10))


def test_queues_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel([(7, MULTI | INTERRUPTED)], [(7, MULTI), (7, MULTI)], [])
    monkeypatch.setattr(queues, "_route_socket", lambda _: nullcontext(kernel))
    assert len(queues.capture(Netns(Path("/run/netns/x"), -1), 7)) == 2
