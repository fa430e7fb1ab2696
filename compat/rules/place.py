"""Room: memory, disk, process ids; and an identity that there may be only once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Set
from pathlib import Path

from compat.rules.case import Case, finding, given, mib, rule, version
from compat.rules.names import namespace_path
from engines.api import Finding

_NUMBERS = re.compile(r"^NS(?:pid|pgid|sid):\s+(.*)$", re.MULTILINE)
_NS_GET_PARENT = 0xB702
_LIMIT_OF_ITS_OWN = (6, 14)
_USUAL_PID_MAX = 1 << 15


@rule("place.memory", about="node", source="/proc/meminfo; pagemaps of the image")
def memory(case: Case) -> Iterator[Finding]:
    """The image's pages must fit into the node's memory. Free some, or restore elsewhere."""
    wanted = case.needs.memory_bytes
    if not wanted:
        return
    have, free = case.node.memory_bytes, case.node.memory_available_bytes
    if have is None or free is None:
        yield from case.untold("place.memory", "memory", f"the image has {mib(wanted)} of memory")
    elif wanted > have:
        yield finding(
            "place.memory",
            "refuse",
            f"the image has {mib(wanted)} of memory, {case.where()} has {mib(have)} in all",
            "restore on a node with more memory",
        )
    elif wanted > free:
        yield finding(
            "place.memory",
            "unknown",
            f"the image has {mib(wanted)} of memory, {case.where()} has {mib(free)} available",
            "end something there first",
        )


@rule("place.hugepages", about="node", source="mmap(MAP_HUGETLB) reserves; field report criu#1533")
def hugepages(case: Case) -> Iterator[Finding]:
    """Huge pages must be free on the node. Reserve more (vm.nr_hugepages)."""
    for size, count in case.needs.hugepages.items():
        if case.node.hugepages is None:
            yield from case.untold("place.hugepages", "hugepages", "the image has huge pages mapped")
        elif case.node.hugepages.get(size, 0) < count:
            yield finding(
                "place.hugepages",
                "refuse",
                f"the image has up to {count} huge pages of {mib(int(size))} mapped, {case.where()} has "
                f"{case.node.hugepages.get(size, 0)} free",
                "reserve more there (vm.nr_hugepages)",
            )


@rule("place.disk", about="node", source="statvfs; the image's root file system difference")
def disk(case: Case) -> Iterator[Finding]:
    """What the container changed in its root file system is unpacked. Free space on the node."""
    wanted, free = case.origin.rootfs_bytes, case.node.rootfs_free_bytes
    if not wanted:
        return
    if free is None:
        yield from case.untold("place.disk", "disk", f"{mib(wanted)} are to be unpacked")
    elif wanted > free:
        yield finding(
            "place.disk",
            "refuse",
            f"the image unpacks {mib(wanted)} into the root file system, {case.where()} has {mib(free)} free",
            "free space there",
        )


# --- process ids ---------------------------------------------------------------------------------------


@rule("place.pids", about="here", source="measured: Can't fork for N: File exists")
def pids(case: Case) -> Iterator[Finding]:
    """In a PID namespace that the container shares, its process ids must be free: they are restored. End
    those processes, or give the container a PID namespace of its own.
    """
    kind = given(case.new, "pid")
    if kind == "own" or case.has_kernel or not case.needs.tasks:
        return
    path = namespace_path(case.new, "pid") if kind == "joined" else "/proc/self/ns/pid"
    try:
        taken = sorted(_taken(_restored(case), path))
    except FileNotFoundError:
        return  # spec.namespaces says so
    except OSError as error:
        yield finding(
            "place.pids",
            "unknown",
            f"the PID namespace {path} cannot be looked into: {error.strerror}",
            "look whether it is there",
        )
        return
    if taken:
        yield finding(
            "place.pids",
            "refuse",
            f"process ids {', '.join(map(str, taken[:4]))} are taken in the PID namespace that the new "
            "container shares",
            "end those processes, or give the container a PID namespace of its own",
        )


def _taken(pids: Set[int], path: str) -> set[int]:
    """Those of these numbers that a PID namespace cannot give: of processes and threads, also of namespaces
    below, and of groups and sessions that outlived their first process. Raises OSError.
    """
    wanted = os.stat(path)  # noqa: PTH116
    names = [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
    if os.path.samestat(wanted, os.stat("/proc/self/ns/pid")):  # noqa: PTH116
        # /proc lists no threads, but has each under its number: a node may have very many.
        found = {pid for pid in pids if os.path.lexists(f"/proc/{pid}")}
        for name in names:
            with contextlib.suppress(OSError):  # it ended
                found |= {os.getpgid(int(name)), os.getsid(int(name))}
        return found & pids
    found = set[int]()
    for name in names:
        with contextlib.suppress(OSError):  # it ended
            index = _index(f"/proc/{name}/ns/pid", wanted)
            for task in os.listdir(f"/proc/{name}/task") if index else ():  # noqa: PTH208
                with contextlib.suppress(OSError):
                    text = Path(f"/proc/{name}/task/{task}/status").read_text(errors="replace")
                    found |= {int(line.split()[index]) for line in _NUMBERS.findall(text)}
    return found & pids


def _index(path: str, wanted: os.stat_result) -> int | None:
    """Which of a task's numbers is that of a PID namespace, by that of its own, None if it is in neither that
    one nor below: -1 is the last. Raises OSError.
    """
    descriptor, index = os.open(path, os.O_RDONLY | os.O_CLOEXEC), -1
    try:
        while not os.path.samestat(os.fstat(descriptor), wanted):
            parent = fcntl.ioctl(descriptor, _NS_GET_PARENT)
            os.close(descriptor)
            descriptor, index = parent, index - 1
    except PermissionError:
        return None  # there is none above that we may see
    finally:
        os.close(descriptor)
    return index


@rule("place.pid-max", about="node", source="measured: clone3 with set_tid ends with EINVAL")
def pid_max(case: Case) -> Iterator[Finding]:
    """Process ids are restored, and those of the node end before kernel.pid_max. Raise it. (From 6.14 on that
    does not bind a PID namespace of the container's own.)
    """
    largest = max(_restored(case), default=0)
    kind = case.needs.namespaces.get("pid") if case.spec is None else given(case.new, "pid")
    if case.has_kernel or (kind != "host" and version(case.node.kernel)[:2] >= _LIMIT_OF_ITS_OWN):
        return
    if case.node.pid_max is None:
        if largest >= _USUAL_PID_MAX:
            yield from case.untold(
                "place.pid-max", "pid_max", f"a task of the image has process id {largest}"
            )
    elif largest >= case.node.pid_max:
        yield finding(
            "place.pid-max",
            "refuse",
            f"a task of the image has process id {largest}, and those of {case.where()} end before "
            f"{case.node.pid_max}",
            "raise it there (kernel.pid_max)",
        )


def _restored(case: Case) -> set[int]:
    """The process ids that a restore takes."""
    return {*(task.pid for task in case.needs.tasks), *case.needs.dead_pids}


# --- devices and identity ------------------------------------------------------------------------------


@rule("place.devices", about="node", source="measured: No tun device for file; found only at the restore")
def devices(case: Case) -> Iterator[Finding]:
    """A tunnel device lives in a network namespace that the image does not hold. End the tunnel before the
    checkpoint.
    """
    if any((need.kind, need.major, need.minor) == ("c", 10, 200) for need in case.needs.devices):
        yield finding(
            "place.devices",
            "refuse",
            "the image has a tunnel device (/dev/net/tun) open, which cannot be made again",
            "end the tunnel before the checkpoint",
        )


@rule("identity.once", about="node", source="random state, tokens and connections are in the image")
def once(case: Case) -> Iterator[Finding]:
    """An image that is to go on as the same one (use: move) is restored once. One that is restored again and
    again (use: clone) gives each clone the same random state, UUIDs and cached credentials: the program must
    renew them. Checkpoint again, or set torpor.dev/use: clone (and network: new: two with one address
    disturb each other) where the program can live with it.
    """
    if case.origin.use == "move" and case.origin.used_by:
        yield finding(
            "identity.once",
            "refuse",
            f"the image may be used once and container '{case.origin.used_by}' has used it",
            "checkpoint again, or make a clone, with network: new (torpor.dev/use: clone)",
        )
    elif case.origin.use == "clone" and case.origin.leave_running:
        yield finding(
            "identity.once",
            "ok",
            "clones have the same random state, UUIDs and cached credentials as the container they came from",
            "",
        )
