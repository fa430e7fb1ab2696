"""The CRIU+CUDA engine on real containers with pretended GPUs: what goes wrong, and what must not."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engines.api import (
    CheckpointRequest,
    DumpFailed,
    EngineError,
    EngineTimeout,
    ImageIncompatible,
    InvalidRequest,
    NotSupported,
    ReleaseRequest,
    RestoreFailed,
    RestoreRequest,
)
from engines.cuda import records
from engines.cuda.driver import Driver
from engines.cuda.node import find_driver
from tests.support import soak
from tests.support.containers import bind, frozen, lab, until
from tests.support.gpu import CudaLab, Fabric

pytestmark = pytest.mark.engine

OUT_OF_MEMORY, NOT_SUPPORTED, UNKNOWN = 2, 801, 999
SUCCESS = 0


@pytest.fixture
def fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fabric:
    made = Fabric(tmp_path / "fabric")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def place(tmp_path: Path, fabric: Fabric) -> Iterator[CudaLab]:
    with lab(tmp_path) as inner:
        yield CudaLab(inner, fabric)


def dump(
    place: CudaLab, container_id: str, name: str = "i", *, stay: bool = False, timeout_s: float = 60
) -> Path:
    image = place.image_root / name
    place.engine(container_id).checkpoint(
        CheckpointRequest(
            container_id=container_id,
            bundle_path=place.bundle(container_id),
            image_path=image,
            timeout_s=timeout_s,
            leave_running=stay,
        )
    )
    return image


def wake(
    place: CudaLab,
    image: Path,
    *,
    held: bool = False,
    timeout_s: float = 60,
    env: Sequence[str] = (),
    **spec: object,
) -> str:
    target = place.prepare(**spec)  # pyright: ignore[reportArgumentType]
    if env:
        path = place.bundle(target) / "config.json"
        document = json.loads(path.read_text())
        document["process"]["env"] += env
        path.write_text(json.dumps(document))
    place.restore(
        place.engine(target),
        RestoreRequest(
            container_id=target,
            bundle_path=place.bundle(target),
            image_path=image,
            timeout_s=timeout_s,
            held=held,
        ),
    )
    return target


def goes_on(place: CudaLab, container_id: str) -> None:
    before = place.progress(container_id)
    try:
        until(lambda: place.progress(container_id) > before + 2)
    except AssertionError as error:
        raise AssertionError(f"stands at {before}; {condition(place, container_id)}") from error


def condition(place: CudaLab, container_id: str) -> str:
    """How a container is, for messages."""
    state = place.runc.state(container_id).get("status")
    with contextlib.suppress(EngineError):
        found = place.engine(container_id).gpu_processes(container_id)
        return f"{state}; {found}; {place.fabric.calls()[-8:]}"
    return str(state)


def unharmed(place: CudaLab, container_id: str, pid: int) -> None:
    """The container runs on as if nothing had been, and nothing is left."""
    assert place.pid(container_id) == pid
    goes_on(place, container_id)
    assert "broken" not in place.outputs[container_id].text
    assert not frozen(place.lab.tag)
    assert not list(place.state_path(container_id).glob("cuda-*.json"))
    assert not list(place.image_root.iterdir())


def holders(place: CudaLab, container_id: str) -> list[int]:
    return [process.pid for process in place.engine(container_id).gpu_processes(container_id)]


def ranks_of(place: CudaLab, container_id: str, n: int) -> list[int]:
    until(lambda: len(holders(place, container_id)) == n, what=f"{n} ranks")
    return holders(place, container_id)


# --- the good way --------------------------------------------------------------------------------------


def test_through_the_program(tmp_path: Path, fabric: Fabric) -> None:
    with lab(tmp_path) as inner:
        place = CudaLab(inner, fabric, "program")
        source = place.start()
        total = place.ask(source, signal.SIGUSR1, "sum")
        target = wake(place, dump(place, source))
        assert place.ask(target, signal.SIGUSR1, "sum") == total


def test_ranks_of_one_job_are_all_locked_before_any_is_checkpointed(place: CudaLab) -> None:
    source = place.start(args=place.fabric.program_words("--ranks", "4"))
    pid = place.pid(source)
    place.fabric.together(ranks_of(place, source, 4))
    image = dump(place, source, stay=True)
    actions = [action for _, action, result in place.fabric.calls() if result == SUCCESS]
    assert actions == ["lock"] * 4 + ["checkpoint"] * 4 + ["restore"] * 4 + ["unlock"] * 4
    goes_on(place, source)
    needs = place.engine(source).inspect(image)
    assert needs.engine == "criu-cuda"
    assert [gpu.memory_bytes for gpu in needs.gpus] == [4 * 64 << 20, 0]
    (place.fabric.path / "together").unlink()
    target = wake(place, image)
    goes_on(place, target)
    assert len(holders(place, target)) == 4
    assert place.pid(source) == pid


def test_a_paused_container_is_left_paused(place: CudaLab) -> None:
    source = place.start()
    place.runc("pause", source)
    count = place.progress(source)
    image = dump(place, source, stay=True)
    assert place.runc.state(source)["status"] == "paused"
    assert len(frozen(place.lab.tag)) == 1
    assert place.progress(source) - count < 200, "it ran while it was to be paused"
    target = wake(place, image)
    goes_on(place, target)
    place.runc("resume", source)
    goes_on(place, source)


@pytest.mark.soak
def test_a_slow_lock_is_waited_for(place: CudaLab) -> None:
    source = place.start()
    delay_ms = 12_000 if soak.SOAK else 1500
    place.fabric.inject(("*", "lock", delay_ms, SUCCESS))
    began = time.monotonic()
    image = dump(place, source)
    assert time.monotonic() - began > delay_ms / 1000
    goes_on(place, wake(place, image))


def test_a_container_without_a_gpu_is_just_criu(place: CudaLab) -> None:
    source = place.start(args=["python", "-IS", "-u", "/workloads/live.py", "--fill", "1"])
    image = dump(place, source)
    assert place.engine(source).inspect(image).gpus == ()
    target = wake(place, image, held=True, args=["python"])
    place.engine(target).release(ReleaseRequest(container_id=target, timeout_s=20))
    goes_on(place, target)
    assert not place.fabric.calls()


# --- failures of a dump --------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["lock", "checkpoint"])
def test_a_failure_of_one_rank_gives_all_their_gpu_back(place: CudaLab, action: str) -> None:
    source = place.start(args=place.fabric.program_words("--ranks", "3"))
    pid = place.pid(source)
    ranks = ranks_of(place, source, 3)
    place.fabric.inject((ranks[1], action, 0, NOT_SUPPORTED))
    with pytest.raises(DumpFailed, match=r"unified \(managed\) memory") as caught:
        dump(place, source)
    assert caught.value.after == "running"
    given = [(p, a) for p, a, result in place.fabric.calls() if result == SUCCESS]
    others = [ranks[0], ranks[2]] if action == "lock" else ranks
    assert [p for p, a in given if a == "unlock"] == others[::-1], "unlocked in reverse order"
    restored = [p for p, a in given if a == "restore"]
    assert restored == ([] if action == "lock" else [ranks[2], ranks[0]])
    unharmed(place, source, pid)


def test_a_lock_that_waits_for_somebody_outside(place: CudaLab) -> None:
    source = place.start(args=place.fabric.program_words("--ranks", "2"))
    other = place.start()
    pid = place.pid(source)
    ranks = ranks_of(place, source, 2)
    place.fabric.together([*ranks, place.pid(other)])
    with pytest.raises(EngineTimeout, match=str(place.pid(other))) as caught:
        dump(place, source, timeout_s=2)
    assert caught.value.after == "running"
    assert "NCCL" in str(caught.value)
    unharmed(place, source, pid)
    goes_on(place, other)


def test_a_failure_of_criu_gives_the_gpu_back(place: CudaLab) -> None:
    source = place.start()
    pid = place.pid(source)
    with pytest.raises(ZeroDivisionError):
        place.engine(source).checkpoint(
            CheckpointRequest(
                container_id=source,
                bundle_path=place.bundle(source),
                image_path=place.image_root / "i",
                timeout_s=60,
                on_phase=lambda *_: 1 // 0,  # type: ignore[arg-type,return-value]
            )
        )
    unharmed(place, source, pid)


def test_a_gpu_that_cannot_be_given_back_at_once_is_given_back_later(place: CudaLab) -> None:
    source = place.start()
    pid = place.pid(source)
    place.fabric.inject(("*", "restore", 0, UNKNOWN))
    with pytest.raises(DumpFailed, match=r"could not undo") as caught:
        dump(place, source, stay=True)
    assert caught.value.after == "unknown"
    assert not list(place.image_root.iterdir())
    place.fabric.inject()
    place.engine(source).resume(source, timeout_s=20, pairs={})
    unharmed(place, source, pid)


@pytest.mark.parametrize("limit", ["mig", "mps", "graphics", "left open", "somebody else"])
def test_known_limits_are_refused_by_name(place: CudaLab, tmp_path: Path, limit: str) -> None:
    device = tmp_path / "nvidia-uvm"
    device.write_text("")
    seen = bind(device, "/dev/nvidia-uvm")
    words = place.fabric.program_words(*(["--loose", "/dev/nvidia-uvm"] if limit == "left open" else []))
    if limit == "graphics":
        words = [*live_with_device(), "/dev/nvidia-uvm"]
    container_id = place.start(args=words, mounts=[seen])
    pid = place.pid(container_id)
    if limit in ("mig", "mps"):
        mig, mps = ([0], []) if limit == "mig" else ([], [0])
        place.fabric.set_devices(["H100", "H100"], uuids=place.fabric.uuids, mig=mig, mps=mps)
    if limit == "somebody else":
        driver = driver_of(place, container_id)
        driver.act("lock", pid, timeout_s=10)
    wanted = {
        "mig": "MIG",
        "mps": "MPS",
        "graphics": "does not use CUDA",
        "left open": "still has /dev/nvidia-uvm open",
        "somebody else": "somebody else is checkpointing",
    }
    with pytest.raises(NotSupported, match=wanted[limit]) as caught:
        dump(place, container_id)
    assert caught.value.after == "running"
    if limit == "somebody else":
        driver_of(place, container_id).act("unlock", pid, timeout_s=10)
    unharmed(place, container_id, pid)


def test_gpu_memory_that_does_not_fit_into_the_host_is_refused(place: CudaLab) -> None:
    huge = place.start(args=place.fabric.program_words("--mib", str(60 << 10)))
    pid = place.pid(huge)
    for call in (lambda: dump(place, huge), lambda: place.engine(huge).suspend(huge, timeout_s=20)):
        with pytest.raises(NotSupported, match=r"61440 MiB on GPUs.*are left in this machine"):
            call()
    unharmed(place, huge, pid)
    limited = place.prepare(args=place.fabric.program_words("--mib", "256"))
    path = place.bundle(limited) / "config.json"
    spec = json.loads(path.read_text())
    spec["linux"]["resources"] = {"memory": {"limit": 128 << 20}}
    path.write_text(json.dumps(spec))
    place.outputs[limited] = place.runc.run(place.bundle(limited), limited)
    until(lambda: place.progress(limited) > 1, what="it counts")
    with pytest.raises(NotSupported, match="are left below its memory limit"):
        dump(place, limited)
    unharmed(place, limited, place.pid(limited))


def test_an_older_driver_that_knows_no_maps(place: CudaLab) -> None:
    place.fabric.set_devices(["H100", "H100"], uuids=place.fabric.uuids, driver="570.86.15")
    source = place.start()
    goes_on(place, wake(place, dump(place, source)))


def live_with_device() -> list[str]:
    code = (
        "import sys, time; f = open(sys.argv[1]); n = 0\nwhile 1: n += 1; print('tick', n); time.sleep(.02)"
    )
    return ["python", "-IS", "-u", "-c", code]


def driver_of(place: CudaLab, container_id: str) -> Driver:
    return find_driver(place.settings(container_id), None, "test")[0]


# --- failures of a restore -----------------------------------------------------------------------------


def test_other_gpus_of_the_same_model_take_their_place(place: CudaLab) -> None:
    source = place.start()
    total = place.ask(source, signal.SIGUSR1, "sum")
    image = dump(place, source)
    place.fabric.set_devices(["A100", "H100", "H100"])  # another node
    target = wake(place, image, env=[f"NVIDIA_VISIBLE_DEVICES={','.join(place.fabric.uuids[1:])}"])
    assert place.ask(target, signal.SIGUSR1, "sum") == total
    assert [place.fabric.vram(uuid) for uuid in place.fabric.uuids] == [0, 1, 0]


@pytest.mark.parametrize(
    ("models", "driver", "wanted"),
    [
        (["A100", "A100"], "580.65.06", "no GPU of the same model"),
        (["H100"], "580.65.06", "no GPU of the same model"),
        (["H100", "H100"], "575.10", "older 575.10"),
    ],
    ids=["model", "count", "driver"],
)
def test_gpus_that_do_not_fit_are_refused(
    place: CudaLab, models: list[str], driver: str, wanted: str
) -> None:
    source = place.start()
    image = dump(place, source)
    place.fabric.set_devices(models, driver=driver)
    with pytest.raises(ImageIncompatible, match=wanted):
        wake(place, image)
    target = place.lab.ids[-1]
    assert place.residue(target) == []
    assert not list(place.state_path(target).glob("cuda-*.json"))


@pytest.mark.parametrize("held", [True, False], ids=["held", "at once"])
def test_a_gpu_without_room_ends_the_restore(place: CudaLab, held: bool) -> None:
    source = place.start()
    image = dump(place, source)
    place.fabric.inject(("*", "restore", 0, OUT_OF_MEMORY))
    if held:
        target = wake(place, image, held=True)
        with pytest.raises(RestoreFailed, match="not enough memory") as caught:
            place.engine(target).release(ReleaseRequest(container_id=target, timeout_s=20))
        until(lambda: place.runc.state(target)["status"] == "stopped", what="it was killed")
        place.kill(target)
    else:
        with pytest.raises(RestoreFailed, match="not enough memory") as caught:
            wake(place, image)
        target = place.lab.ids[-1]
    assert caught.value.after == "stopped"
    until(lambda: not place.residue(target), what=f"{place.residue(target)}")
    place.fabric.inject()
    goes_on(place, wake(place, image))


# --- hot swap ------------------------------------------------------------------------------------------


def test_two_containers_take_turns_on_one_gpu(place: CudaLab) -> None:
    place.fabric.set_devices(["H100", "H100"], gib=1)
    gpu, other = place.fabric.uuids
    big = place.fabric.program_words("--mib", "768")
    first = place.start(args=big)
    total = place.ask(first, signal.SIGUSR1, "sum")
    engine = place.engine(first)
    (gone,) = engine.suspend(first, timeout_s=20)
    assert (gone.state, gone.gpus) == ("suspended", {gpu: 768 << 20})
    assert place.fabric.vram(gpu) == 0
    with pytest.raises(InvalidRequest, match="suspended"):
        engine.suspend(first, timeout_s=20)
    second = place.start(args=big)
    with pytest.raises(RestoreFailed, match="not enough memory"):
        engine.resume(first, timeout_s=20, pairs={})
    assert [process.state for process in engine.gpu_processes(first)] == ["suspended"]
    with pytest.raises(InvalidRequest, match="no GPU GPU-none"):
        engine.resume(first, timeout_s=20, pairs={gpu: "GPU-none"})
    place.engine(second).suspend(second, timeout_s=20)
    engine.resume(first, timeout_s=20, pairs={})
    assert place.ask(first, signal.SIGUSR1, "sum") == total
    (back,) = place.engine(second).resume(second, timeout_s=20, pairs={gpu: other})
    assert back.gpus == {other: 768 << 20}
    goes_on(place, second)
    goes_on(place, first)


def test_a_suspended_container_can_be_checkpointed(place: CudaLab) -> None:
    source = place.start()
    pid = place.pid(source)
    total = place.ask(source, signal.SIGUSR1, "sum")
    place.engine(source).suspend(source, timeout_s=20)
    image = dump(place, source, stay=True)
    assert [process.state for process in place.engine(source).gpu_processes(source)] == ["suspended"]
    target = wake(place, image)
    assert place.ask(target, signal.SIGUSR1, "sum") == total
    place.kill(target)
    place.engine(source).discard(image)
    place.engine(source).resume(source, timeout_s=20, pairs={})
    unharmed(place, source, pid)


def test_errors_never_leave_a_record(place: CudaLab) -> None:
    target = place.prepare()
    with pytest.raises(EngineError):
        place.engine(target).suspend(target, timeout_s=5)
    assert not (place.state_path(target) / records.CALL).exists()
