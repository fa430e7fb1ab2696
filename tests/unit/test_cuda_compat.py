"""Rules about GPUs, on what a kernel driver would tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compat import gpus, verdict
from compat.gpus import NodeGpus
from engines.api import GpuNeed, Needs
from tests.support.containers import make_spec

UUIDS = tuple(f"GPU-0000000{number}-0000-0000-0000-000000000000" for number in range(4))
INFORMATION = """Model: \t\t NVIDIA {model}
IRQ:   \t\t 61
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.74.00.01
Bus Location: \t 0000:{bus:02x}:00.0
Device Minor: \t {minor}
"""
VERSION = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build  (x)  Mon
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
"""


def driver(path: Path, *models: str, uuids: tuple[str, ...] = UUIDS, version: str = "580.65.06") -> NodeGpus:
    """What a kernel driver with these devices tells."""
    path.mkdir(exist_ok=True)
    (path / "version").write_text(VERSION.format(driver=version))
    for number, model in enumerate(models):
        place = path / "gpus" / f"0000:{number + 1:02x}:00.0"
        place.mkdir(parents=True)
        (place / "information").write_text(
            INFORMATION.format(model=model, uuid=uuids[number], bus=number + 1, minor=number)
        )
    return gpus.read(path)


def need(*models: str, version: str = "580.65.06") -> Needs:
    wanted = tuple(
        GpuNeed(uuid=uuid, model=f"NVIDIA {model}", memory_bytes=1 << 30, driver=version)
        for uuid, model in zip(UUIDS, models, strict=False)
    )
    return Needs(engine="criu-cuda", image_version="1", tasks=(), namespaces={}, gpus=wanted)


def said(needs: Needs, node: NodeGpus, spec: dict[str, Any] | None = None) -> set[tuple[str, str]]:
    found = gpus.check(needs, spec or make_spec(["true"]), node)
    return {(finding.rule, finding.severity) for finding in found}


def test_the_same_gpus_fit(tmp_path: Path) -> None:
    node = driver(tmp_path, "H100", "H100")
    assert [gpu.uuid for gpu in node.gpus] == list(UUIDS[:2])
    assert said(need("H100", "H100"), node) == set()


def test_an_image_without_gpus_asks_for_nothing(tmp_path: Path) -> None:
    assert said(need(), driver(tmp_path)) == set()


def test_a_node_that_tells_nothing(tmp_path: Path) -> None:
    node = gpus.read(tmp_path / "none")
    assert said(need("H100"), node) == {("gpu.driver", "unknown")}


@pytest.mark.parametrize(
    ("here", "severity"), [("575.57.08", "refuse"), ("580.65.06", ""), ("580.95.05", "unknown")]
)
def test_the_driver(tmp_path: Path, here: str, severity: str) -> None:
    found = said(need("H100"), driver(tmp_path, "H100", version=here))
    assert found == ({("gpu.driver", severity)} if severity else set())


def test_fewer_gpus(tmp_path: Path) -> None:
    found = said(need("H100", "H100"), driver(tmp_path, "H100"))
    assert ("gpu.count", "refuse") in found


def test_another_model(tmp_path: Path) -> None:
    assert said(need("H100"), driver(tmp_path, "A100")) == {("gpu.model", "refuse")}


def test_other_gpus_of_the_same_model(tmp_path: Path) -> None:
    assert said(need("H100"), driver(tmp_path / "new", "H100", uuids=UUIDS[2:])) == set()
    old = driver(tmp_path / "old", "H100", uuids=UUIDS[2:], version="575.57.08")
    assert said(need("H100", version="575.57.08"), old) == {("gpu.place", "refuse")}


def test_a_driver_that_has_not_looked_yet(tmp_path: Path) -> None:
    unknown = ("GPU-????????-????-????-????-????????????",)
    assert said(need("H100"), driver(tmp_path, "H100", uuids=unknown)) == {("gpu.place", "unknown")}


@pytest.mark.parametrize("how", ["uuid", "index", "files"])
def test_what_the_spec_gives_counts(tmp_path: Path, how: str) -> None:
    node = driver(tmp_path, "H100", "A100")
    spec = make_spec(["true"])
    if how == "files":
        spec["linux"]["devices"] = [{"path": "/dev/nvidia1", "type": "c"}, {"path": "/dev/nvidiactl"}]
    else:
        spec["process"]["env"].append(f"NVIDIA_VISIBLE_DEVICES={UUIDS[1] if how == 'uuid' else '1'}")
    assert said(need("H100"), node, spec) == {("gpu.model", "refuse")}
    assert said(replace(need("H100"), gpus=need("H100", "A100").gpus[1:]), node, spec) == set()


def test_the_verdict_has_it() -> None:
    found = verdict.judge(need("H100"), make_spec(["true"]), dump_host=None)
    assert "gpu.driver" in {finding.rule for finding in found}
