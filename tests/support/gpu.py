"""Pretended GPUs for tests: the fake driver of tests/gpu/fake, compiled once, and a fabric for each test."""

from __future__ import annotations

import hashlib
import os
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.api import EngineSettings
from engines.cuda import records
from engines.cuda.driver import Way
from engines.cuda.engine import CudaEngine
from tests.support.containers import CHECKOUT, Lab, bind, until
from tests.support.criu import CriuLab

FAKE = CHECKOUT / "tests" / "gpu" / "fake"
INSIDE = "/fakecuda"  # where a container sees its fabric
_PARTS = {
    "libcuda.so.1": ["-shared", "-fPIC", "cuda.c", "fabric.c"],
    "libnvidia-ml.so.1": ["-shared", "-fPIC", "nvml.c", "fabric.c"],
    "cuda-checkpoint": ["program.c", "fabric.c"],
}


def build() -> Path:
    """Compile the fake driver where its sources have not been compiled yet; its directory."""
    sources = b"".join(path.read_bytes() for path in sorted(FAKE.iterdir()))
    target = CHECKOUT / "build" / "fake-gpu" / hashlib.sha256(sources).hexdigest()[:16]
    if target.exists():
        return target
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    draft.mkdir(parents=True)
    for name, words in _PARTS.items():
        flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-D_FILE_OFFSET_BITS=64"]
        done = subprocess.run(
            ["gcc", *flags, "-o", str(draft / name), *words, "-ldl"],
            cwd=FAKE,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    try:
        draft.rename(target)
    except OSError:  # another test run was faster
        assert target.exists()
    return target


class Fabric:
    """The GPUs of one test, and their driver.

    environment: what a process needs to find the fake instead of a real driver.
    """

    def __init__(
        self, path: Path, models: Sequence[str] = ("H100", "H100"), *, driver: str = "580.65.06"
    ) -> None:
        self.path = path
        self.uuids: list[str] = []
        (path / "vram").mkdir(parents=True)
        (path / "gpu-page").write_bytes(bytes(1 << 20))
        (path / "id").write_text(secrets.token_hex(16))
        self.set_devices(models, driver=driver)
        library = build()
        self.program = library / "cuda-checkpoint"
        search = os.environ.get("LD_LIBRARY_PATH")
        self.environment: Mapping[str, str] = {
            "FAKE_CUDA_DIR": str(path),
            "LD_LIBRARY_PATH": f"{library}:{search}" if search else str(library),
        }

    def set_devices(
        self,
        models: Sequence[str],
        *,
        driver: str = "580.65.06",
        gib: int = 80,
        mig: Sequence[int] = (),
        mps: Sequence[int] = (),
        uuids: Sequence[str] = (),
    ) -> None:
        """The node's devices. mig, mps: indices of those in that mode. uuids: empty for new ones."""
        self.uuids = list(uuids) or [_uuid() for _ in models]
        for uuid in self.uuids:
            (self.path / "vram" / uuid).mkdir(exist_ok=True)
        rows = [
            f"{uuid}|NVIDIA {model}|{gib << 30}|{number}|{int(number in mig)}|{int(number in mps)}\n"
            for number, (uuid, model) in enumerate(zip(self.uuids, models, strict=True))
        ]
        (self.path / "devices").write_text("".join(rows))
        (self.path / "driver").write_text(f"{driver}\n")

    def inject(self, *lines: tuple[int | str, str, int, int]) -> None:
        """From now on: for a process ("*": any) and an action, wait so many ms, then fail with a CUresult."""
        text = "".join(f"{pid} {action} {ms} {result}\n" for pid, action, ms, result in lines)
        (self.path / "inject.new").write_text(text)
        (self.path / "inject.new").rename(self.path / "inject")

    def together(self, pids: Sequence[int]) -> None:
        """These processes can only be locked together."""
        (self.path / "together").write_text(" ".join(map(str, pids)))

    def calls(self) -> list[tuple[int, str, int]]:
        """What the driver was asked to change: pid, action, result."""
        path = self.path / "calls"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(pid), action, int(result)) for pid, action, result in rows]

    def vram(self, uuid: str) -> int:
        """How many processes have memory on a device."""
        return len(list((self.path / "vram" / uuid).iterdir()))

    def mount(self) -> dict[str, Any]:
        """The bind mount by which a container has the fabric."""
        return bind(self.path, INSIDE, writable=True)

    def program_words(self, *options: str, directory: str = INSIDE, used: int = 1) -> list[str]:
        """The arguments of a process that sees all GPUs and uses the first ones."""
        words = ["python", "-IS", "-u", "/workloads/fake_gpu.py", directory]
        return [*words, ",".join(self.uuids), "--used", str(used), *options]


def _uuid() -> str:
    text = secrets.token_hex(16)
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class CudaLab(CriuLab):
    """Containers of one test that hold a GPU of a fabric, with an engine for each."""

    def __init__(self, lab: Lab, fabric: Fabric, way: Way | None = None) -> None:
        super().__init__(lab)
        self.fabric = fabric
        self._way: Way | None = way

    def settings(self, container_id: str, runtime_path: Path | None = None) -> EngineSettings:
        """An engine's settings for a container; the fake program is on its path."""
        made = super().settings(container_id, runtime_path)
        return replace(made, search_path=f"{self.fabric.program.parent}:{made.search_path}")

    def engine(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, container_id: str
    ) -> CudaEngine:
        return CudaEngine(self.settings(container_id), self._way)

    def prepare(
        self, *, netns_path: Path | None = None, args: Sequence[str] = (), name: str = "g", **spec: Any
    ) -> str:
        """A bundle for a new container that sees the fabric."""
        words = list(args) or self.fabric.program_words()
        mounts = [self.fabric.mount(), *spec.pop("mounts", ())]
        return super().prepare(netns_path=netns_path, args=words, name=name, mounts=mounts, **spec)

    def start(
        self, *, netns_path: Path | None = None, args: Sequence[str] = (), name: str = "g", **spec: Any
    ) -> str:
        """Start a container; tests/workloads/fake_gpu.py unless args say otherwise."""
        container_id = super().start(netns_path=netns_path, args=args, name=name, **spec)
        until(lambda: self.progress(container_id) > 1, what="the container counts on its GPU")
        return container_id

    def residue(self, container_id: str) -> list[str]:
        """What is left of a container that is gone, in words."""
        state = self.state_path(container_id)
        left = ["journal of the GPU stage"] if (state / records.CALL).exists() else []
        return super().residue(container_id) + left
