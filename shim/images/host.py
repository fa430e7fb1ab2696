"""What an image records about the node it was made on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shim.images.mounts import read_mounts

CgroupMode = Literal["v1", "hybrid", "v2"]


@dataclass(frozen=True, kw_only=True)
class Host:
    """The node at the dump. page_size_bytes: the kernel's page size."""

    arch: str
    cpu_flags: tuple[str, ...]
    kernel: str
    cgroup_mode: CgroupMode
    page_size_bytes: int
    boot_id: str
    cpu_model: str = ""


def read_host() -> Host:
    """Describe this node from /proc."""
    flags: set[str] = set()
    model = ""
    for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"flags", "Features"} and not flags:
            flags = set(value.split())
        elif key.strip() == "model name" and not model:
            model = value.strip()
    return Host(
        arch=platform.machine(),
        cpu_flags=tuple(sorted(flags)),
        kernel=platform.release(),
        cgroup_mode=_cgroup_mode(),
        page_size_bytes=os.sysconf("SC_PAGE_SIZE"),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip(),
        cpu_model=model,
    )


def _cgroup_mode() -> CgroupMode:
    kinds = {
        entry.mount_point: entry.fstype for entry in read_mounts() if entry.fstype in {"cgroup", "cgroup2"}
    }
    if "cgroup" not in kinds.values():
        return "v2"
    return "hybrid" if "cgroup2" in kinds.values() else "v1"
