"""What a node says of the connections that it is to translate for a container that has come."""

from __future__ import annotations

import contextlib

import pytest

from cluster import wiring
from netmig import conntrack
from netmig.conntrack import Entry, Tuple
from netmig.errors import NetworkError

SENT = Tuple(src="10.88.0.5", dst="10.96.0.1", src_port=40000, dst_port=80)
ENTRY = Entry(protocol=6, original=SENT, reply=SENT.turned(), status=14, timeout_s=60)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "node", contextlib.nullcontext)


def test_what_it_cannot_take_over_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conntrack, "restore", lambda _, entries: tuple(f"{one} is lost" for one in entries))  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    assert wiring.translate((ENTRY,)) == ("TCP 10.88.0.5 port 40000 to 10.96.0.1 port 80 is lost",)


def test_without_connection_tracking_all_are_lost_if_there_were_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NetworkError("could not ask: Protocol not supported")

    monkeypatch.setattr(conntrack, "restore", refuse)
    assert wiring.translate(()) == ()
    (told,) = wiring.translate((ENTRY,))
    assert "will be reset: could not ask: Protocol not supported" in told
