"""How much memory and disk there is now."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from compat.probes.base import System, Untold, probe
from engines.mountinfo import parse


@probe("memory")
def memory(system: System) -> dict[str, Any]:
    """What the machine has, and what could be had without swapping; bytes."""
    text = (system.root / "proc/meminfo").read_text()
    found = {name: int(value) << 10 for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    if "MemAvailable" not in found:
        raise Untold("/proc/meminfo does not tell what is available")
    return {"memory_bytes": found["MemTotal"], "memory_available_bytes": found["MemAvailable"]}


@probe("hugepages")
def hugepages(system: System) -> dict[str, Any]:
    """Huge pages that nobody has, by their size in bytes."""
    free: dict[str, int] = {}
    for path in sorted((system.root / "sys/kernel/mm/hugepages").glob("hugepages-*kB")):
        size = int(path.name.removeprefix("hugepages-").removesuffix("kB")) << 10
        # The kernel calls those free too that somebody has mapped and not yet touched.
        unused, promised = (int((path / f"{word}_hugepages").read_text()) for word in ("free", "resv"))
        free[str(size)] = max(0, unused - promised)
    return {"hugepages": free}


@probe("pid_max")
def pid_max(system: System) -> dict[str, Any]:
    """The first number that no process can have."""
    return {"pid_max": int((system.root / "proc/sys/kernel/pid_max").read_text())}


@probe("disk")
def disk(system: System) -> dict[str, Any]:
    """Bytes free where images are kept and where containers' root file systems are."""

    def free(path: Path) -> int:
        there = next(place for place in (path, *path.parents) if place.exists())
        found = os.statvfs(there)
        return found.f_bavail * found.f_frsize

    return {"store_free_bytes": free(system.store_path), "rootfs_free_bytes": free(system.bundle_path)}


@probe("storage")
def storage(system: System) -> dict[str, Any]:
    """Kinds of file systems that are mounted, each with how often."""
    kinds = Counter(mount.kind for mount in parse((system.root / "proc/self/mountinfo").read_bytes()))
    return {"storage": dict(sorted(kinds.items()))}
