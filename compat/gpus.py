"""Would an image that has memory of GPUs find such GPUs here?

The kernel driver tells what there is in /proc/driver/nvidia; no library of the driver is loaded. How much
memory is free is only known when the restore asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.api import Finding, Needs

PROC = Path("/proc/driver/nvidia")
_MAPS_SINCE = (580,)  # the first driver that restores to other GPUs than those of the dump


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A device. uuid: has question marks until the driver has first used the device.

    memory_bytes: all it has, 0 if nobody told. mig: it is split.
    """

    uuid: str
    model: str
    minor: int
    memory_bytes: int = 0
    mig: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGpus:
    """The GPUs of a node. driver: its version, empty if there is no driver."""

    driver: str
    gpus: tuple[Gpu, ...]


def read(proc_path: Path = PROC) -> NodeGpus:
    """What the kernel driver tells."""
    try:
        text = (proc_path / "version").read_text()
    except OSError:
        return NodeGpus(driver="", gpus=())
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)*)\s", text)
    gpus: list[Gpu] = []
    for path in sorted(proc_path.glob("gpus/*/information")):
        values: dict[str, str] = {}
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            values[name.strip()] = value.strip()
        minor = values.get("Device Minor", "")
        gpus.append(
            Gpu(
                uuid=values.get("GPU UUID", ""),
                model=values.get("Model", ""),
                minor=int(minor) if minor.isdigit() else -1,
            )
        )
    return NodeGpus(driver=found[1] if found else "", gpus=tuple(gpus))


def check(needs: Needs, spec: Mapping[str, Any], node: NodeGpus | None = None) -> Iterator[Finding]:
    """Compare the GPUs that an image had with those that a container of this spec gets here.

    node: the one to judge for, None for this one.
    """
    if not needs.gpus:
        return
    here = node or read()
    if not here.driver:
        yield Finding(
            rule="gpu.driver",
            severity="unknown",
            message=f"the image has memory of GPUs, and nothing at {PROC} tells which GPUs this node has",
            remedy="restore on a node with such GPUs; the engine looks again before it touches anything",
        )
        return
    yield from _driver(needs, here)
    gpus = _given(spec, here)
    yield from _models(needs, gpus)
    yield from _room(needs, gpus)
    yield from _places(needs, gpus, here)


def _driver(needs: Needs, here: NodeGpus) -> Iterator[Finding]:
    for wanted in sorted({need.driver for need in needs.gpus}):
        if _version(here.driver) < _version(wanted):
            yield Finding(
                rule="gpu.driver",
                severity="refuse",
                message=f"the image was made with GPU driver {wanted}, this node has the older {here.driver}",
                remedy=f"restore on a node with driver {wanted} or later",
            )
        elif here.driver != wanted:
            yield Finding(
                rule="gpu.driver",
                severity="unknown",
                message=f"the image was made with GPU driver {wanted}, this node has {here.driver}; the "
                "processes carry the driver's library of the former in their memory",
                remedy="restore on a node with the same driver",
            )


def _models(needs: Needs, gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    if len(gpus) < len(needs.gpus):
        yield Finding(
            rule="gpu.count",
            severity="refuse",
            message=f"the image's container saw {len(needs.gpus)} GPUs, the new one gets {len(gpus)}",
            remedy="give the new container as many",
        )
    for model in dict.fromkeys(need.model for need in needs.gpus):
        wanted = sum(need.model == model for need in needs.gpus)
        have = sum(gpu.model == model for gpu in gpus)
        if have < wanted:
            yield Finding(
                rule="gpu.model",
                severity="refuse",
                message=f"the image's container saw {wanted} of '{model}', the new one gets {have}",
                remedy=f"give the new container {wanted} of '{model}'",
            )


def _room(needs: Needs, gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    for gpu in gpus:
        if gpu.mig:
            yield Finding(
                rule="gpu.mig",
                severity="refuse",
                message=f"GPU {gpu.uuid} is split (MIG), and nothing is restored onto such a one",
                remedy="switch MIG off on it",
            )
    largest = max(need.memory_bytes for need in needs.gpus)
    sizes = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes]
    if sizes and largest > max(sizes):
        yield Finding(
            rule="gpu.memory",
            severity="refuse",
            message=f"the image holds {largest >> 20} MiB on one GPU, the largest here has "
            f"{max(sizes) >> 20} MiB",
            remedy="restore on a node with larger GPUs",
        )


def _places(needs: Needs, gpus: tuple[Gpu, ...], here: NodeGpus) -> Iterator[Finding]:
    if any("?" in gpu.uuid for gpu in gpus):
        yield Finding(
            rule="gpu.place",
            severity="unknown",
            message="this node's driver has not yet told the UUIDs of its GPUs",
            remedy="switch persistence mode on (nvidia-smi -pm 1)",
        )
    elif not {need.uuid for need in needs.gpus} <= {gpu.uuid for gpu in gpus} and (
        _version(here.driver) < _MAPS_SINCE
    ):
        yield Finding(
            rule="gpu.place",
            severity="refuse",
            message=f"the image's GPUs are not here, and driver {here.driver} restores only to the same ones",
            remedy="restore on the same node, or on one with driver 580 or later",
        )


def _given(spec: Mapping[str, Any], here: NodeGpus) -> tuple[Gpu, ...]:
    """The GPUs that a spec gives its container: by NVIDIA's variable, by its device files, or all."""
    process: Mapping[str, Any] = spec.get("process") or {}
    linux: Mapping[str, Any] = spec.get("linux") or {}
    visible = "all"
    for entry in process.get("env") or ():
        name, _, value = str(entry).partition("=")
        visible = value if name == "NVIDIA_VISIBLE_DEVICES" else visible
    if visible not in ("all", "", "void"):
        names = set(visible.split(","))
        return tuple(gpu for index, gpu in enumerate(here.gpus) if gpu.uuid in names or str(index) in names)
    files = {str(device.get("path")) for device in linux.get("devices") or ()}
    return tuple(gpu for gpu in here.gpus if f"/dev/nvidia{gpu.minor}" in files) or here.gpus


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))
