"""What a checkpoint would run into, said before anything is touched: `torpor checkpoint --dry-run`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from compat import verdict
from engines.api import CheckpointEngine, EngineError, Finding
from engines.forecasts import Forecaster
from shim import bundle
from shim.images import rootfs

_SPARE_BYTES = 64 << 20


def forecast(
    engine: CheckpointEngine, container_id: str, bundle_path: Path, store_path: Path, *, full_copy: bool
) -> tuple[Finding, ...]:
    """All that stands against a checkpoint of a running container, the worst first; it is not frozen.

    Raises ShimError if its bundle cannot be read, EngineError if there is no such container.
    """
    spec = bundle.read_spec(bundle_path)
    found = [*_rootfs(engine, bundle_path, spec, full_copy=full_copy)]
    found += [finding for finding in engine.probe() if finding.severity in {"refuse", "unknown"}]
    if isinstance(engine, Forecaster):
        told = engine.foresee(container_id, bundle_path)
        found += [*told.findings, *_space(store_path, told.memory_bytes)]
    else:
        found.append(
            Finding(
                rule="engine.foresight",
                severity="unknown",
                message=f"engine {engine.name} does not foresee what it cannot dump",
                remedy="try the checkpoint; it is undone if it fails",
            )
        )
    return verdict.ordered(found)


def _rootfs(
    engine: CheckpointEngine, bundle_path: Path, spec: bundle.Spec, *, full_copy: bool
) -> Iterator[Finding]:
    if "rootfs" in engine.capabilities or full_copy:
        return
    try:
        view = rootfs.find_rootfs(bundle_path, str(bundle.rootfs_path(Path(), spec)))
    except EngineError as error:
        yield Finding(rule="rootfs.kind", severity="refuse", message=str(error), remedy="use an overlay")
        return
    if view.kind == "directory":
        yield Finding(
            rule="rootfs.kind",
            severity="refuse",
            message=f"its root file system {view.path} is a plain directory, so what the container changed "
            "cannot be told from what it was given",
            remedy="use an overlay, or --full-copy",
        )


def _space(store_path: Path, memory_bytes: int) -> Iterator[Finding]:
    there = next(place for place in (store_path, *store_path.parents) if place.exists())
    status = os.statvfs(there)
    free, wanted = status.f_bavail * status.f_frsize, memory_bytes + _SPARE_BYTES
    if wanted > free:
        yield Finding(
            rule="place.disk",
            severity="refuse",
            message=f"the image may need {wanted >> 20} MiB, and {there} has {free >> 20} MiB free",
            remedy="remove images, or give the store another place",
        )
    else:
        yield Finding(
            rule="place.disk", severity="ok", message=f"about {memory_bytes >> 20} MiB of memory to be kept"
        )
