"""The engine's view of the driver, by the real packages on a fake driver library, and by the fake program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.cuda import driver as drivers
from engines.cuda import helper
from engines.cuda.driver import Driver, DriverError
from tests.support.containers import WORKLOADS, until
from tests.support.gpu import Fabric

NOT_READY, NOT_SUPPORTED = 600, 801


class Holder:
    """A process on this machine that holds a pretended GPU."""

    def __init__(self, fabric: Fabric, *options: str) -> None:
        words = fabric.program_words(*options, directory=str(fabric.path))
        words[words.index("/workloads/fake_gpu.py")] = str(WORKLOADS / "fake_gpu.py")
        self.process = subprocess.Popen([sys.executable, *words[1:]], stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        assert self.process.stdout
        assert self.process.stdout.readline().startswith("tick")

    def sum(self) -> str:
        os.kill(self.pid, signal.SIGUSR1)
        assert self.process.stdout
        return next(line for line in self.process.stdout if line.startswith("sum"))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fabric:
    made = Fabric(tmp_path / "fabric")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def holder(fabric: Fabric) -> Iterator[Holder]:
    made = Holder(fabric)
    yield made
    made.close()


@pytest.fixture(params=["bindings", "program"])
def driver(request: pytest.FixtureRequest, fabric: Fabric) -> Driver:
    found = drivers.find(str(fabric.program.parent), request.param)
    assert found is not None
    assert found.way == request.param
    return found


def test_the_whole_way_and_back(fabric: Fabric, holder: Holder, driver: Driver) -> None:
    before = holder.sum()
    assert driver.states([holder.pid, os.getpid()]) == {holder.pid: "running", os.getpid(): None}
    driver.act("lock", holder.pid, timeout_s=10)
    assert driver.states([holder.pid]) == {holder.pid: "locked"}
    driver.act("checkpoint", holder.pid, timeout_s=10)
    assert driver.states([holder.pid]) == {holder.pid: "checkpointed"}
    assert fabric.vram(fabric.uuids[0]) == 0
    driver.act("restore", holder.pid, timeout_s=10)
    driver.act("unlock", holder.pid, timeout_s=10)
    assert holder.sum() == before


def test_to_another_gpu(fabric: Fabric, holder: Holder, driver: Driver) -> None:
    old, new = fabric.uuids
    before = holder.sum()
    for action in ("lock", "checkpoint"):
        driver.act(action, holder.pid, timeout_s=10)
    with pytest.raises(DriverError) as caught:  # a map must name every GPU that the process sees
        driver.act("restore", holder.pid, timeout_s=10, pairs={old: new})
    assert caught.value.name == "CUDA_ERROR_INVALID_VALUE"
    driver.act("restore", holder.pid, timeout_s=10, pairs={old: new, new: old})
    driver.act("unlock", holder.pid, timeout_s=10)
    assert holder.sum() == before
    assert (fabric.vram(old), fabric.vram(new)) == (0, 1)


def test_what_is_out_of_turn_is_refused(holder: Holder, driver: Driver) -> None:
    for action in ("checkpoint", "restore", "unlock"):
        with pytest.raises(DriverError) as caught:
            driver.act(action, holder.pid, timeout_s=10)
        assert caught.value.name == "CUDA_ERROR_ILLEGAL_STATE"
    assert driver.states([holder.pid]) == {holder.pid: "running"}


def test_a_lock_that_takes_too_long_leaves_the_process_running(
    fabric: Fabric, holder: Holder, driver: Driver
) -> None:
    fabric.together([holder.pid, os.getpid()])  # the other one is never locked
    with pytest.raises(DriverError) as caught:
        driver.act("lock", holder.pid, timeout_s=0.3)
    assert caught.value.name == "CUDA_ERROR_NOT_READY"
    assert "NCCL" in caught.value.words()
    assert driver.states([holder.pid]) == {holder.pid: "running"}


def test_a_call_that_hangs_is_given_up(
    fabric: Fabric, holder: Holder, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "_START_S", 0.5)
    driver.act("lock", holder.pid, timeout_s=10)
    fabric.inject((holder.pid, "checkpoint", 60_000, 0))
    began = time.monotonic()
    with pytest.raises(DriverError) as caught:
        driver.act("checkpoint", holder.pid, timeout_s=0.5)
    assert caught.value.name == "deadline"
    assert time.monotonic() - began < 30
    assert driver.states([holder.pid]) == {holder.pid: "locked"}


def test_what_the_driver_cannot_do_is_named(fabric: Fabric, holder: Holder, driver: Driver) -> None:
    driver.act("lock", holder.pid, timeout_s=10)
    fabric.inject(("*", "checkpoint", 0, NOT_SUPPORTED))
    with pytest.raises(DriverError) as caught:
        driver.act("checkpoint", holder.pid, timeout_s=10)
    assert "unified (managed) memory" in caught.value.words()


def test_a_helper_dies_with_whoever_started_it(fabric: Fabric, holder: Holder, driver: Driver) -> None:
    fabric.inject((holder.pid, "lock", 60_000, 0))
    program = (
        "import json, sys; from engines.cuda.driver import Driver; "
        f"Driver(site={driver.site!r}, program={driver.program!r}).act('lock', {holder.pid}, timeout_s=50)"
    )
    caller = subprocess.Popen([sys.executable, "-c", program])
    children = Path(f"/proc/{caller.pid}/task/{caller.pid}/children")
    child = int(until(lambda: children.read_text().split(), what="the helper starts")[0])
    until(lambda: Path(f"/proc/{child}/status").read_text().count("SigCgt") == 1)
    time.sleep(0.3)  # past the helper's own start, into the call
    caller.kill()
    caller.wait()
    until(lambda: not Path(f"/proc/{child}").exists() or "Z" in state_of(child), what="the helper dies")
    assert driver.states([holder.pid]) == {holder.pid: "running"}


def test_a_helper_whose_starter_is_gone_does_nothing(holder: Holder, driver: Driver) -> None:
    order = {"parent": 1, "site": list(driver.site), "program": driver.program, "action": "lock"}
    order |= {"pid": holder.pid, "timeout_ms": 5000, "pairs": {}}
    done = subprocess.run([sys.executable, "-IS", helper.__file__, json.dumps(order)], check=False)
    assert done.returncode == 1
    assert driver.states([holder.pid]) == {holder.pid: "running"}


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_devices_and_who_is_on_them(fabric: Fabric, holder: Holder, driver: Driver) -> None:
    told = driver.look()
    assert told["driver"] == "580.65.06"
    first, second = told["devices"]
    assert (first["uuid"], first["model"], first["minor"]) == (fabric.uuids[0], "NVIDIA H100", 0)
    assert first["used"] == {str(holder.pid): 64 << 20}
    assert first["total_bytes"] - first["free_bytes"] == 64 << 20
    assert not second["used"]
    assert not first["mig"]


def test_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    found = drivers.find("", "bindings")
    assert found
    with pytest.raises(DriverError, match=r"[Nn]ot [Ff]ound"):
        found.look()
    with pytest.raises(DriverError, match=r"libcuda|driver"):
        found.states([1])


def test_without_the_packages_or_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert drivers.find(str(tmp_path), "program") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    assert drivers.find(str(tmp_path)) is None
