"""What a node is, as far as a restore depends on it."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from compat.gpus import Gpu
from compat.probes import cgroups, kernel, machine, namespaces, processor, resources, security, tools
from compat.probes.base import Probe, System

CgroupMode = Literal["v1", "hybrid", "v2"]
SCHEMA = 2
_MAX_BYTES = 1 << 20
_RETRY_S = 60.0


class ProfileError(Exception):
    """A profile cannot be read. The message says why."""


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
    @property
    def xsave_bytes(self) -> int | None: ...
    @property
    def tools(self) -> Mapping[str, str]: ...
    @property
    def unknown(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A node. What is None is not known; `unknown` says why, by the name of the probe.

    arch: as in `uname -m`; kernel: its release; cpu_flags: as /proc/cpuinfo names them, sorted. cpu_name:
    archspec's name of the microarchitecture; cpu_level: n of x86-64-vn, 0 without levels. tools: version by
    name, of those that are there; tools_key: changes when one is replaced. lsm: "apparmor", "selinux", "".
    capabilities: mask of what root may hold here. namespaces: kinds as /proc/self/ns names them.
    kernel_paths: those of `probes.kernel.maskable` that are there. netfilter: "nftables", "iptables", "".
    hugepages: free ones by size in bytes. pid_max: process ids are below that. storage: mounted file systems
    by kind.
    """

    arch: str
    kernel: str
    cpu_flags: tuple[str, ...]
    page_size_bytes: int
    cgroup_mode: CgroupMode
    boot_id: str
    schema: int = SCHEMA
    node: str = ""
    cpu_vendor: str = ""
    cpu_model: str = ""
    cpu_name: str | None = None
    cpu_level: int | None = None
    xsave_bytes: int | None = None
    tools: Mapping[str, str] = field(default_factory=dict[str, str])
    tools_key: str | None = None
    criu_works: bool | None = None
    criu_features: tuple[str, ...] | None = None
    lsm: str | None = None
    capabilities: int | None = None
    namespaces: tuple[str, ...] | None = None
    kernel_paths: tuple[str, ...] | None = None
    userfaultfd: bool | None = None
    netfilter: str | None = None
    gpu_driver: str | None = None
    gpus: tuple[Gpu, ...] | None = None
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    hugepages: Mapping[str, int] | None = None
    pid_max: int | None = None
    store_free_bytes: int | None = None
    rootfs_free_bytes: int | None = None
    storage: Mapping[str, int] | None = None
    unknown: Mapping[str, str] = field(default_factory=dict[str, str])


_STABLE: Sequence[Probe] = (
    *(machine.read, machine.processor, cgroups.read, security.read, security.capabilities),
    *(namespaces.read, kernel.paths, tools.versions, processor.xsave),
)
_NOW: Sequence[Probe] = (resources.memory, resources.hugepages, resources.pid_max, resources.disk)


def load(cache_path: Path | None, system: System | None = None) -> Profile:
    """What a restore on this node is judged by: probed once after each boot, and when a tool is replaced.
    Where a probe failed all are asked again after a minute: the machine may only have been busy.

    cache_path: where it is kept (in a directory that only root may write), None to probe anew. A cache that
    cannot be read or written is only slower: reading /proc/cpuinfo asks every processor for its frequency.
    system: with the tools that are to be asked for their versions, None for none.
    """
    where = system or System()
    boot_id = this_boot()
    key = tools.identity(where.tools)
    if cache_path is not None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            kept = msgspec.json.decode(cache_path.read_bytes(), type=Profile)
            age_s = time.time() - cache_path.stat().st_mtime
            fresh = not kept.unknown or 0 <= age_s < _RETRY_S
            if fresh and (kept.boot_id, kept.schema) == (boot_id, SCHEMA) and key in ("", kept.tools_key):
                return kept
    found = _ask(_STABLE, where, boot_id=boot_id, tools_key=key)
    if cache_path is not None:
        with contextlib.suppress(OSError):
            temporary = cache_path.with_name(f".{cache_path.name}.{os.getpid()}")
            temporary.write_bytes(msgspec.json.encode(found))
            temporary.replace(cache_path)
    return found


def now(profile: Profile, system: System) -> Profile:
    """The profile with what changes from minute to minute: memory, huge pages, process ids, disk."""
    values, unknown = _answers(_NOW, system)
    return replace(profile, **values, unknown={**profile.unknown, **unknown})


def full(system: System) -> Profile:
    """Everything there is to know of this node. Takes a second or two: CRIU tries each of its features."""
    # Only for people and schedulers, and slow to load.
    from compat.probes import gpus, netfilter

    slow = (
        *(processor.read, tools.criu_features, kernel.userfaultfd, netfilter.read),
        *(gpus.read, resources.storage),
    )
    return _ask(
        (*_STABLE, *slow, *_NOW),
        system,
        boot_id=this_boot(),
        tools_key=tools.identity(system.tools),
        node=platform.node(),
    )


def read_file(path: Path) -> Profile:
    """A profile that a node wrote, from its file, or from a pipe that somebody writes it into.

    Raises ProfileError, OSError.
    """
    # A FIFO that nobody writes into must not be waited for.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        os.set_blocking(file.fileno(), True)
        return read(file.read(_MAX_BYTES + 1), what=f"profile '{path}'")


def read(data: bytes, *, what: str) -> Profile:
    """A profile that a node wrote. what: the document in words. Raises ProfileError."""
    if len(data) > _MAX_BYTES:
        raise ProfileError(f"could not read {what}: it is larger than any profile; write it again there")
    try:
        schema = msgspec.json.decode(data, type=_Versioned).schema
        if schema != SCHEMA:
            raise ProfileError(
                f"could not read {what}: its schema is {schema} and this torpor knows {SCHEMA}; write it "
                "again with the same torpor"
            )
        found = msgspec.json.decode(data, type=Profile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProfileError(
            f"could not read {what}: {error}; make it with `torpor compat profile -o FILE`"
        ) from error
    if cause := _impossible(found):
        raise ProfileError(f"could not read {what}: {cause}; make it with `torpor compat profile -o FILE`")
    return found


class _Versioned(msgspec.Struct):
    schema: int


def _impossible(found: Profile) -> str:
    """What no node can be, "" if all can be."""
    sizes: Mapping[str, int | None] = {
        "page_size_bytes": found.page_size_bytes,
        "memory_bytes": found.memory_bytes,
        "memory_available_bytes": found.memory_available_bytes,
        "store_free_bytes": found.store_free_bytes,
        "rootfs_free_bytes": found.rootfs_free_bytes,
        "xsave_bytes": found.xsave_bytes,
        "capabilities": found.capabilities,
        "pid_max": found.pid_max,
        **{f"hugepages.{size}": count for size, count in (found.hugepages or {}).items()},
    }
    below = [name for name, size in sizes.items() if size is not None and size < 0]
    if below:
        return f"its {below[0]} is below zero"
    names = {"node": found.node, "arch": found.arch, "kernel": found.kernel, **found.tools}
    odd = [name for name, text in names.items() if not text.isprintable()]
    return f"its '{odd[0]}' has a character that cannot be printed" if odd else ""


def this_boot() -> str:
    """The kernel's name for the time since this node was last started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def _answers(probes: Sequence[Probe], system: System) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for probe in probes:
        answer = probe(system)
        values.update(answer.values)
        unknown.update(answer.unknown)
    return values, unknown


def _ask(probes: Sequence[Probe], system: System, **known: Any) -> Profile:
    values, unknown = _answers(probes, system)
    # These have no None: an empty one compares with nothing.
    basics = {
        "arch": platform.machine(),
        "kernel": platform.release(),
        "cpu_flags": (),
        "page_size_bytes": os.sysconf("SC_PAGE_SIZE"),
        "cgroup_mode": "v2",
    }
    return msgspec.convert({**basics, **values, **known, "unknown": unknown}, Profile)
