"""Whoever calls the CRIU+CUDA engine is killed: the container runs on, or there is an image, or nothing."""

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

import pytest

from engines.api import CheckpointRequest, ReleaseRequest, Restored, RestoreRequest
from tests.integration.test_criu_kill import Call
from tests.integration.test_cuda_engine import dump, goes_on, ranks_of, unharmed, wake
from tests.support import soak
from tests.support.containers import frozen, lab, processes_with, until
from tests.support.gpu import CudaLab, Fabric

pytestmark = [pytest.mark.engine, pytest.mark.soak]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaLab]:
    fabric = Fabric(tmp_path / "fabric")
    for name, value in fabric.environment.items():
        monkeypatch.setenv(name, value)
    with lab(tmp_path) as inner:
        yield CudaLab(inner, fabric)


_CALLER = """
import json, sys
from pathlib import Path
from engines.api import CheckpointRequest, EngineSettings, ReleaseRequest
from engines.cuda.engine import CudaEngine
order = json.loads(sys.argv[1])
paths = ("runtime_path", "root_path", "state_path", "python_path", "bundle_path", "image_path")
def typed(fields): return {name: Path(v) if name in paths and v else v for name, v in fields.items()}
engine = CudaEngine(EngineSettings(**typed(order["settings"])))
print("go", flush=True)
if order["request"]:
    engine.checkpoint(CheckpointRequest(**typed(order["request"])))
elif order["operation"] == "release":
    engine.release(ReleaseRequest(container_id=order["id"], timeout_s=60))
else:
    engine.suspend(order["id"], timeout_s=60)
print("done", flush=True)
"""


def killed(
    place: CudaLab, operation: str, container_id: str, after_s: float, image: Path
) -> tuple[bool, float]:
    """Kill a caller so long after its call began; whether it was done by then, and how long it was at work.

    Waits for the guardian.
    """
    request = CheckpointRequest(
        container_id=container_id,
        bundle_path=place.bundle(container_id),
        image_path=image,
        timeout_s=60,
        leave_running=operation == "checkpoint",
    )
    order = {
        "settings": asdict(place.settings(container_id)),
        "request": asdict(request) if operation in ("checkpoint", "stop") else None,
        "operation": operation,
        "id": container_id,
    }
    caller = subprocess.Popen(
        [sys.executable, "-c", _CALLER, json.dumps(order, default=str)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert caller.stdout
    assert caller.stdout.readline() == "go\n"
    began = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        caller.wait(after_s)
    took_s = time.monotonic() - began
    caller.kill()
    done = "done" in caller.communicate()[0]
    state = str(place.state_path(container_id))
    until(lambda: not processes_with(state), timeout_s=30, what="the guardian ends")
    return done, took_s


def has_happened(place: CudaLab, operation: str, container_id: str, image: Path) -> bool:
    if operation == "checkpoint":
        return image.exists()
    found = place.engine(container_id).gpu_processes(container_id)
    return any(one.state == "suspended" for one in found)


@pytest.mark.parametrize("operation", ["checkpoint", "suspend"])
def test_whoever_is_killed_the_container_runs_on(
    request: pytest.FixtureRequest, place: CudaLab, operation: str
) -> None:
    source = place.start(args=place.fabric.program_words("--ranks", "2"))
    ranks_of(place, source, 2)
    pid = place.pid(source)
    image = place.image_root / "i"
    whole_s = 60.0
    seen = {"undone": 0, "done": 0}
    for moment in [1.0, *soak.moments()]:  # the first one is not disturbed
        done, took_s = killed(place, operation, source, whole_s * moment, image)
        place.engine(source).undo(source)
        done = done or has_happened(place, operation, source, image)  # died before it could say so
        if done and operation == "suspend":
            place.engine(source).resume(source, timeout_s=20, pairs={})
        elif done:
            place.engine(source).discard(image)
        unharmed(place, source, pid)
        if whole_s < 60:
            seen["done" if done else "undone"] += 1
        else:
            assert done
        if done:  # the first call may have been the slowest by far
            whole_s = min(whole_s, took_s)
    assert seen["undone"]
    name = "dumps" if operation == "checkpoint" else "suspensions"
    soak.tell_kills(request, "criu-cuda", {f"{name} {outcome}": n for outcome, n in seen.items()})


def test_a_killed_dump_that_stops_its_source_leaves_the_source_or_the_image(
    request: pytest.FixtureRequest, place: CudaLab
) -> None:
    source = place.start()
    total = place.ask(source, signal.SIGUSR1, "sum")
    image = place.image_root / "i"
    whole_s = 60.0
    seen = {"undone": 0, "stopped": 0}
    for moment in [1.0, *soak.moments()]:  # the first one is not disturbed
        done, took_s = killed(place, "stop", source, whole_s * moment, image)
        place.engine(source).undo(source)
        outcome = "undone" if place.pid(source) else "stopped"
        if outcome == "undone":
            assert not done
            assert not image.exists()
        else:
            place.runc.delete(source)
            until(lambda gone=source: not place.residue(gone), what=f"{source} is gone whole")
            source = wake(place, image)
            place.engine(source).discard(image)
        goes_on(place, source)
        assert place.ask(source, signal.SIGUSR1, "sum") == total
        assert not place.yards()
        if whole_s < 60:
            seen[outcome] += 1
        else:
            whole_s = took_s
    soak.tell_kills(request, "criu-cuda", {f"dumps {outcome}": n for outcome, n in seen.items()})


def test_a_killed_release_leaves_the_container_held_or_running(
    request: pytest.FixtureRequest, place: CudaLab
) -> None:
    source = place.start()
    total = place.ask(source, signal.SIGUSR1, "sum")
    image = dump(place, source)
    whole_s = 60.0
    seen = {"undone": 0, "running": 0}
    for moment in [1.0, *soak.moments()]:  # the first one is not disturbed
        target = wake(place, image, held=True)
        _, took_s = killed(place, "release", target, whole_s * moment, image)
        outcome = "running"
        if place.runc.state(target)["status"] == "paused":
            outcome = "undone"
            place.engine(target).release(ReleaseRequest(container_id=target, timeout_s=20))
        goes_on(place, target)
        assert place.ask(target, signal.SIGUSR1, "sum") == total
        assert not list(place.state_path(target).glob("cuda-*.json"))
        place.kill(target)
        if whole_s < 60:
            seen[outcome] += 1
        else:
            whole_s = took_s
    soak.tell_kills(request, "criu-cuda", {f"releases {outcome}": n for outcome, n in seen.items()})


def restore_request(place: CudaLab, container_id: str, image: Path) -> RestoreRequest:
    return RestoreRequest(
        container_id=container_id, bundle_path=place.bundle(container_id), image_path=image, timeout_s=60
    )


def nothing_is_left(place: CudaLab, container_id: str, where: str) -> None:
    until(lambda: not place.residue(container_id), what=f"{where}: {place.residue(container_id)}")
    assert not place.yards(), where
    assert not frozen(place.lab.tag), where


def test_a_killed_restore_leaves_nothing_or_a_container(
    request: pytest.FixtureRequest, place: CudaLab
) -> None:
    source = place.start()
    total = place.ask(source, signal.SIGUSR1, "sum")
    image = dump(place, source)
    files = sorted((path.name, path.stat().st_size) for path in image.iterdir())
    whole_s = 0.0
    seen = {"undone": 0, "running": 0}
    for moment in [1.0, *soak.moments()]:  # the first one is not disturbed
        target = place.prepare()
        order = asdict(restore_request(place, target, image))
        call = Call(place, "restore", target, order, engine="criu-cuda")
        if whole_s:
            call.kill("caller", whole_s * moment)
        said = call.end()
        where = f"{moment:.3f} of {whole_s:.3f} s ({said})"
        status = place.runc.state(target).get("status")
        if status == "running":
            goes_on(place, target)
            assert place.ask(target, signal.SIGUSR1, "sum") == total, where
            place.kill(target)
        assert status in (None, "running"), f"{where}: it is {status}"
        place.engine(target).undo(target)  # if the call died before it had a guardian
        nothing_is_left(place, target, where)
        assert sorted((path.name, path.stat().st_size) for path in image.iterdir()) == files, where
        if whole_s:
            seen["running" if status else "undone"] += 1
        else:
            assert said == "done"
            whole_s = time.monotonic() - call.began
    soak.tell_kills(request, "criu-cuda", {f"restores {outcome}": n for outcome, n in seen.items()})


def test_a_restore_that_is_killed_between_its_two_stages_leaves_nothing(place: CudaLab) -> None:
    image = dump(place, place.start())
    target = place.prepare()
    child = os.fork()
    if child == 0:
        engine = place.engine(target)
        first_stage = engine._criu.restore

        def last_words(request: RestoreRequest, /) -> Restored:
            first_stage(request)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        engine._criu.restore = last_words
        place.restore(engine, restore_request(place, target, image))
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    until(lambda: not processes_with(str(place.state_path(target))), what="the guardian ends")
    nothing_is_left(place, target, "killed before the GPU's part")
