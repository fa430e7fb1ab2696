"""What the CRIU+CUDA engine writes down, and what it says before it touches anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.api import (
    CheckpointRequest,
    EngineSettings,
    GpuEngine,
    GpuNeed,
    ImageCorrupt,
    Judge,
    NotSupported,
    RestoreFailed,
)
from engines.cuda import records, undo
from engines.cuda.driver import Driver
from engines.cuda.engine import CudaEngine
from engines.cuda.records import Asleep, Call, Holder
from shim.cli import doctor
from shim.toolchain.find import find_tools
from tests.support.gpu import Fabric


def asleep(*uuids: str, model: str = "NVIDIA H100", driver: str = "580.65.06") -> Asleep:
    needs = tuple(GpuNeed(uuid=uuid, model=model, memory_bytes=5, driver=driver) for uuid in uuids)
    return Asleep(
        holders=(Holder(inner=(1, 7), comm="python", gpus=dict.fromkeys(uuids, 5)),),
        needs=needs,
        pairs={"a": "b"},
    )


def engine(path: Path) -> CudaEngine:
    settings = EngineSettings(
        runtime_path=Path("/bin/true"),
        root_path=path / "root",
        state_path=path / "state",
        search_path="/usr/bin:/bin",
    )
    return CudaEngine(settings)


def a_call() -> Call:
    return Call(
        operation="suspend",
        container_id="c",
        runtime=["/bin/runc"],
        search_path="/bin",
        driver=Driver(site=("/site",), program="/bin/cuda-checkpoint"),
        groups={"freezer": "/x"},
        was_frozen=True,
        processes=[(7, 70)],
        pairs={"a": "b"},
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    records.write_asleep(tmp_path / records.IN_IMAGE, asleep("x", "y"))
    assert records.read_image(tmp_path) == asleep("x", "y")
    (tmp_path / records.IN_IMAGE).rename(tmp_path / "torpor-gpus.json")
    assert records.read_image(tmp_path) == asleep("x", "y"), "of an earlier image"
    call = a_call()
    records.write_call(tmp_path, call)
    assert records.read_call(tmp_path) == call
    assert records.read_asleep(tmp_path / "none") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"schema": 2}',
        '{"schema": 1}',
        '{"schema": 1, "holders": 3, "needs": [], "pairs": {}}',
    ],
)
def test_a_damaged_image_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / records.IN_IMAGE).write_text(text)
    with pytest.raises(ImageCorrupt, match="could not read image"):
        records.read_image(tmp_path)


def test_an_image_of_another_engine_is_told(tmp_path: Path) -> None:
    with pytest.raises(ImageCorrupt, match="not made by the engine criu-cuda"):
        records.read_image(tmp_path)


def test_a_damaged_journal_is_told(tmp_path: Path) -> None:
    (tmp_path / records.CALL).write_text(
        json.dumps({"schema": 1, "driver": {"site": [], "program": ""}, "processes": []})
    )
    with pytest.raises(ValueError, match="damaged"):
        records.read_call(tmp_path)


def test_what_the_engine_offers(tmp_path: Path) -> None:
    made = engine(tmp_path)
    assert isinstance(made, GpuEngine)
    assert isinstance(made, Judge)
    assert "gpu" in made.capabilities
    assert "pre-dump" not in made.capabilities
    request = CheckpointRequest(
        container_id="c", bundle_path=tmp_path, image_path=tmp_path / "i", timeout_s=5, parent_path=tmp_path
    )
    for call in (made.pre_dump, made.checkpoint):
        with pytest.raises(NotSupported, match="in one go"):
            call(request)


@pytest.fixture
def fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fabric:
    found = Fabric(tmp_path / "fabric")
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    return found


def test_an_image_is_judged_before_anything_is_touched(tmp_path: Path, fabric: Fabric) -> None:
    made = engine(tmp_path)
    records.write_asleep(tmp_path / records.IN_IMAGE, asleep(fabric.uuids[0]))
    assert made.judge(tmp_path) == ()
    records.write_asleep(tmp_path / records.IN_IMAGE, asleep("x", model="NVIDIA A100"))
    assert [(f.rule, f.severity) for f in made.judge(tmp_path)] == [("gpu.fit", "refuse")]
    fabric.set_devices(["H100"], driver="560.1")
    assert [(f.rule, f.severity) for f in made.judge(tmp_path)] == [("gpu.driver", "refuse")]
    records.write_asleep(tmp_path / records.IN_IMAGE, Asleep(holders=(), needs=()))
    assert made.judge(tmp_path) == ()


def test_the_doctor_tells_of_gpus_where_there_is_a_driver(
    tmp_path: Path, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> dict[str, str]:
        found = doctor._engine(find_tools())
        return {finding.message: finding.severity for finding in found if finding.rule.startswith("gpu.")}

    assert said() == {}
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path)
    wanted = "GPU driver 580.65.06, called through the bindings; GPUs: NVIDIA H100, NVIDIA H100"
    assert said() == {wanted: "ok"}
    fabric.set_devices(["H100"], driver="535.1")
    assert list(said().values()) == ["warn"], "a node can do without"


def test_a_call_tells_that_it_could_not_be_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container must not be started cold over what is left."""
    monkeypatch.setattr(undo, "undo_pending", lambda _: ["a process stays locked"])
    with pytest.raises(RestoreFailed) as caught, undo.Guarded(tmp_path, a_call()):
        raise RestoreFailed("it failed")
    assert not caught.value.undone
