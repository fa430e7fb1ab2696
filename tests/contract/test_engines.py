"""Every engine passes the same contract, the fake and the real ones."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines import fake
from engines.api import Capability, CheckpointEngine, EngineSettings, RestoreRequest
from engines.criu.engine import CriuEngine
from engines.gvisor.engine import GvisorEngine
from engines.testing import EngineContract, Harness
from tests.support.containers import lab, make_spec, processes_with, tool, until
from tests.support.criu import CriuLab
from tests.support.gvisor import GvisorLab, netns_of


def stuck_runtime(path: Path, real: Path | None) -> Path:
    """A runtime that hangs, with a child, when it is to dump or restore."""
    otherwise = f'exec {shlex.quote(str(real))} "$@"' if real else "exit 0"
    path.write_text(
        f"#!/bin/sh\nfor word; do case $word in checkpoint|restore) sleep 98765.{os.getpid()} & wait;; esac; "
        f"done\n{otherwise}\n"
    )
    path.chmod(0o755)
    return path


def stuck_children() -> list[int]:
    return [pid for pid, line in processes_with(f"sleep 98765.{os.getpid()}") if "sleep" in line]


class FakeHarness:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.image_root = path / "images"
        self.image_root.mkdir()
        self._numbers = itertools.count()

    def _settings(self, runtime_path: Path) -> EngineSettings:
        return EngineSettings(
            runtime_path=runtime_path,
            root_path=self.path / "root",
            state_path=self.path / "state",
            search_path=os.environ["PATH"],
        )

    def engine(self, container_id: str) -> CheckpointEngine:
        return fake.FakeEngine(self._settings(Path("/bin/true")))

    def lacking(self, container_id: str, capability: Capability) -> CheckpointEngine | None:
        return fake.FakeEngine(self._settings(Path("/bin/true")), frozenset({capability}))

    def stuck(self, container_id: str) -> CheckpointEngine:
        return fake.FakeEngine(self._settings(stuck_runtime(self.path / "stuck", None)))

    def stuck_processes(self) -> list[int]:
        return stuck_children()

    def prepare(self, *, netns_path: Path | None = None) -> str:
        import json

        container_id = f"c{next(self._numbers)}"
        bundle = self.bundle(container_id)
        bundle.mkdir(parents=True)
        (bundle / "config.json").write_text(json.dumps(make_spec(["true"], netns_path=netns_path)))
        return container_id

    def start(self, *, netns_path: Path | None = None) -> str:
        container_id = self.prepare(netns_path=netns_path)
        fake.start(self.path / "root", container_id, netns=str(netns_path or ""))
        return container_id

    def bundle(self, container_id: str) -> Path:
        return self.path / "bundles" / container_id

    def restore(self, engine: CheckpointEngine, request: RestoreRequest) -> int:
        return engine.restore(request).pid

    def netns(self) -> Path | None:
        return Path(f"/run/netns/fake{next(self._numbers)}")

    def _container(self, container_id: str) -> fake.FakeContainer | None:
        return fake.load(self.path / "root", container_id)

    def progress(self, container_id: str) -> int:
        container = self._container(container_id)
        return container.progress() if container else 0

    def memory(self, container_id: str) -> str:
        container = self._container(container_id)
        assert container
        return container.memory

    def pid(self, container_id: str) -> int:
        container = self._container(container_id)
        return container.pid if container else 0

    def netns_of(self, container_id: str) -> str:
        container = self._container(container_id)
        assert container
        return container.netns

    def kill(self, container_id: str) -> None:
        fake.delete(self.path / "root", container_id)

    def residue(self, container_id: str) -> list[str]:
        return ["state"] if self._container(container_id) else []


class CriuHarness(CriuLab):
    def lacking(self, container_id: str, capability: Capability) -> CheckpointEngine | None:
        del container_id, capability
        return None

    def stuck(self, container_id: str) -> CheckpointEngine:
        return CriuEngine(
            self.settings(container_id, stuck_runtime(self.lab.path / "stuck", self.runc.program))
        )

    def stuck_processes(self) -> list[int]:
        return stuck_children()

    def netns(self) -> Path | None:
        return self.network().pod_path

    def memory(self, container_id: str) -> str:
        return self.ask(container_id, signal.SIGUSR1, "sum")

    def netns_of(self, container_id: str) -> str:
        return os.readlink(f"/proc/{self.pid(container_id)}/ns/net")

    def kill(self, container_id: str) -> None:
        super().kill(container_id)
        until(lambda: not self.residue(container_id), what="the killed container is gone")


class GvisorHarness(GvisorLab):
    def lacking(self, container_id: str, capability: Capability) -> CheckpointEngine | None:
        return self.engine(container_id) if capability == "held-restore" else None

    def stuck(self, container_id: str) -> CheckpointEngine:
        return GvisorEngine(
            self.settings(container_id, stuck_runtime(self.lab.path / "stuck", tool("runsc")))
        )

    def stuck_processes(self) -> list[int]:
        return stuck_children()

    def netns(self) -> Path | None:
        return None  # the set-up under test is --network=none

    def netns_of(self, container_id: str) -> str:
        return netns_of(self.pid(container_id))


class TestFake(EngineContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return FakeHarness(tmp_path)

    def test_progress_of_a_dumped_fake_is_kept(self, harness: Harness) -> None:
        container_id = harness.start()
        until(lambda: harness.progress(container_id) > 3)
        assert harness.progress(container_id) >= 3


@pytest.mark.engine
class TestCriu(EngineContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[Harness]:
        with lab(tmp_path) as place:
            yield CriuHarness(place)


@pytest.mark.engine
class TestGvisor(EngineContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[Harness]:
        with lab(tmp_path) as place:
            yield GvisorHarness(place)
