"""The promise of a container that comes from another node: who waits, for what, and what ends the waiting."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shim import promise as module
from shim.errors import Busy, CalledOff, ShimError
from shim.images.layout import Reference
from shim.promise import Promise, Waiting

WHO = Waiting(container_id="c1", root="/run/runc", directory="/run/torpor/c1", netns="/run/netns/p")


@pytest.fixture
def promise(tmp_path: Path) -> Promise:
    made = Promise.of(tmp_path, Reference(namespace="default", name="web"))
    made.make("main")
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
    later(lambda: promise.decide("commit"))
    promise.permits("c1")
    promise.permits("c1")
    promise.remove()
    assert not promise.exists()


@pytest.mark.parametrize("end", ["abort", "remove"])
def test_it_is_called_off(promise: Promise, end: str) -> None:
    later(promise.remove if end == "remove" else lambda: promise.decide("abort"))
    said = "could not create container 'c1': its migration was called off"
    with pytest.raises(CalledOff, match=said), promise.awaited(WHO):
        raise AssertionError
    with pytest.raises(CalledOff, match="could not start container 'c1'"):
        promise.permits("c1")


def test_nobody_decides(promise: Promise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    with pytest.raises(CalledOff, match=r"nobody has decided .* within 0\.05 s"):
        promise.permits("c1")


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
        promise.make("main")


def test_a_decision_about_nothing_does_no_harm(tmp_path: Path) -> None:
    Promise(tmp_path / "absent").decide("abort")
    assert list(tmp_path.iterdir()) == []
