"""Room: memory, disk, process ids; and an identity that there may be only once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from compat.rules.case import Case, finding, given, mib, rule
from compat.rules.names import namespace_path
from engines.api import Finding


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
        there = _pids(path)
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
    if taken := sorted({task.pid for task in case.needs.tasks} & there):
        yield finding(
            "place.pids",
            "refuse",
            f"process ids {', '.join(map(str, taken[:4]))} are taken in the PID namespace that the new "
            "container shares",
            "end those processes, or give the container a PID namespace of its own",
        )


def _pids(namespace_path: str) -> set[int]:
    """The processes of a PID namespace, as it numbers them."""
    wanted = os.stat(namespace_path)  # noqa: PTH116
    found: set[int] = set()
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit():
            continue
        try:
            status = os.stat(f"/proc/{name}/ns/pid")  # noqa: PTH116
            if (status.st_dev, status.st_ino) == (wanted.st_dev, wanted.st_ino):
                text = Path(f"/proc/{name}/status").read_text(errors="replace")
                numbers = re.search(r"^NSpid:\s+(.*)$", text, re.MULTILINE)
                found.add(int(numbers[1].split()[-1]) if numbers else int(name))
        except OSError:  # it ended
            continue
    return found


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
