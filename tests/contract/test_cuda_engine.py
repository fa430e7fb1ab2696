"""The CRIU+CUDA engine passes the contract with a container that holds a pretended GPU."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.api import Capability, CheckpointEngine
from engines.cuda.engine import CudaEngine
from engines.testing import EngineContract, Harness
from tests.support.containers import Lab, lab, processes_with, until
from tests.support.gpu import CudaLab, Fabric

pytestmark = pytest.mark.engine


class CudaHarness(CudaLab):
    def __init__(self, place: Lab, fabric: Fabric) -> None:
        super().__init__(place, fabric)
        self._mark = f"98766.{os.getpid()}"

    def lacking(self, container_id: str, capability: Capability) -> CheckpointEngine | None:
        del container_id, capability
        return None

    def stuck(self, container_id: str) -> CheckpointEngine:
        path = self.lab.path / "stuck"
        path.write_text(
            f"#!/bin/sh\nfor word; do case $word in checkpoint|restore) sleep {self._mark} & wait;; esac; "
            "done\n"
            f'exec {shlex.quote(str(self.runc.program))} "$@"\n'
        )
        path.chmod(0o755)
        return CudaEngine(self.settings(container_id, path))

    def stuck_processes(self) -> list[int]:
        return [pid for pid, line in processes_with(f"sleep {self._mark}") if line.startswith("sleep")]

    def netns(self) -> Path | None:
        return self.network().pod_path

    def memory(self, container_id: str) -> str:
        return self.ask(container_id, signal.SIGUSR1, "sum")

    def netns_of(self, container_id: str) -> str:
        return os.readlink(f"/proc/{self.pid(container_id)}/ns/net")

    def kill(self, container_id: str) -> None:
        super().kill(container_id)
        until(lambda: not self.residue(container_id), what="the killed container is gone")


class TestCuda(EngineContract):
    @pytest.fixture
    def harness(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
        fabric = Fabric(tmp_path / "fabric")
        for name, value in fabric.environment.items():
            monkeypatch.setenv(name, value)
        with lab(tmp_path) as place:
            yield CudaHarness(place, fabric)
