"""Limits of the new specification: too tight for the image, or such that the runtime refuses them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compat.rules.case import Case, finding, mib, part, rule
from engines.api import Finding

_CPUS, _NODES = (Path(f"/sys/devices/system/{kind}/online") for kind in ("cpu", "node"))
_HUGE = Path("/sys/kernel/mm/hugepages")
_GROUPS, _UNIFIED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup/cgroup.controllers")
_DEVICES = Path("/sys/dev/block")
_V1 = Path("/sys/fs/cgroup")
_MAX_CPU = 1 << 16
_MAX_SWAPPINESS = 100
_UNSET = (1 << 63) - 1  # as runtimes write "as it is"
_MAX_BYTES = 1 << 62  # "no limit", as runtimes write it
# CRIU's own processes in the new control group, measured: itself and those that mount; one more serves a user
# namespace. Before there are other tasks than the first it unpacks file systems in memory (tar, gzip).
_N_HELPERS, _N_UNPACKING = 3, 6
_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_THROTTLES = frozenset(f"throttle{way}{kind}Device" for way in ("Read", "Write") for kind in ("Bps", "IOPS"))
_PERIOD_US = (1000, 1000000)
_UNITS: Mapping[str, int] = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_RLIMITS = frozenset(
    f"RLIMIT_{name}"
    for name in (
        *("AS", "CORE", "CPU", "DATA", "FSIZE", "LOCKS", "MEMLOCK", "MSGQUEUE", "NICE", "NOFILE", "NPROC"),
        *("RSS", "RTPRIO", "RTTIME", "SIGPENDING", "STACK"),
    )
)


def _resources(case: Case) -> Mapping[str, Any]:
    return part(part(case.new, "linux"), "resources")


@rule("place.memory-limit", about="spec", source="runc moves CRIU into the new cgroup before it restores")
def memory_limit(case: Case) -> Iterator[Finding]:
    """A restore fills memory under the new container's limit, shared memory too. Raise the limit to what the
    image has. (gVisor's containers have limits only where the node's runsc is set up to make them.)
    """
    limit = part(_resources(case), "memory").get("limit") or 0
    if 0 < limit < min(case.needs.memory_bytes, _MAX_BYTES):
        yield finding(
            "place.memory-limit",
            "unknown" if case.has_kernel else "refuse",
            f"the image has {mib(case.needs.memory_bytes)} of memory, the new container may have "
            f"{mib(limit)}",
            "raise the memory limit",
        )


@rule("place.pids-limit", about="spec", source="measured: fork fails in the new cgroup")
def pids_limit(case: Case) -> Iterator[Finding]:
    """All tasks of the image are made in the new container's cgroup, where CRIU itself has a few. Raise its
    limit of processes.
    """
    limit = part(_resources(case), "pids").get("limit") or 0
    n_tasks = len(case.needs.tasks) + len(case.needs.dead_pids)
    wanted = max(n_tasks + _N_HELPERS, _N_UNPACKING) + (case.needs.namespaces.get("user") == "own")
    if 0 < limit < wanted and not case.has_kernel:
        yield finding(
            "place.pids-limit",
            "refuse",
            f"the image has {n_tasks} tasks, which take {wanted} processes to restore, but the new container "
            f"may have {limit}",
            f"raise the limit of processes (pids) to {wanted} at least",
        )


@rule("place.cpus", about="here", source="measured: cpuset.cpus answers numerical result out of range")
def cpus(case: Case) -> Iterator[Finding]:
    """The processors and memory nodes that the new spec names for the container must be there, in a list like
    0-3,8. Name others (cpu.cpus, cpu.mems).
    """
    if case.has_kernel:
        return
    cpu = part(_resources(case), "cpu")
    for key, what, online in (("cpus", "processor", _CPUS), ("mems", "memory node", _NODES)):
        wanted = str(cpu.get(key) or "").strip()
        remedy = f"name some that are there (linux.resources.cpu.{key})"
        if wanted and not _LIST.fullmatch(wanted):
            yield finding("place.cpus", "refuse", f"'{wanted}' is no list of {what}s", remedy)
        elif wanted and (lacking := _lacking(wanted, online)) is not None:
            message = f"the new container is to have {what} {lacking}, which {case.where()} has not"
            yield finding("place.cpus", "refuse", message, remedy)


def _lacking(wanted: str, online: Path) -> int | None:
    """The first that is not there; None if all are, or nobody tells."""
    try:
        return min(_numbers(wanted) - _numbers(online.read_text().strip()), default=None)
    except (OSError, ValueError):
        return None


def _numbers(text: str) -> set[int]:
    """What a list like 0-3,8 names. Raises ValueError."""
    found: set[int] = set()
    for item in filter(None, text.split(",")):
        first, _, last = item.partition("-")
        found.update(range(int(first), min(int(last or first), _MAX_CPU) + 1))
    return found


@rule("spec.limits", about="here", source="measured: the runtime cannot write them, and fails")
def limits(case: Case) -> Iterator[Finding]:
    """Limits that the kernel or the runtime does not take: a quota below 1 ms, a period out of 1 ms to 1 s,
    a burst over the quota, less swap than memory, huge pages of a size that is not there, a block device
    that is not there, unified limits on cgroup v1, a resource limit that nobody knows; on cgroup v1 also
    shares below 2, real time that the control group above has not got, swappiness over 100, leaf weights,
    and limits of controllers that the node has not (net_cls, rdma). Correct them.
    """
    if case.has_kernel:
        return
    for cause in _refused(case):
        yield finding(
            "spec.limits", "refuse", f"the new spec has {cause}, which is refused", "correct the limit"
        )


def _refused(case: Case) -> Iterator[str]:
    resources = _resources(case)
    cpu, memory = part(resources, "cpu"), part(resources, "memory")
    quota, period = cpu.get("quota") or 0, cpu.get("period") or 0
    if 0 < quota < _PERIOD_US[0]:
        yield f"a processor quota of {quota} µs"
    if period and not _PERIOD_US[0] <= period <= _PERIOD_US[1]:
        yield f"a processor period of {period} µs"
    if 0 < quota < (cpu.get("burst") or 0):
        yield f"a burst of {cpu['burst']} µs over a processor quota of {quota} µs"
    if case.node.cgroup_mode != "v2":
        yield from _refused_by_v1(case, resources)
    limit, swap = memory.get("limit") or 0, memory.get("swap") or 0
    if 0 < swap < limit:
        yield f"less memory with swap ({mib(swap)}) than without ({mib(limit)})"
    if resources.get("unified") and case.node.cgroup_mode != "v2":
        yield f"unified limits on cgroup {case.node.cgroup_mode}"
    huge = resources.get("hugepageLimits") or ()
    if huge and not _has_controller("hugetlb"):
        yield "limits of huge pages, for which no control group is mounted here"
        huge = ()
    for entry in huge:
        if not _is_huge_size(str(entry["pageSize"])):
            yield f"a limit of huge pages of {entry['pageSize']}"
    for name, rules in part(resources, "blockIO").items():
        for device in (name in _THROTTLES and rules) or ():
            place = f"{device.get('major', 0)}:{device.get('minor', 0)}"
            if not (_DEVICES / place).exists():
                yield f"a limit of the block device {place}, which is not there"
    rlimits: Sequence[Mapping[str, Any]] = part(case.new, "process").get("rlimits") or ()
    for entry in rlimits:
        if entry["type"] not in _RLIMITS:
            yield f"a limit of '{entry['type']}'"


def _refused_by_v1(case: Case, resources: Mapping[str, Any]) -> Iterator[str]:
    cpu, memory = part(resources, "cpu"), part(resources, "memory")
    if cpu.get("shares") == 1:
        yield "1 processor share"
    runtime, period = cpu.get("realtimeRuntime") or 0, cpu.get("realtimePeriod") or 1000000
    if runtime > 0 and not _has_real_time(case, runtime / period):
        yield f"{runtime} µs of real time, which the control group above has not got"
    if _MAX_SWAPPINESS < (memory.get("swappiness") or 0) < _UNSET:
        yield f"a swappiness of {memory['swappiness']}"
    if part(resources, "blockIO").get("leafWeight") and not (_V1 / "blkio/blkio.leaf_weight").exists():
        yield "a leaf weight (blockIO.leafWeight), which this kernel does not know"
    if part(resources, "network").get("classID") and not _has_controller("net_cls"):
        yield "a class of network packets, for which no control group (net_cls) is mounted here"
    if resources.get("rdma") and not _has_controller("rdma"):
        yield "limits of RDMA, for which no control group is mounted here"


def _has_real_time(case: Case, share: float) -> bool:
    """Whether the control group above the new one has that share of real time: a new one has none."""
    path = str(part(case.new, "linux").get("cgroupsPath") or "")
    above = _V1 / "cpu" / os.path.dirname(path).lstrip("/")  # noqa: PTH120
    try:
        runtime, period = (int((above / f"cpu.rt_{word}_us").read_text()) for word in ("runtime", "period"))
    except (OSError, ValueError):
        return False
    return runtime < 0 or share <= runtime / period


def _has_controller(name: str) -> bool:
    """Whether there is a control group of a kind; true where nobody tells."""
    try:
        mine = _GROUPS.read_text()
        unified = _UNIFIED.read_text() if _UNIFIED.exists() else ""
    except OSError:
        return True
    return name in f"{mine}{unified}"


def _is_huge_size(text: str) -> bool:
    """Whether the node has huge pages of a size, as runtimes write it (2MB); true where nobody tells."""
    number, unit = text[:-2], text[-2:]
    if not _HUGE.is_dir():
        return True
    if not number.isdecimal() or unit not in _UNITS:
        return False
    return (_HUGE / f"hugepages-{int(number) * _UNITS[unit] >> 10}kB").is_dir()
