"""One gVisor container sleeps and wakes again and again: its memory is right, and nothing grows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.api import CheckpointRequest, RestoreRequest
from tests.support.containers import lab, mounts_under, processes_with, until
from tests.support.gvisor import GvisorLab

pytestmark = pytest.mark.engine

CYCLES = 200 if os.environ.get("TORPOR_SOAK") else 5


@pytest.fixture
def place(tmp_path: Path) -> Iterator[GvisorLab]:
    with lab(tmp_path) as inner:
        yield GvisorLab(inner)


def surroundings(place: GvisorLab) -> dict[str, int]:
    """What must not grow: the lab's processes and mounts, open files of ours, files of runsc's root."""
    return {
        "processes": len([pid for pid, line in processes_with(str(place.lab.path)) if "runsc-" in line]),
        "mounts": len(mounts_under(str(place.lab.path))),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "state": len(list(place.runsc.root.iterdir())),
        "rootfs": len(list((place.lab.path / "bundles").glob("*/rootfs/.gvisor*"))),
    }


def test_nothing_grows_and_memory_stays(place: GvisorLab) -> None:
    container_id = place.start()
    memory = place.memory(container_id)
    seen: list[dict[str, int]] = []
    image_bytes: list[int] = []
    for cycle in range(CYCLES):
        image = place.image_root / f"i{cycle}"
        stats = place.engine(container_id).checkpoint(
            CheckpointRequest(
                container_id=container_id,
                bundle_path=place.bundle(container_id),
                image_path=image,
                timeout_s=60,
            )
        )
        image_bytes.append(stats.image_bytes)
        last = place.progress(container_id)
        place.outputs.pop(container_id)
        container_id = place.prepare()
        place.restore(
            place.engine(container_id),
            RestoreRequest(
                container_id=container_id,
                bundle_path=place.bundle(container_id),
                image_path=image,
                timeout_s=60,
            ),
        )
        place.engine(container_id).discard(image)
        until(lambda now=container_id, then=last: place.progress(now) > then, what="it goes on")
        assert place.memory(container_id) == memory
        seen.append(surroundings(place))
    assert seen[-1] == seen[0], seen
    assert image_bytes[-1] < image_bytes[0] * 1.5
