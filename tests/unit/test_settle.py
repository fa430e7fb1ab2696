"""How migrations that were cut short are brought to their end, with the other node and the engine played."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from cluster import config, departure, records, settle
from cluster.arrival import TRANSLATIONS, Arriving
from cluster.channel import Channel, Lost, Refused
from cluster.departure import migrate
from cluster.here import Here
from cluster.messages import PROTOCOL, Answer, Commit, Hello, Message
from cluster.records import STANDING, VERDICT, WISH, Arrival, Departure, Record, begin_departure
from cluster.serve import serve
from netmig import conntrack
from netmig import identity as identities
from netmig.identity import Identity
from shim.errors import ShimError, UsageError

NAME = "0" * 16


@pytest.fixture
def here(tmp_path: Path) -> Here:
    peers = {"b": config.Peer(address="10.0.0.2:7077", may_push=True)}
    node = SimpleNamespace(config=SimpleNamespace(store_path=tmp_path / "store"))
    return Here(config=config.Config(node="a", state=tmp_path / "state", peers=peers), node=cast("Any", node))


def leaving(here: Here, tmp_path: Path, verdict: str) -> Record:
    """A departure that was cut short."""
    record = Record(here.config.departures, NAME)
    with record.begun():
        record.make(
            Departure(
                migration=NAME,
                container_id="c",
                root="/run/runc",
                directory=str(tmp_path / "directory"),
                bundle="/b",
                peer="b",
                engine="criu",
                netns="/run/netns/c",
                identity=identities.encode(Identity()),
                owner="c",
            )
        )
        record.write(VERDICT, verdict)
    return record


def coming(here: Here, tmp_path: Path, standing: str) -> Record:
    """An arrival that was cut short."""
    record = Record(here.config.arrivals, NAME)
    with record.begun():
        record.make(
            Arrival(
                migration=NAME,
                container_id="c",
                root=str(tmp_path / "root"),
                directory=str(tmp_path / "directory"),
                peer="b",
                engine="criu",
                netns="/run/netns/c",
                identity=identities.encode(Identity()),
                owner="c",
            )
        )
        record.write(STANDING, standing)
    return record


class Other:
    """The other node, and the engine here: what they were asked, and what the node answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: object = None
        self.answers: dict[str, object] = {}  # to some of what is asked
        self.asked: list[str] = []
        self.resumed = self.switched = 0
        monkeypatch.setattr(settle, "tell", self._tell)
        monkeypatch.setattr(settle, "resume", self._resume)
        monkeypatch.setattr(settle, "switch", self._switch)
        monkeypatch.setattr(settle, "_rescue", lambda *_: None)

    def _tell(self, here: Here, peer: str, *messages: Message) -> object:
        self.asked += [type(one).__name__ for one in messages]
        answer = self.answers.get(self.asked[-1], self.answer)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _switch(self, *_: object) -> None:
        self.switched += 1

    def _resume(self, *_: object) -> None:
        self.resumed += 1


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Other:
    return Other(monkeypatch)


# --- what the target says no to ------------------------------------------------------------------------


def test_only_what_the_target_has_lost_becomes_an_image(
    here: Here, tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[str] = []
    monkeypatch.setattr("cluster.away.give_back", lambda _here, _identity, owner: given_back.append(owner))
    record = leaving(here, tmp_path, "commit")
    other.answer = Refused("could not use '/x': No space left on device; free some space")
    with pytest.raises(ShimError, match=r"free some space; put that right there.*start it nowhere else$"):
        settle.departure(here, record)
    assert record.read(VERDICT) == "commit"
    other.answer = Refused("migration 0 is not known here", lost=True)
    for _ in range(2):
        with pytest.raises(ShimError, match="which runs nowhere: restore it from image 'migration-0"):
            settle.departure(here, record)
    # And so hears whoever waits for the migration, who must not be told that it runs there.
    leaving_ = SimpleNamespace(here=here, record=record, report=SimpleNamespace(warnings=[]))
    with pytest.raises(ShimError, match="which runs nowhere"):
        departure._Leaving._settled(cast("Any", leaving_))
    assert given_back == ["c"]
    assert not records._goes_on(record)  # and may migrate
    # Once: what has the container's names after that may be what was made of the image.
    assert other.asked == ["Commit", "Commit"]
    assert (other.switched, other.resumed) == (2, 2)


@pytest.mark.parametrize("leads", [True, False], ids=["the target is the gateway", "the source is"])
def test_the_source_translates_nothing_any_more_before_the_container_runs(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    record, done = leaving(here, tmp_path, ""), list[object]()
    one = conntrack.Tuple(src="10.88.0.5", dst="10.96.0.1", src_port=41000, dst_port=80)
    entries = (conntrack.Entry(protocol=6, original=one, reply=one, status=14, timeout_s=60),)
    monkeypatch.setattr(conntrack, "forget", lambda _host, what: done.append(what))
    monkeypatch.setattr("cluster.wiring.node", contextlib.nullcontext)
    monkeypatch.setattr("cluster.wiring.unplug", lambda _: done.append("unplugged"))
    monkeypatch.setattr("cluster.cargo.send_rest", lambda *_: 0)
    monkeypatch.setattr(settle, "lead_away", lambda *_: None)
    leaving_ = SimpleNamespace(
        here=here,
        record=record,
        report=SimpleNamespace(phases_ms={}),
        deadline=math.inf,
        dumped_at=0.0,
        _image_path=tmp_path,
        _before=SimpleNamespace(n_bytes=0),
        _memory=SimpleNamespace(result=dict),
        _translations=SimpleNamespace(result=lambda: (entries, ())),
        _channel=lambda: SimpleNamespace(send=done.append),
        _have_prepared=done.append,
        _timed=lambda _: contextlib.nullcontext(),
        _leads=leads,
    )
    departure._Leaving._decide(cast("Any", leaving_), cast("Any", None))
    # Once more by `switch`, as by an agent that starts anew.
    switched = ["unplugged", entries] if leads else ["unplugged"]
    assert done == [entries, *switched, Commit(migration=NAME), *switched]


@pytest.mark.parametrize(("routed", "says", "leads"), [(0, {}, 0), (0, {"leads": True}, 1), (1, {}, 1)])
def test_only_a_target_that_sees_what_the_container_sends_translates_it(
    here: Here,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    routed: int,
    says: dict[str, bool],
    leads: int,
) -> None:
    answer = msgspec.convert(
        {"type": "Answer", "standing": "reserved", **says}, Answer
    )  # an older says nothing
    monkeypatch.setattr(departure, "connect", lambda *_: SimpleNamespace(ask=lambda *_: answer))
    monkeypatch.setattr("shim.prospects.stable", lambda _: None)
    leaving_ = SimpleNamespace(
        here=SimpleNamespace(config=here.config, check_room=lambda _: None),
        node=here.node,
        peer="b",
        tell=lambda _: None,
        report=SimpleNamespace(warnings=[]),
        _before=SimpleNamespace(measure=lambda: 1),
        _said=contextlib.nullcontext,
        _check_via=lambda *_: None,
    )
    plan = msgspec.structs.replace(leaving(here, tmp_path, "").plan(Departure), routed=bool(routed))
    departure._Leaving._prepare(cast("Any", leaving_), plan, b"{}", trial=True)
    assert leaving_._leads == bool(leads)


@pytest.mark.parametrize("data", [b"", b'[{"protocol":6,', bytes(64)], ids=["none", "half", "zeroes"])
def test_what_a_power_cut_left_of_the_translations_stops_nothing(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    leaves, comes = leaving(here, tmp_path, "commit"), coming(here, tmp_path, "prepared")
    for record in (leaves, comes):
        (record.path / TRANSLATIONS).write_bytes(data)
    monkeypatch.setattr("cluster.wiring.unplug", lambda _: None)
    settle.switch(here, leaves, leaves.plan(Departure))
    arriving = Arriving(here, comes)
    arriving._translate()
    assert arriving.warnings == ()


@pytest.fixture
def asks(here: Here, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Answer]]:
    """Asks this node, as whoever it says that it is."""
    monkeypatch.setattr(Here, "audit", lambda *_, **__: None)
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "a")

    def ask(message: Message) -> Answer:
        return channel.ask(message, Answer)

    with ThreadPoolExecutor(1) as beside:
        serving = beside.submit(serve, here, Channel(theirs, ""), trusted=True)
        yield ask
        channel.close()
        assert isinstance(serving.exception(), Lost)


def test_a_target_that_has_lost_it_says_so(
    here: Here, tmp_path: Path, asks: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    asks(Hello(protocol=PROTOCOL, node="b"))
    with pytest.raises(Refused, match="not known here") as caught:
        asks(Commit(migration=NAME))
    assert caught.value.lost
    record = coming(here, tmp_path, "preparing")
    with pytest.raises(Refused, match="is not prepared here") as caught:
        asks(Commit(migration=NAME))
    assert caught.value.lost
    record.write(STANDING, "prepared")
    monkeypatch.setattr(Arriving, "_has_run", lambda _: False)
    with pytest.raises(Refused, match="is gone: was this node restarted") as caught:
        asks(Commit(migration=NAME))
    assert caught.value.lost


def test_a_target_that_cannot_write_has_lost_nothing(
    here: Here, tmp_path: Path, asks: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    asks(Hello(protocol=PROTOCOL, node="b"))
    coming(here, tmp_path, "prepared")
    (tmp_path / "root" / "c").mkdir(parents=True)

    def full(record: Record, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(record.path / STANDING))

    monkeypatch.setattr(Record, "write", full)
    with pytest.raises(Refused, match="No space left on device; free some space") as caught:
        asks(Commit(migration=NAME))
    assert not caught.value.lost


def test_who_may_not_ask_hears_of_no_loss(here: Here, asks: Callable[..., Answer]) -> None:
    cast("dict[str, config.Peer]", here.config.peers)["b"] = config.Peer(address="10.0.0.2:7077")
    with pytest.raises(Refused, match="may not send containers here") as caught:
        asks(Hello(protocol=PROTOCOL, node="b"))
    assert not caught.value.lost


# --- what an operator decides --------------------------------------------------------------------------

UNUSABLE = [
    Refused("'a' may not send containers here"),
    UsageError("could not trust node 'b'"),
    UsageError("could not find node 'b'"),
]


@pytest.mark.parametrize("answer", UNUSABLE, ids=["refused", "untrusted", "unknown"])
def test_an_operator_decides_whatever_keeps_the_other_node_from_answering(
    here: Here, tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch, answer: Exception
) -> None:
    monkeypatch.setattr(Here, "audit", lambda *_, **__: None)
    record = leaving(here, tmp_path, "hold")
    other.answer = answer
    with pytest.raises(ShimError, match=str(answer)):
        settle.departure(here, record)
    assert record.read(VERDICT) == "hold"
    assert not other.resumed
    said = settle.resolve(here, NAME, "source")
    assert said == f"decided for the source; what is left of it is tried again: {answer}"
    assert record.read(VERDICT) == "abort"
    assert other.resumed == 1
    assert record.exists()  # the other node may hold one, which has to hear of it


def test_an_operator_does_not_outvote_a_target_that_runs(
    here: Here, tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Here, "audit", lambda *_, **__: None)
    record = leaving(here, tmp_path, "hold")
    record.write(WISH, "source")
    other.answer = "running"
    monkeypatch.setattr(settle, "_ended", lambda *_: True)
    assert settle.departure(here, record)
    assert record.read(VERDICT) == "commit"


# --- to itself -----------------------------------------------------------------------------------------


def test_a_container_does_not_migrate_to_the_node_it_is_on(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(
        node=SimpleNamespace(directory=lambda *_: tmp_path),
        root="/run/runc",
        state=SimpleNamespace(container_id="c", bundle_path=tmp_path, status="running"),
    )
    monkeypatch.setattr(Here, "settings", lambda *_: None)
    with pytest.raises(ShimError, match="to 'a': that is this node; name another one with --to"):
        migrate(here, cast("Any", found), "a", trial=False, tell=print)
    assert not here.config.state.exists()


@pytest.mark.parametrize(("status", "words"), [("paused", "it is paused now"), ("", "it is gone now")])
def test_only_what_runs_is_frozen(
    here: Here, monkeypatch: pytest.MonkeyPatch, status: str, words: str
) -> None:
    monkeypatch.setattr(Here, "status", lambda *_: status)
    with pytest.raises(ShimError, match=words):
        here.check_runs("criu", "/run/runc", "c")
    monkeypatch.setattr(Here, "status", lambda *_: "running")
    here.check_runs("criu", "/run/runc", "c")


def test_nor_by_another_name_of_it(here: Here, asks: Callable[..., Answer]) -> None:
    cast("dict[str, config.Peer]", here.config.peers)["a"] = config.Peer(may_push=True)
    with pytest.raises(Refused, match="'a' is this node itself"):
        asks(Hello(protocol=PROTOCOL, node="a"))


# --- called off, and the target never hears it ---------------------------------------------------------


def test_what_stays_may_leave_for_another_node(here: Here, tmp_path: Path, other: Other) -> None:
    first = leaving(here, tmp_path, "abort")
    second = Record(here.config.departures, "1" * 16)
    plan = msgspec.structs.replace(first.plan(Departure), migration=second.migration, peer="third")
    with second.begun(), pytest.raises(ShimError, match="a migration of it to 'b' is under way"):
        begin_departure(second, plan)  # nobody has let it run on yet
    other.answer = None
    with first.locked():
        assert not settle.departure(here, first)
        with second.begun():
            begin_departure(second, plan)  # also while somebody tries to reach the first
    assert not settle.departure(here, first)
    assert other.resumed == 1  # or it would be let run while it leaves
    assert other.asked == ["Abort", "Abort"]
    other.answer = "unknown"
    assert settle.departure(here, first)
    assert not first.exists()


def test_nothing_else_leaves_twice(here: Here, tmp_path: Path, other: Other) -> None:
    first, second = leaving(here, tmp_path, "commit"), Record(here.config.departures, "1" * 16)
    plan = msgspec.structs.replace(first.plan(Departure), migration=second.migration, peer="third")
    other.answer = None
    assert not settle.departure(here, first)
    with second.begun(), pytest.raises(ShimError, match="is under way"):
        begin_departure(second, plan)


# --- gone, and the target never hears that -------------------------------------------------------------


def test_whoever_takes_the_names_of_one_that_is_gone_keeps_them(
    here: Here, tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target dies before it hears that the source is gone, and here somebody makes a new container."""
    done: list[str] = []
    monkeypatch.setattr(Here, "audit", lambda *_, **__: None)
    monkeypatch.setattr(Here, "delete", lambda *_: done.append("delete"))
    monkeypatch.setattr("cluster.wiring.remove", lambda *_: done.append("remove"))

    def give_back(*_: object) -> None:
        done.append("give back")
        if done.count("give back") == 1:
            raise UsageError("could not use the leases")

    monkeypatch.setattr("cluster.away.give_back", give_back)
    record, new = leaving(here, tmp_path, "commit"), Record(here.config.departures, "1" * 16)
    other.answers = {"Commit": "running", "Forget": None}
    with pytest.raises(UsageError, match="could not use the leases"):
        settle.departure(here, record)
    for _ in range(2):
        assert not settle.departure(here, record)
    assert done == ["delete", "remove", "give back", "remove", "give back"]
    assert (other.switched, other.resumed, other.asked) == (1, 1, ["Commit", "Forget", "Forget"])
    with new.begun():
        begin_departure(new, msgspec.structs.replace(record.plan(Departure), migration=new.migration))
    other.answers["Forget"] = "running"
    assert settle.departure(here, record)
    assert not record.exists()


def test_the_files_of_one_that_goes_on_stay_until_the_next_node_has_them_on_disk(
    here: Here, tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Here, "audit", lambda *_, **__: None)
    monkeypatch.setattr(Here, "delete", lambda *_: None)
    monkeypatch.setattr("cluster.wiring.remove", lambda *_: other.asked.append("remove"))
    monkeypatch.setattr("cluster.away.give_back", lambda *_: other.asked.append("give back"))
    came = coming(here, tmp_path, "settled")
    monkeypatch.setattr(Arriving, "clear_up", lambda arriving: arriving.record.remove())
    record = leaving(here, tmp_path, "commit")
    plan = msgspec.structs.replace(record.plan(Departure), bundle=str(came.path / "bundle"))
    record.make(plan)
    for answer, left in ((None, True), (None, True), ("running", False)):
        other.answers = {"Commit": "running", "Forget": answer}
        assert settle.departure(here, record) is not left
        assert came.exists() is left
    assert not record.exists()
    # It may come again as soon as the next node has heard, and then its names and leases are its own.
    assert other.asked == ["Commit", "remove", "give back", *["Forget"] * 3]
