"""A container with a pretended GPU falls asleep and wakes up through the `torpor` command and its runtime."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containers import CHECKOUT, SEARCH_PATH, Lab, Output, command, lab, make_rootfs, until
from tests.support.gpu import CudaLab, Fabric
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine


class Scene(CudaLab):
    """Containers on overlays, and an installation of torpor for them."""

    def __init__(self, inner: Lab, fabric: Fabric) -> None:
        super().__init__(inner, fabric)
        self.torpor = Torpor(self.lab.path / "torpor")
        self.lower = make_rootfs(self.lab.path / "lower")

    def overlay(self, **spec: object) -> str:
        """A bundle on an overlay; its container's id."""
        container_id = self.lab.new_id("t")
        bundle = self.lab.bundle(
            container_id,
            self.fabric.program_words(),
            rootfs=Path("rootfs"),
            mounts=[self.fabric.mount()],
            **spec,
        )
        places = [bundle / part for part in ("rootfs", "upper", "work")]
        for path in places:
            path.mkdir()
        options = f"lowerdir={self.lower},upperdir={places[1]},workdir={places[2]}"
        command("mount", "-t", "overlay", "overlay", "-o", options, places[0])
        self.lab.on_close(lambda: command("umount", "--lazy", places[0], check=False))
        self.bundles[container_id] = bundle
        return container_id

    def runtime(self, *words: str | Path, output: Output | None = None) -> None:
        """Call torpor-runtime as a runtime's caller does."""
        log = self.lab.path / "log.json"
        stream = output.write_fd if output else subprocess.DEVNULL
        done = subprocess.run(
            [self.torpor.runtime, "--root", self.runc.root, "--log", log, "--log-format", "json", *words],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={**os.environ, "PATH": SEARCH_PATH},
            check=False,
        )
        if output:
            output.handed_over()
        assert done.returncode == 0, log.read_text() if log.exists() else words

    def create(self, container_id: str) -> None:
        output = self.outputs[container_id] = Output()
        self.runtime("create", "--bundle", self.bundle(container_id), container_id, output=output)

    def gpu(self, *words: str) -> list[dict[str, object]]:
        return json.loads(self.torpor("gpu", *words, "--root", self.runc.root, "--json").stdout)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    fabric = Fabric(tmp_path / "fabric")
    for name, value in fabric.environment.items():
        monkeypatch.setenv(name, value)
    with lab(tmp_path) as inner:
        yield Scene(inner, fabric)


def test_sleep_and_wake_by_annotation(scene: Scene) -> None:
    source = scene.overlay()
    scene.create(source)
    scene.runtime("start", source)
    until(lambda: scene.progress(source) > 3, what="it counts on its GPU")
    total = scene.ask(source, signal.SIGUSR1, "sum")
    words = ("checkpoint", source, "--name", "warm", "--stop", "--engine", "criu-cuda")
    scene.torpor(*words, "--root", scene.runc.root)
    count = scene.progress(source)
    assert scene.fabric.vram(scene.fabric.uuids[0]) == 0
    target = scene.overlay(annotations={"torpor.dev/restore-from": "warm"})
    scene.create(target)
    assert scene.progress(target) == 0, "it is held"
    scene.runtime("start", target)
    until(lambda: scene.progress(target) > count, what="it goes on counting")
    assert scene.ask(target, signal.SIGUSR1, "sum") == total
    scene.runtime("delete", "--force", target)


def test_hot_swap(scene: Scene) -> None:
    first, other = scene.fabric.uuids
    source = scene.overlay()
    scene.create(source)
    scene.runtime("start", source)
    until(lambda: scene.progress(source) > 3, what="it counts on its GPU")
    (row,) = scene.gpu("ps", source)
    assert (row["state"], row["gpus"]) == ("running", {first: 64 << 20})
    assert scene.gpu("suspend", source)[0]["state"] == "suspended"
    assert scene.fabric.vram(first) == 0
    assert scene.gpu("ps", source)[0]["state"] == "suspended"
    scene.torpor("checkpoint", source, "--name", "s", "--engine", "criu-cuda", "--root", scene.runc.root)
    assert scene.gpu("ps", source)[0]["state"] == "suspended", "a checkpoint leaves it as it was"
    failed = scene.torpor(
        "gpu", "resume", source, "--gpu", f"{first}=x", "--root", scene.runc.root, check=False
    )
    assert failed.returncode == 1
    assert "this node has no GPU x" in failed.stderr
    assert scene.gpu("resume", source, "--gpu", f"{first}={other}")[0]["gpus"] == {other: 64 << 20}
    count = scene.progress(source)
    until(lambda: scene.progress(source) > count, what="it goes on")
    assert scene.fabric.vram(other) == 1
    events = [line["event"] for line in scene.torpor.audit()]
    assert events == ["gpu suspend", "checkpoint", "gpu resume"]
    scene.runtime("delete", "--force", source)


def test_the_check_for_real_gpus_works_on_pretended_ones() -> None:
    words = (sys.executable, "-m", "tests.gpu.check", "--rehearse", "--mib", "256")
    told = command(*words, cwd=CHECKOUT).stdout
    assert told.splitlines()[-1] == "PASS"
    assert "proves nothing about a real one" in told


@pytest.mark.skipif(bool(shutil.which("nvidia-smi")), reason="this machine may have a GPU")
def test_the_check_for_real_gpus_skips_with_its_reason() -> None:
    done = command(CHECKOUT / "tests" / "gpu" / "check.sh")
    assert done.stdout == "SKIP: there is no nvidia-smi, so no NVIDIA driver\n"
