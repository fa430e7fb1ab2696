"""The GPUs of a node, who is on them, and which of them takes the place of another at a restore."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.api import GpuNeed

_MAPS_SINCE = (580,)
_VISIBLE = "NVIDIA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A device. used: process (on the host) to bytes; mps: those that do so through MPS; mig: it is split."""

    index: int
    uuid: str
    model: str
    total_bytes: int
    minor: int
    mig: bool
    used: Mapping[int, int]
    mps: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The GPUs of a node. driver: its version, "570.86.15"."""

    driver: str
    gpus: tuple[Gpu, ...]

    def by_uuid(self, uuid: str) -> Gpu | None:
        """The device of this UUID."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)


class Unfit(Exception):
    """The GPUs at hand cannot take the place of those that an image had; in words."""


def parse(told: Mapping[str, Any]) -> Node:
    """What `Driver.look` tells."""
    return Node(
        driver=str(told["driver"]),
        gpus=tuple(
            Gpu(
                index=index,
                uuid=str(device["uuid"]),
                model=str(device["model"]),
                total_bytes=int(device["total_bytes"]),
                minor=int(device["minor"]),
                mig=bool(device["mig"]),
                used={int(pid): int(size) for pid, size in device["used"].items()},
                mps=frozenset(int(pid) for pid in device["mps"]),
            )
            for index, device in enumerate(told["devices"])
        ),
    )


def version(text: str) -> tuple[int, ...]:
    """A driver's version as numbers."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def given(spec: Mapping[str, Any], node: Node) -> tuple[Gpu, ...]:
    """The devices that a spec gives its container, in the node's order.

    By the variable that NVIDIA's container toolkit and Kubernetes' device plugin set, else by the device
    files the spec names, else all of them.
    """
    process: Mapping[str, Any] = spec.get("process") or {}
    linux: Mapping[str, Any] = spec.get("linux") or {}
    visible = "all"
    for entry in process.get("env") or ():
        name, _, value = str(entry).partition("=")
        visible = value if name == _VISIBLE else visible
    if visible not in ("all", "", "void"):
        names = set(visible.split(","))
        return tuple(gpu for gpu in node.gpus if gpu.uuid in names or str(gpu.index) in names)
    files = {str(device.get("path")) for device in linux.get("devices") or ()}
    if named := [gpu for gpu in node.gpus if f"/dev/nvidia{gpu.minor}" in files]:
        return tuple(named)
    return node.gpus


def assign(needs: Sequence[GpuNeed], gpus: Sequence[Gpu], driver: str) -> dict[str, str]:
    """Which GPU takes the place of each that an image had: old UUID to new UUID; empty if all are there.

    A GPU that is still there keeps its place; the others go to free ones of the same model, in order. Every
    GPU that the container had gets a place, used or not: the driver wants its map complete.
    driver: this node's. Raises Unfit.
    """
    for need in needs:
        if version(driver) < version(need.driver):
            raise Unfit(f"the image was made with driver {need.driver}, this node has the older {driver}")
    free = {gpu.uuid: gpu for gpu in gpus}
    pairs = {need.uuid: need.uuid for need in needs if free.pop(need.uuid, None)}
    for need in needs:
        if need.uuid in pairs:
            continue
        fitting = [
            gpu for gpu in free.values() if gpu.model == need.model and gpu.total_bytes >= need.memory_bytes
        ]
        if not fitting:
            have = ", ".join(gpu.model for gpu in gpus) or "none"
            raise Unfit(
                f"it had {_count(needs)}; for {need.uuid} ({need.model}, {need.memory_bytes >> 20} MiB "
                f"in use) no GPU of the same model is left here (the container is given: {have})"
            )
        pairs[need.uuid] = free.pop(fitting[0].uuid).uuid
    if mig := [gpu.uuid for gpu in gpus if gpu.mig and gpu.uuid in pairs.values()]:
        raise Unfit(f"GPU {mig[0]} is split (MIG), which the driver cannot restore to")
    whole = {need.uuid: pairs[need.uuid] for need in needs}
    return _map(whole, driver)


def swap(needs: Sequence[GpuNeed], wanted: Mapping[str, str], node: Node) -> dict[str, str]:
    """A complete map for a container that stays on its node: who is displaced takes the place left free.

    wanted: old UUID to new UUID. Returns an empty map if all stay. Raises Unfit.
    """
    had = {need.uuid: need for need in needs}
    pairs = {uuid: uuid for uuid in had}
    for old, new in wanted.items():
        need, gpu = had.get(old), node.by_uuid(new)
        if need is None:
            raise Unfit(f"the container had no GPU {old}; it had {', '.join(had) or 'none'}")
        if gpu is None:
            raise Unfit(f"this node has no GPU {new}; it has {', '.join(each.uuid for each in node.gpus)}")
        if gpu.model != need.model or gpu.total_bytes < need.memory_bytes:
            raise Unfit(f"GPU {new} ({gpu.model}) cannot take the place of {old} ({need.model})")
        holder = next((uuid for uuid, place in pairs.items() if place == new), None)
        if holder:
            pairs[holder] = pairs[old]
        pairs[old] = new
    return _map(pairs, node.driver)


def _map(pairs: dict[str, str], driver: str) -> dict[str, str]:
    """Drivers before 580 know no maps, not even one that changes nothing."""
    if all(old == new for old, new in pairs.items()):
        return {}
    if version(driver) < _MAPS_SINCE:
        raise Unfit(f"only driver 580 or later can restore to other GPUs, this node has {driver}")
    return pairs


def _count(needs: Sequence[GpuNeed]) -> str:
    return "1 GPU" if len(needs) == 1 else f"{len(needs)} GPUs"
