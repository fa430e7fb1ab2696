"""A dump whose caller keeps a verdict: whoever dies, the source does what the verdict says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from engines.api import (
    CheckpointRequest,
    DumpFailed,
    InvalidRequest,
    PhaseInfo,
    ReleaseRequest,
    RestoreRequest,
)
from engines.processes import alive, start_time
from tests.support.containers import CHECKOUT, WORKLOADS, lab, live, processes_with, until
from tests.support.criu import CriuLab

pytestmark = pytest.mark.engine


@pytest.fixture
def place(tmp_path: Path) -> Iterator[CriuLab]:
    with lab(tmp_path) as inner:
        yield CriuLab(inner)


def _has_open(pid: int, inode: int) -> bool:
    """Whether a process has a file open."""
    with contextlib.suppress(OSError):
        return any(entry.stat().st_ino == inode for entry in Path(f"/proc/{pid}/fd").iterdir())
    return False


class Moving:
    """A container with a live client, and a dump of it that keeps a verdict."""

    def __init__(self, place: CriuLab) -> None:
        self.place = place
        self.network = place.network()
        self.id = place.start(
            netns_path=self.network.pod_path, args=live("--port", "7000", "--children", "1", "--fill", "4")
        )
        self.pid = place.pid(self.id)
        self.started = start_time(self.pid)
        self.client = place.lab.client(self.network, 7000)
        self.image = place.image_root / "i"
        self.verdict = place.lab.path / "verdict"
        self.state = str(place.state_path(self.id))

    def request(self) -> CheckpointRequest:
        return CheckpointRequest(
            container_id=self.id,
            bundle_path=self.place.bundle(self.id),
            image_path=self.image,
            timeout_s=60,
            verdict_path=self.verdict,
        )

    def killed(self, verdict: str, *, guardian: bool = False) -> None:
        """Begin a dump, and kill it where it waits with this verdict; the guardian has ended then."""
        report = self.place.lab.path / "report"
        order = {
            "settings": asdict(self.place.settings(self.id)),
            "request": asdict(self.request()),
            "verdict": verdict,
            "report": report,
        }
        process = subprocess.Popen(
            [sys.executable, WORKLOADS / "undecided.py", CHECKOUT, json.dumps(order, default=str)],
            stdin=subprocess.DEVNULL,
        )
        until(lambda: report.exists() and report.read_text() == "waiting", what="the dump waits")
        if guardian:
            for pid in self.guardians():
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
        until(lambda: not self.guardians(), what="the guardian ends")

    def kill_criu(self) -> list[int]:
        """Kill CRIU of the dump, and nobody else; its processes."""
        with Path(self.state, "work", "dump.log").open() as log:
            inode = os.fstat(log.fileno()).st_ino
        found = [pid for pid, _ in processes_with("criu") if _has_open(pid, inode)]
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return found

    def guardians(self) -> list[int]:
        return [pid for pid, line in processes_with(self.state) if "guardian.py" in line]

    def decide(self, verdict: str) -> None:
        draft = self.verdict.with_suffix(".new")
        draft.write_text(f"{verdict}\n")
        draft.rename(self.verdict)

    def stands_still(self) -> None:
        """Fail unless the container is there and nothing of it runs."""
        assert alive(self.pid, self.started)
        before = self.place.progress(self.id)
        time.sleep(0.3)
        assert self.place.progress(self.id) == before
        assert self.image.exists()
        with pytest.raises(DumpFailed) as caught:
            self.place.engine(self.id).undo(self.id)
        assert caught.value.after == "paused"
        assert not caught.value.undone

    def runs_on(self) -> None:
        assert alive(self.pid, self.started)
        self.client.goes_on()
        assert not self.image.exists()
        assert not self.network.tables()
        assert not (self.place.state_path(self.id) / "criu-call.json").exists()

    def has_moved(self) -> None:
        """Fail unless the source is gone for good and its image wakes with the connection."""
        place = self.place
        assert not alive(self.pid, self.started)
        until(lambda: not place.residue(self.id), what=f"{place.residue(self.id)}")
        target = place.prepare(netns_path=self.network.pod_path, args=live())
        place.restore(
            place.engine(target),
            RestoreRequest(
                container_id=target,
                bundle_path=place.bundle(target),
                image_path=self.image,
                timeout_s=60,
                held=True,
                tcp="keep",
            ),
        )
        place.engine(target).release(ReleaseRequest(container_id=target, timeout_s=10))
        self.client.goes_on()
        place.kill(target)


@pytest.mark.parametrize("guardian", [False, True], ids=["guarded", "guardian-killed"])
@pytest.mark.parametrize("decision", ["abort", "commit"])
def test_an_open_verdict_keeps_the_source_as_it_is(place: CriuLab, decision: str, guardian: bool) -> None:
    moving = Moving(place)
    moving.killed("hold", guardian=guardian)
    moving.stands_still()
    moving.decide(decision)
    place.engine(moving.id).undo(moving.id)
    if decision == "abort":
        moving.runs_on()
    else:
        moving.has_moved()


@pytest.mark.parametrize("verdict", ["", "abort"])
def test_without_a_verdict_a_killed_dump_is_undone(place: CriuLab, verdict: str) -> None:
    moving = Moving(place)
    moving.killed(verdict)
    moving.runs_on()


def test_a_decided_dump_is_carried_through(place: CriuLab) -> None:
    moving = Moving(place)
    moving.killed("commit")
    moving.has_moved()


def test_a_decision_outlives_the_deadline_and_a_veto(place: CriuLab) -> None:
    moving = Moving(place)

    def late(phase: str, info: PhaseInfo) -> None:
        if phase == "dumped":
            moving.decide("commit")
            until(lambda: time.monotonic() > began + timeout_s, what="the deadline passes")
            raise KeyboardInterrupt

    timeout_s = 6.0  # enough for a slow machine to dump in
    request = CheckpointRequest(
        container_id=moving.id,
        bundle_path=place.bundle(moving.id),
        image_path=moving.image,
        timeout_s=timeout_s,
        verdict_path=moving.verdict,
        on_phase=late,
    )
    began = time.monotonic()
    place.engine(moving.id).checkpoint(request)
    moving.has_moved()


@pytest.mark.parametrize("word", ["hold", "commit"])
def test_a_verdict_from_before_ends_nobody(place: CriuLab, word: str) -> None:
    """A dump that failed under it would end its source, and have no image."""
    moving = Moving(place)
    moving.decide(word)
    engine = place.engine(moving.id)
    request = replace(moving.request(), on_phase=lambda *_: None)
    with pytest.raises(InvalidRequest, match="is no place for a verdict"):
        engine.checkpoint(request)
    moving.verdict.unlink()
    with pytest.raises(InvalidRequest, match="is no place for a verdict"):
        engine.checkpoint(replace(request, verdict_path=Path("verdict")))
    moving.runs_on()


def test_a_veto_waits_for_the_verdict(place: CriuLab) -> None:
    moving = Moving(place)

    def waver(phase: str, info: PhaseInfo) -> None:
        if phase == "dumped":
            moving.decide("hold")

    engine = place.engine(moving.id)
    request = CheckpointRequest(
        container_id=moving.id,
        bundle_path=place.bundle(moving.id),
        image_path=moving.image,
        timeout_s=60,
        verdict_path=moving.verdict,
        on_phase=waver,
    )
    with pytest.raises(InvalidRequest):
        engine.checkpoint(request)
    moving.stands_still()
    moving.decide("abort")
    engine.undo(moving.id)
    moving.runs_on()


@pytest.mark.parametrize("decision", ["abort", "commit"])
def test_criu_alone_dies_while_the_verdict_is_open(place: CriuLab, decision: str) -> None:
    """The tasks that it had stopped must not run on: the image may be running somewhere else soon."""
    moving = Moving(place)

    def undecided(phase: str, info: PhaseInfo) -> None:
        if phase != "dumped":
            return
        moving.decide("hold")
        killed = moving.kill_criu()
        assert killed
        until(lambda: not any(start_time(pid) for pid in killed), what="CRIU is gone")
        before = place.progress(moving.id)
        time.sleep(0.5)
        assert place.progress(moving.id) == before
        moving.decide(decision)
        if decision == "abort":
            raise InterruptedError

    request = replace(moving.request(), on_phase=undecided)
    if decision == "abort":
        with pytest.raises(InterruptedError):
            place.engine(moving.id).checkpoint(request)
        moving.runs_on()
    else:
        place.engine(moving.id).checkpoint(request)
        moving.has_moved()
