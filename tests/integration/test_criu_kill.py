"""Whoever is killed in the middle of a dump or a restore: the container runs on, or the failure is clean."""

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

from engines.api import CheckpointRequest, PhaseInfo, ReleaseRequest, RestoreRequest
from engines.criu.journal import Journal
from engines.criu.undo import call_processes
from engines.processes import alive, start_time
from tests.support import soak
from tests.support.containers import (
    CHECKOUT,
    WORKLOADS,
    Client,
    Network,
    Output,
    frozen,
    lab,
    live,
    processes_with,
    until,
)
from tests.support.criu import CriuLab

pytestmark = pytest.mark.engine

Victim = Literal["caller", "runtime", "criu"]
VICTIMS: tuple[Victim, ...] = ("caller", "runtime", "criu")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[CriuLab]:
    with lab(tmp_path) as inner:
        yield CriuLab(inner)


class Call:
    """One call of the engine in a process of its own."""

    def __init__(
        self,
        place: CriuLab,
        call: str,
        container_id: str,
        request: dict[str, Any],
        *,
        engine: str = "criu",
    ) -> None:
        self.place, self.container_id = place, container_id
        self.journal = Journal(
            operation=call,
            container_id=container_id,
            runtime="",
            runtime_args=[],
            root="",
            state=str(place.state_path(container_id)),
            search_path="",
            image="",
        )
        self.report = place.lab.path / f"report-{time.monotonic_ns()}"
        order = {
            "engine": engine,
            "call": call,
            "request": request,
            "report": self.report,
            "settings": asdict(place.settings(container_id)),
        }
        output = place.outputs[container_id] = Output() if call == "restore" else place.outputs[container_id]
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

    def victim(self, kind: Victim) -> list[int]:
        """The processes to kill, as far as they are there."""
        if kind == "caller":
            return [self.process.pid]
        name = "runc" if kind == "runtime" else "criu"
        found: list[int] = []
        for pid in call_processes(self.journal):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() == name:
                    found.append(pid)
        return found

    def kill(self, kind: Victim, after_s: float) -> bool:
        """Kill a victim so long after the call began; False if it was not there."""
        while time.monotonic() - self.began < after_s:
            time.sleep(0.001)
        pids = self.victim(kind)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def end(self) -> str:
        """Wait for the call and for its guardian; the last line of its report."""
        self.process.wait(60)
        state = str(self.place.state_path(self.container_id))
        until(lambda: not processes_with(state), timeout_s=30, what="the guardian ends")
        said = self.report.read_text().splitlines()[-1]
        if said == "go" and (self.place.state_path(self.container_id) / "criu-call.json").exists():
            # Killed before it had a guardian, it has touched nothing: its journal is for the next one.
            assert not frozen(self.place.lab.tag)
            assert not self.place.yards()
            self.place.engine(self.container_id).undo(self.container_id)
        return said


def dump_request(place: CriuLab, container_id: str, image: Path, *, leave_running: bool) -> dict[str, Any]:
    return asdict(
        CheckpointRequest(
            container_id=container_id,
            bundle_path=place.bundle(container_id),
            image_path=image,
            timeout_s=60,
            leave_running=leave_running,
        )
    )


def wake_request(
    place: CriuLab, container_id: str, image: Path, tcp: Literal["keep", "close"]
) -> RestoreRequest:
    return RestoreRequest(
        container_id=container_id,
        bundle_path=place.bundle(container_id),
        image_path=image,
        timeout_s=60,
        held=True,
        tcp=tcp,
    )


class Served:
    """A container that serves a live client."""

    def __init__(self, place: CriuLab, network: Network) -> None:
        self.network = network
        self.id = place.start(
            netns_path=network.pod_path, args=live("--port", "7000", "--children", "2", "--fill", "8")
        )
        self.place = place
        self.pid = place.pid(self.id)
        self.started = start_time(self.pid)
        self.client: Client = place.lab.client(network, 7000)

    def goes_on(self) -> bool:
        """Whether its client is served on; False if the connection broke."""
        try:
            self.client.goes_on()
        except AssertionError:
            if self.client.ask()[2] == "-":
                raise
            return False
        return True

    def close(self) -> None:
        self.client.close()
        self.place.kill(self.id)


def check_clean(place: CriuLab, served: Served, *, lock: bool) -> None:
    assert lock or not served.network.tables(), "a network lock is left"
    assert not place.yards()
    assert not (place.state_path(served.id) / "criu-call.json").exists()


@pytest.mark.soak
@pytest.mark.parametrize("leave_running", [True, False], ids=["leave-running", "stop"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_dump(
    request: pytest.FixtureRequest, place: CriuLab, victim: Victim, leave_running: bool
) -> None:
    network = place.network()
    served = Served(place, network)
    # The first, undisturbed call tells how long one takes.
    image = place.image_root / "whole"
    call = Call(place, "checkpoint", served.id, dump_request(place, served.id, image, leave_running=True))
    assert call.end() == "done"
    whole_s = time.monotonic() - call.began
    seen: dict[str, int] = {}
    moments = soak.moments()
    for point in range(soak.POINTS):
        image = place.image_root / f"i{point}"
        call = Call(
            place, "checkpoint", served.id, dump_request(place, served.id, image, leave_running=leave_running)
        )
        after_s = whole_s * moments[point]
        hit = call.kill(victim, after_s)
        said = call.end()
        where = f"{victim} at {after_s:.3f} s ({'hit' if hit else 'missed'}; {said})"
        if alive(served.pid, served.started):
            outcome = "kept" if said == "done" else "undone"
            assert leave_running or said != "done", where
            if victim == "criu" and not served.goes_on():
                # Between CRIU's death and our freeze its tasks run for a moment, with sockets in repair
                # mode: a task that uses one then sees it fail, and gives the connection up.
                outcome = "reset"
            else:
                served.client.goes_on()
            assert not frozen(place.lab.tag), where
            # A caller may die when all is done, and before it can say so.
            assert image.exists() == (said == "done") or (victim, said) == ("caller", "go"), where
            check_clean(place, served, lock=False)
        elif victim == "criu" and not image.exists():
            # Killed while a task had CRIU's registers, which only CRIU could give back. The failure is clean.
            outcome = "died"
            assert "DumpFailed" in said, where
            check_clean(place, served, lock=False)
        else:
            # The dump had been allowed to end the source: then the image is whole, and wakes.
            outcome = "stopped"
            assert not leave_running, where
            assert image.exists(), where
            place.runc.delete(served.id)
            until(lambda: not place.residue(served.id), what=where)
            check_clean(place, served, lock=True)
            target = place.prepare(netns_path=network.pod_path, args=live())
            place.restore(place.engine(target), wake_request(place, target, image, "keep"))
            place.engine(target).release(ReleaseRequest(container_id=target, timeout_s=10))
            served.client.goes_on()
            served.id, served.pid = target, place.pid(target)
            served.started = start_time(served.pid)
            check_clean(place, served, lock=False)
        seen[outcome] = seen.get(outcome, 0) + 1
        if outcome in ("reset", "died"):
            served.close()
            until(lambda: not place.residue(served.id), what=where)
            network = place.network()
            served = Served(place, network)
    if soak.SOAK:  # a few moments say nothing about shares
        assert seen.get("reset", 0) + seen.get("died", 0) <= soak.POINTS / 2
    soak.tell_kills(request, "criu", {f"dumps {outcome}": n for outcome, n in seen.items()})


@pytest.mark.soak
@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_restore(request: pytest.FixtureRequest, place: CriuLab, victim: Victim) -> None:
    network = place.network()
    served = Served(place, network)
    image = place.image_root / "i"
    place.engine(served.id).checkpoint(
        CheckpointRequest(
            container_id=served.id, bundle_path=place.bundle(served.id), image_path=image, timeout_s=60
        )
    )
    files = sorted((path.name, path.stat().st_size) for path in image.iterdir())
    whole_s = 0.0
    seen: dict[str, int] = {}
    moments = soak.moments()
    for point in range(-1, soak.POINTS):
        target = place.prepare(netns_path=network.pod_path, args=live())
        # The client's connection can only be kept once; the others test what is left behind.
        call = Call(
            place,
            "restore",
            target,
            asdict(wake_request(place, target, image, "keep" if point < 0 else "close")),
        )
        hit, after_s = False, whole_s * moments[max(point, 0)]
        if point >= 0:
            hit = call.kill(victim, after_s)
        said = call.end()
        whole_s = whole_s or time.monotonic() - call.began
        where = f"{victim} at {after_s:.3f} s ({'hit' if hit else 'missed'}; {said})"
        ticks = place.progress(target)
        if said == "done" or (place.pid(target) and victim == "caller"):
            outcome = "held"
            assert place.progress(target) == ticks == 0, where
            assert place.runc.state(target)["status"] == "paused", where
            place.engine(target).release(ReleaseRequest(container_id=target, timeout_s=10))
            until(lambda: place.progress(target) > 0, what=where)
            if point < 0:
                served.client.goes_on()
            place.kill(target)
        else:
            # CRIU's last step is to let go of the tasks that it has stopped. Killed in it, they run until we
            # notice; no other death lets them.
            outcome = "ran" if ticks else "undone"
            assert victim == "criu" or ticks == 0, f"{where}: it ran"
        until(lambda: not place.residue(target), what=f"{where}: {place.residue(target)}")
        assert not network.tables(), where
        assert not place.yards(), where
        assert sorted((path.name, path.stat().st_size) for path in image.iterdir()) == files, where
        if point >= 0:
            seen[outcome] = seen.get(outcome, 0) + 1
    if soak.SOAK:
        assert seen.get("ran", 0) <= soak.POINTS / 4
    soak.tell_kills(request, "criu", {f"restores {outcome}": n for outcome, n in seen.items()})


def test_a_late_guardian_leaves_the_next_call_alone(place: CriuLab) -> None:
    """The next call has undone the killed one and is at work when the guardian of the killed one wakes up."""
    source = place.start()
    state = str(place.state_path(source))
    report = place.lab.path / "report"
    order = {
        "settings": asdict(place.settings(source)),
        "request": dump_request(place, source, place.image_root / "killed", leave_running=True),
        "verdict": "",
        "report": report,
    }
    killed = subprocess.Popen(
        [sys.executable, WORKLOADS / "undecided.py", CHECKOUT, json.dumps(order, default=str)],
        stdin=subprocess.DEVNULL,
    )
    until(lambda: report.exists() and report.read_text() == "waiting", what="the dump is complete")

    def guardians() -> list[int]:
        return [pid for pid, line in processes_with(state) if "guardian.py" in line]

    (guardian,) = guardians()
    os.kill(guardian, signal.SIGSTOP)
    killed.kill()
    killed.wait()

    def wake_it(phase: str, info: PhaseInfo) -> None:
        if phase == "frozen":
            os.kill(guardian, signal.SIGCONT)
            until(lambda: guardian not in guardians(), what="the late guardian ends")

    image = place.image_root / "next"
    place.engine(source).checkpoint(
        CheckpointRequest(
            container_id=source,
            bundle_path=place.bundle(source),
            image_path=image,
            timeout_s=60,
            on_phase=wake_it,
        )
    )
    assert not (place.image_root / "killed").exists()
    place.kill(source)
    target = place.prepare()
    place.restore(place.engine(target), wake_request(place, target, image, "close"))
    place.engine(target).release(ReleaseRequest(container_id=target, timeout_s=10))
    until(lambda: place.progress(target) > 1, what="it wakes up")
