"""The node has other GPUs. They are pretended: a driver of tests/gpu/fake stands for NVIDIA's.

Torpor is asked with a profile, as another node would ask it: this machine's own kernel has no such driver to
look at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from compat.gpus import Gpu
from compat.profile import Profile
from engines.api import CheckpointEngine, EngineSettings
from engines.cuda.engine import CudaEngine
from tests.support.gpu import Fabric
from tests.truth.scenario import Scenario, Source

if TYPE_CHECKING:
    from tests.truth.place import World

_FABRICS: dict[str, Fabric] = {}
_MODELS = ("H100", "H100")
_DRIVER, _WITHOUT_MAPS, _OLD = "580.65.06", "575.57.08", "570.86.10"


def _source(name: str, driver: str = _DRIVER, *options: str) -> Source:
    def edit(spec: dict[str, Any], path: Path) -> None:
        fabric = _FABRICS[name] = Fabric(path / "fabric", _MODELS, driver=driver)
        words = fabric.program_words(*options)
        spec["process"]["args"] = [*spec["process"]["args"][:1], *words[1:]]
        spec["mounts"].append(fabric.mount())

    return Source(name=name, args=["python"], edit=edit, engine="criu-cuda")


def engine(settings: EngineSettings, source: Source) -> CheckpointEngine:
    """The engine of a container with GPUs. From now on their driver is this process's own."""
    fabric = _FABRICS[source.name]
    os.environ.update(fabric.environment)
    programs = fabric.program.parent
    return CudaEngine(replace(settings, search_path=f"{programs}:{settings.search_path}"))


def told(node: Profile) -> Profile:
    """A node's profile with what the pretended driver tells."""
    words = [sys.executable, "-m", "compat.probes.gpus"]
    answer = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    return replace(
        node, gpu_driver=answer["gpu_driver"], gpus=msgspec.convert(answer["gpus"], tuple[Gpu, ...])
    )


def _has(
    models: Sequence[str] = _MODELS, *, driver: str = _DRIVER, same: bool = True, **more: Any
) -> Callable[[World], object]:
    """The node has these GPUs. same: those of the dump, not others of their kind."""

    def change(world: World) -> None:
        fabric = _FABRICS[world.dumped.source.name]
        first = fabric.path / "first"
        if not first.exists():
            first.write_text("\n".join(fabric.uuids))
        uuids = first.read_text().split()[: len(models)] if same else ()
        fabric.set_devices(models, driver=driver, uuids=uuids, **more)
        world.afar = True

    return change


def _of(name: str, source: Source, change: Callable[[World], object]) -> Scenario:
    return Scenario(kind="gpu", name=name, source=source, change=change)


GPUS = _source("gpus")
FULL = _source("full-gpus", _DRIVER, "--mib", "4096")
UNMAPPED = _source("unmapped-gpus", _WITHOUT_MAPS)

SCENARIOS = (
    _of("the same GPUs", GPUS, _has()),
    _of("other GPUs of the same model", GPUS, _has(same=False)),
    _of("an older driver of GPUs", GPUS, _has(driver=_OLD)),
    _of("a GPU too few", GPUS, _has(_MODELS[:1])),
    _of("GPUs of another model", GPUS, _has(("A100", "A100"), same=False)),
    _of("a GPU that is split", GPUS, _has(mig=(0,))),
    _of("GPUs with less memory", FULL, _has(same=False, gib=2)),
    _of("the same GPUs, a driver without maps", UNMAPPED, _has(driver=_WITHOUT_MAPS)),
    _of("other GPUs, a driver without maps", UNMAPPED, _has(driver=_WITHOUT_MAPS, same=False)),
)
