"""The node gives less: memory, process ids, control groups, tools; or the image itself is damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tests.truth import sources
from tests.truth.place import World
from tests.truth.scenario import Scenario, Source, as_it_is
from tests.truth.tools import Release


def resources(**fields: Any) -> Callable[[World], object]:
    """Limits of the new container's control group."""

    def change(world: World) -> None:
        world.spec["linux"]["resources"] = {**world.spec["linux"].get("resources", {}), **fields}

    return change


def _memory(mebibytes: int) -> Callable[[World], object]:
    return resources(memory={"limit": mebibytes << 20})


def _other_cgroup(world: World) -> None:
    world.spec["linux"]["cgroupsPath"] = f"/tt-{world.place.lab.tag}/elsewhere/{world.container_id}"


def _cut(pattern: str) -> Callable[[World], object]:
    """A file of the image was cut short on its way."""

    def change(world: World) -> None:
        for path in world.own_image().glob(pattern):
            os.truncate(path, path.stat().st_size // 2)

    return change


def _lost(pattern: str) -> Callable[[World], object]:
    def change(world: World) -> None:
        for path in world.own_image().glob(pattern):
            path.unlink()

    return change


def _with(release: Release) -> Callable[[World], object]:
    """The node has other tools."""

    def change(world: World) -> None:
        world.tools = release

    return change


def _of(
    name: str, source: Source, change: Callable[[World], object] = as_it_is, *, short: bool = False
) -> Scenario:
    return Scenario(kind="node", name=name, source=source, change=change, short=short)


SCENARIOS = (
    _of("made by CRIU 4.1, restored by a later one", sources.OF_OLD_CRIU),
    _of("made and restored by CRIU 4.1", sources.OF_OLD_CRIU, _with("criu-4.1")),
    _of("restored by CRIU 4.1, made by a later one", sources.PLAIN, _with("criu-4.1")),
    _of("a CRIU too old for the kernel", sources.PLAIN, _with("criu-3.17")),
    _of("restored through an older runc", sources.PLAIN, _with("runc-1.1")),
    _of("its source lives on beside it", sources.ALIVE),
    _of("another control group", sources.PLAIN, _other_cgroup),
    _of("memory enough", sources.LARGE, _memory(256)),
    _of("memory for a quarter of the image", sources.LARGE, _memory(16)),
    _of("process ids enough", sources.FAMILY, resources(pids={"limit": 100})),
    _of("process ids for half of the tasks", sources.FAMILY, resources(pids={"limit": 4})),
    _of("a processor that the node has not", sources.PLAIN, resources(cpu={"cpus": "512"})),
    _of("the host's process ids, free", sources.HOST_PIDS),
    _of("the host's process ids, taken", sources.HOST_PIDS_ALIVE),
    _of("an image without its inventory", sources.PLAIN, _lost("inventory.img")),
    _of("an image with half a list of tasks", sources.PLAIN, _cut("pstree.img")),
    _of("an image without a task", sources.PLAIN, _lost("core-1.img")),
)
