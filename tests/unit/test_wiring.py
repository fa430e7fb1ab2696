"""What a node says of the connections that it is to translate for a container that has come."""

from __future__ import annotations

import contextlib

import msgspec
import pytest

from cluster import wiring
from netmig import conntrack
from netmig.conntrack import Entry, Tuple
from netmig.errors import NetworkError
from netmig.identity import SCOPE_GLOBAL, Identity, Link, LinkAddress

SENT = Tuple(src="10.88.0.5", dst="10.96.0.1", src_port=40000, dst_port=80)
ENTRY = Entry(protocol=6, original=SENT, reply=SENT.turned(), status=14, timeout_s=60)
OTHERS = msgspec.structs.replace(SENT, src="10.88.0.6")
LINK = Link(name="eth0", index=2, kind="veth", mac="02:00:00:00:00:01", mtu=1500, queue_length=0, flags=1)
POD = Identity(
    links=(LINK,),
    addresses=(LinkAddress(interface="eth0", ip="10.88.0.5", prefix=24, scope=SCOPE_GLOBAL),),
)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "node", contextlib.nullcontext)


def test_what_it_cannot_take_over_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conntrack, "restore", lambda _, entries: tuple(f"{one} is lost" for one in entries))  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    assert wiring.translate(POD, (ENTRY,)) == ("TCP 10.88.0.5 port 40000 to 10.96.0.1 port 80 is lost",)


def test_without_connection_tracking_all_are_lost_if_there_were_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NetworkError("could not ask: Protocol not supported")

    monkeypatch.setattr(conntrack, "restore", refuse)
    assert wiring.translate(POD, ()) == ()
    (told,) = wiring.translate(POD, (ENTRY,))
    assert "will be reset: could not ask: Protocol not supported" in told


@pytest.mark.parametrize(
    ("original", "reply"),
    [
        (OTHERS, OTHERS.turned()),
        (OTHERS, SENT.turned()),  # would take the reply's from whoever has it
        (SENT, OTHERS.turned()),
        (msgspec.structs.replace(SENT, src="none"), SENT.turned()),
    ],
)
def test_a_peer_names_only_the_connections_of_its_container(
    monkeypatch: pytest.MonkeyPatch, original: Tuple, reply: Tuple
) -> None:
    taken = list[Entry]()

    def restore(_: object, entries: tuple[Entry, ...]) -> tuple[str, ...]:
        taken.extend(entries)
        return ("one is lost",)

    monkeypatch.setattr(conntrack, "restore", restore)
    theirs = msgspec.structs.replace(ENTRY, original=original, reply=reply)
    (told,) = wiring.translate(POD, (theirs,))
    assert told == (
        "the old node named connections that are not the container's (1): those are left as they are"
    )
    assert taken == []
    assert wiring.translate(POD, (theirs, ENTRY)) == (told, "one is lost")
    assert taken == [ENTRY]
