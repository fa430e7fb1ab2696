"""Whoever is killed in the middle of a gVisor checkpoint or restore: the container runs on, or is gone.

runsc's save goes on inside the sandbox when the command that asked for it is dead.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import pytest

from engines.api import CheckpointRequest, RestoreRequest
from engines.gvisor import undo
from engines.gvisor.calls import Guarded
from engines.gvisor.journal import Journal
from tests.support import soak
from tests.support.containers import CHECKOUT, WORKLOADS, Output, lab, live, processes_with, until
from tests.support.gvisor import GvisorLab

pytestmark = pytest.mark.engine

FILL_MIB = 48
Victim = Literal["caller", "runtime"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[GvisorLab]:
    with lab(tmp_path) as inner:
        yield GvisorLab(inner)


class Call:
    """One call of the engine in a process of its own."""

    def __init__(self, place: GvisorLab, call: str, container_id: str, request: dict[str, Any]) -> None:
        self.state_path = place.state_path(container_id)
        self.report = place.lab.path / f"report-{time.monotonic_ns()}"
        order = {
            "engine": "gvisor",
            "call": call,
            "request": request,
            "report": self.report,
            "settings": asdict(place.settings(container_id)),
        }
        if call == "restore":
            place.outputs[container_id] = Output()
        output = place.outputs[container_id]
        stream = output.write_fd if call == "restore" else subprocess.DEVNULL
        self.process = subprocess.Popen(
            [sys.executable, WORKLOADS / "call_engine.py", CHECKOUT, json.dumps(order, default=str)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )
        if call == "restore":
            output.handed_over()
        until(lambda: self.report.exists() and "go" in self.report.read_text(), what="the call begins")
        self.began = time.monotonic()

    def kill(self, victim: Victim, after_s: float) -> None:
        """Kill the caller, or runsc's command of the call, so long after the call began."""
        while time.monotonic() - self.began < after_s:
            time.sleep(0.001)
        journal = Journal.read(self.state_path)
        runtimes = undo.call_processes(journal) if journal else []
        for pid in [self.process.pid] if victim == "caller" else runtimes:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def end(self) -> str:
        """Wait for the call and for its guardian; the last line of its report."""
        self.process.wait(60)
        until(lambda: not self._at_work(), timeout_s=60, what="the guardian ends")
        return self.report.read_text().splitlines()[-1]

    def _at_work(self) -> list[int]:
        # What is about to be the guardian, or runsc, still has the caller's command line.
        names = ("guardian.py", "call_engine.py")
        found = processes_with(str(self.state_path))
        return [pid for pid, line in found if any(name in line for name in names)]


def started(place: GvisorLab) -> str:
    container_id = place.start(args=tuple(live("--fill", str(FILL_MIB))))
    until(lambda: place.progress(container_id) > 1, timeout_s=40, what="the container counts")
    return container_id


def prepared(place: GvisorLab) -> str:
    return place.prepare(args=tuple(live("--fill", str(FILL_MIB))))


def goes_on(place: GvisorLab, container_id: str) -> None:
    before = place.progress(container_id)
    until(lambda: place.progress(container_id) > before, what=f"{container_id} goes on from {before}")


def nothing_left(place: GvisorLab, container_id: str, said: str) -> None:
    # A call that died before it had a guardian has touched nothing, and leaves its journal for the next one.
    if place.residue(container_id) == ["journal"]:
        place.engine(container_id).undo(container_id)
    deadline = time.monotonic() + 20
    while left := place.residue(container_id):
        assert time.monotonic() < deadline, f"left after '{said}': {left}"
        time.sleep(0.01)


def dump(place: GvisorLab, container_id: str, image: Path) -> CheckpointRequest:
    return CheckpointRequest(
        container_id=container_id, bundle_path=place.bundle(container_id), image_path=image, timeout_s=60
    )


def wake(place: GvisorLab, container_id: str, image: Path) -> RestoreRequest:
    return RestoreRequest(
        container_id=container_id, bundle_path=place.bundle(container_id), image_path=image, timeout_s=60
    )


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["caller", "runtime"])
def test_a_killed_checkpoint_leaves_a_container_or_an_image(
    request: pytest.FixtureRequest, place: GvisorLab, victim: Victim
) -> None:
    container_id = started(place)
    memory = place.memory(container_id)
    # The first, undisturbed call tells how long one takes.
    image = place.image_root / "whole"
    call = Call(place, "checkpoint", container_id, asdict(dump(place, container_id, image)))
    assert call.end() == "done"
    whole_s = time.monotonic() - call.began
    seen = {"undone": 0, "stopped": 0}
    for point, moment in enumerate([1.0, *soak.moments()]):
        if point:
            image = place.image_root / f"i{point}"
            call = Call(place, "checkpoint", container_id, asdict(dump(place, container_id, image)))
            call.kill(victim, whole_s * moment)
        said = call.end()
        where = f"{victim} at {moment:.3f} of {whole_s:.3f} s ({said})"
        if place.pid(container_id):
            seen["undone"] += 1
            assert said != "done", where
            assert not image.exists(), f"{where}: an image is left of a checkpoint that was undone"
            goes_on(place, container_id)
            continue
        # The source had been allowed to die: it is gone whole, and the image gives it back.
        seen["stopped"] += point > 0
        nothing_left(place, container_id, where)
        container_id = prepared(place)
        place.restore(place.engine(container_id), wake(place, container_id, image))
        goes_on(place, container_id)
        assert place.memory(container_id) == memory, where
    place.engine(container_id).checkpoint(dump(place, container_id, place.image_root / "last"))
    soak.tell_kills(request, "gvisor", {f"dumps {outcome}": n for outcome, n in seen.items()})


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["caller", "runtime"])
def test_a_killed_restore_leaves_nothing_or_a_container(
    request: pytest.FixtureRequest, place: GvisorLab, victim: Victim
) -> None:
    source = started(place)
    memory = place.memory(source)
    image = place.image_root / "i"
    place.engine(source).checkpoint(dump(place, source, image))
    sizes = {path.name: path.stat().st_size for path in image.iterdir()}
    whole_s = 0.0
    seen = {"undone": 0, "ran": 0}
    for point, moment in enumerate([1.0, *soak.moments()]):
        container_id = prepared(place)
        call = Call(place, "restore", container_id, asdict(wake(place, container_id, image)))
        if point:
            call.kill(victim, whole_s * moment)
        said = call.end()
        whole_s = whole_s or time.monotonic() - call.began
        where = f"{victim} at {moment:.3f} of {whole_s:.3f} s ({said})"
        if place.pid(container_id):  # a caller may die when all is done, and before it can say so
            assert said == "done" or (victim, said) == ("caller", "go"), where
            seen["ran"] += point > 0
            goes_on(place, container_id)
            assert place.memory(container_id) == memory, where
            place.kill(container_id)
        else:
            assert said != "done", where
            seen["undone"] += 1
        nothing_left(place, container_id, where)
        assert {path.name: path.stat().st_size for path in image.iterdir()} == sizes, where
    container_id = prepared(place)
    place.restore(place.engine(container_id), wake(place, container_id, image))
    goes_on(place, container_id)
    soak.tell_kills(request, "gvisor", {f"restores {outcome}": n for outcome, n in seen.items()})


def test_a_restore_that_dies_before_it_has_a_guardian_has_touched_nothing(
    place: GvisorLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = place.start()
    image = place.image_root / "i"
    place.engine(source).checkpoint(dump(place, source, image))
    container_id = place.prepare()
    child = os.fork()
    if child == 0:

        def die(guarded: Guarded) -> Guarded:
            guarded.journal.write()
            os.kill(os.getpid(), signal.SIGKILL)
            return guarded

        monkeypatch.setattr(Guarded, "__enter__", die)
        place.engine(container_id).restore(wake(place, container_id, image))
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert place.residue(container_id) == ["journal"]
    place.restore(place.engine(container_id), wake(place, container_id, image))
    goes_on(place, container_id)


def test_a_sandbox_that_dies_in_a_checkpoint_is_cleanly_gone(place: GvisorLab) -> None:
    for attempt in range(5):  # a save may end before it is met
        container_id = started(place)
        pid = place.pid(container_id)
        image = place.image_root / f"i{attempt}"
        call = Call(place, "checkpoint", container_id, asdict(dump(place, container_id, image)))
        until(lambda image=image: (image / "checkpoint.img").exists(), what="the save begins")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        said = call.end()
        nothing_left(place, container_id, said)
        if said != "done":
            assert said.startswith("failed DumpFailed stopped"), said
            assert not image.exists()
            return
    pytest.fail("no save was met")
