"""The promise of a container that comes from another node: who waits, for what, and what ends the waiting."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from shim import promise as module
from shim.errors import Busy, CalledOff, ShimError
from shim.images.layout import Reference
from shim.promise import Plan, Promise, Waiting

PLAN = Plan(migration="0" * 16, name="main")
OURS = PLAN.migration
WHO = Waiting(container_id="c1", root="/run/runc", directory="/run/torpor/c1", netns="/run/netns/p")


@pytest.fixture
def promise(tmp_path: Path) -> Promise:
    made = Promise.of(tmp_path, Reference(namespace="default", name="web"))
    made.make(PLAN)
    return made


def later(work: Callable[[], object]) -> None:
    threading.Timer(0.1, work).start()


def test_the_image_comes_and_may_run(promise: Promise) -> None:
    assert promise.exists()
    assert promise.container_name == "main"
    assert promise.waiting() is None
    seen: list[Waiting | None] = []
    later(lambda: (seen.append(promise.waiting()), promise.came("sha256:00")))
    with promise.awaited(WHO):
        pass
    assert seen == [WHO]
    assert promise.waiting() is None
    later(lambda: promise.decide(OURS, "commit"))
    promise.permits("c1", "sha256:00")
    promise.permits("c1", "sha256:00")
    promise.remove(OURS)
    assert not promise.exists()


@pytest.mark.parametrize("end", ["abort", "remove"])
def test_it_is_called_off(promise: Promise, end: str) -> None:
    later(lambda: promise.remove(OURS) if end == "remove" else promise.decide(OURS, "abort"))
    said = "could not create container 'c1': its migration was called off"
    with pytest.raises(CalledOff, match=said), promise.awaited(WHO):
        raise AssertionError
    with pytest.raises(CalledOff, match="could not start container 'c1'"):
        promise.permits("c1", "sha256:00")


def test_nobody_decides(promise: Promise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    promise.came("sha256:00")
    with pytest.raises(CalledOff, match=r"nobody has decided .* within 0\.05 s"):
        promise.permits("c1", "sha256:00")


def test_one_waits_and_says_why_it_failed(promise: Promise) -> None:
    promise.came("sha256:00")
    with pytest.raises(ShimError, match="room"), promise.awaited(WHO):
        with pytest.raises(Busy, match="another one waits"), Promise(promise.path).awaited(WHO):
            raise AssertionError
        raise ShimError("no\nroom")
    assert promise.failure() == "no room"
    assert promise.waiting() is None
    with promise.awaited(WHO):  # the caller's next try
        assert promise.failure() == ""


def test_who_only_looks_keeps_nobody_away(promise: Promise) -> None:
    promise.came("sha256:00")
    descriptor = os.open(promise.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as a look does, for a moment
    later(lambda: os.close(descriptor))
    with promise.awaited(WHO):
        pass


def test_a_name_is_promised_once(promise: Promise) -> None:
    with pytest.raises(ShimError, match="on its way here already"):
        promise.make(msgspec.structs.replace(PLAN, migration="1" * 16))


def test_a_decision_about_nothing_does_no_harm(tmp_path: Path) -> None:
    Promise(tmp_path / "_" / "absent").decide(OURS, "abort")
    Promise(tmp_path / "_" / "absent").remove(OURS)
    assert list(tmp_path.iterdir()) == []


def test_another_migration_of_the_name_has_no_say(promise: Promise) -> None:
    theirs = "1" * 16
    assert promise.is_of(OURS)
    assert not promise.is_of(theirs)
    promise.decide(theirs, "abort")
    promise.remove(theirs)
    promise.came("sha256:00")
    promise.decide(OURS, "commit")
    promise.permits("c1", "sha256:00")


def test_a_container_of_an_earlier_promise_never_starts_by_a_later_one(promise: Promise) -> None:
    promise.came("sha256:00")
    promise.decide(OURS, "abort")
    promise.remove(OURS)
    assert not promise.path.parent.exists()
    with pytest.raises(CalledOff, match="called off"):  # rather than a name that fits no container
        _ = promise.container_name
    promise.make(msgspec.structs.replace(PLAN, migration="1" * 16))
    promise.came("sha256:11")
    promise.decide("1" * 16, "commit")
    with pytest.raises(CalledOff, match="called off"):
        promise.permits("c1", "sha256:00")
    promise.permits("c2", "sha256:11")


def test_what_a_killed_removal_has_left_is_removed_again(promise: Promise) -> None:
    (promise.path / "lock").touch()
    promise.remove(OURS)
    promise.path.mkdir(parents=True)
    (promise.path / "lock").touch()
    (promise.path / f".{OURS}.new").touch()
    promise.remove(OURS)
    assert not promise.path.exists()


def test_a_damaged_promise_lets_nobody_start(promise: Promise) -> None:
    (promise.path / "plan.json").write_text("main")
    with pytest.raises(CalledOff, match=r"could not read .*plan\.json"):
        _ = promise.container_name
