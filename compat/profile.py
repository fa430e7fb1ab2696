"""What this node is, as far as a restore depends on it."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

CgroupMode = Literal["v1", "hybrid", "v2"]
SCHEMA = 1


class DumpHost(Protocol):
    """What an image records of the node it was made on (a manifest's `host`, or a Profile)."""

    @property
    def arch(self) -> str: ...
    @property
    def cpu_flags(self) -> tuple[str, ...]: ...
    @property
    def kernel(self) -> str: ...
    @property
    def cgroup_mode(self) -> CgroupMode: ...
    @property
    def page_size_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A node. arch: as in `uname -m`; kernel: its release; cpu_flags: as /proc/cpuinfo names them, sorted."""

    arch: str
    kernel: str
    cpu_flags: tuple[str, ...]
    page_size_bytes: int
    cgroup_mode: CgroupMode
    boot_id: str
    schema: int = SCHEMA


def load(cache_path: Path | None) -> Profile:
    """The profile of this node, read once after each boot.

    cache_path: where it is kept (in a directory that only root may write), None to read it anew. A cache that
    cannot be read or written is only slower: reading /proc/cpuinfo asks every processor for its frequency.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    if cache_path is not None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            kept = msgspec.json.decode(cache_path.read_bytes(), type=Profile)
            if kept.boot_id == boot_id and kept.schema == SCHEMA:
                return kept
    found = _probe(boot_id)
    if cache_path is not None:
        with contextlib.suppress(OSError):
            temporary = cache_path.with_name(f".{cache_path.name}.{os.getpid()}")
            temporary.write_bytes(msgspec.json.encode(found))
            temporary.replace(cache_path)
    return found


def _probe(boot_id: str) -> Profile:
    return Profile(
        arch=platform.machine(),
        kernel=platform.release(),
        cpu_flags=_cpu_flags(),
        page_size_bytes=os.sysconf("SC_PAGE_SIZE"),
        cgroup_mode=_cgroup_mode(),
        boot_id=boot_id,
    )


def _cpu_flags() -> tuple[str, ...]:
    with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() in {"flags", "Features"}:
                return tuple(sorted(set(value.split())))
    return ()


def _cgroup_mode() -> CgroupMode:
    top = Path("/sys/fs/cgroup")
    if (top / "cgroup.controllers").exists():
        return "v2"
    return "hybrid" if (top / "unified/cgroup.controllers").exists() else "v1"
