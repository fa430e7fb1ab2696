"""Room: memory, disk, ports, process ids; and an identity that there may be only once."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compat.rules.case import Case, finding, given, part, rule
from engines.api import Finding, SocketNeed

_CLONE_NEWNET = 0x40000000
_LISTEN, _UDP_BOUND = "0A", "07"
_ONLINE = Path("/sys/devices/system/cpu/online")
_MAX_CPU = 1 << 16
_MAX_BYTES = 1 << 62  # "no limit", as runtimes write it


@rule("place.memory", about="node", source="/proc/meminfo; pagemaps of the image")
def memory(case: Case) -> Iterator[Finding]:
    """The image's pages must fit into the node's memory. Free some, or restore elsewhere."""
    wanted = case.needs.memory_bytes
    if not wanted:
        return
    have, free = case.node.memory_bytes, case.node.memory_available_bytes
    if have is None or free is None:
        yield from case.untold("place.memory", "memory", f"the image has {_mib(wanted)} of memory")
    elif wanted > have:
        yield finding(
            "place.memory",
            "refuse",
            f"the image has {_mib(wanted)} of memory, {case.where()} has {_mib(have)} in all",
            "restore on a node with more memory",
        )
    elif wanted > free:
        yield finding(
            "place.memory",
            "unknown",
            f"the image has {_mib(wanted)} of memory, {case.where()} has {_mib(free)} available",
            "end something there first",
        )


@rule("place.memory-limit", about="spec", source="runc moves CRIU into the new cgroup before it restores")
def memory_limit(case: Case) -> Iterator[Finding]:
    """A restore fills memory under the new container's limit. Raise the limit to what the image has."""
    resources = part(part(case.new, "linux"), "resources")
    limit = part(resources, "memory").get("limit") or 0
    if 0 < limit < min(case.needs.memory_bytes, _MAX_BYTES):
        yield finding(
            "place.memory-limit",
            "refuse",
            f"the image has {_mib(case.needs.memory_bytes)} of memory, the new container may have "
            f"{_mib(limit)}",
            "raise the memory limit",
        )


@rule("place.pids-limit", about="spec", source="measured: fork fails in the new cgroup")
def pids_limit(case: Case) -> Iterator[Finding]:
    """All tasks of the image are made in the new container's cgroup. Raise its limit of processes."""
    limit = part(part(part(case.new, "linux"), "resources"), "pids").get("limit") or 0
    if 0 < limit < len(case.needs.tasks) and not case.has_kernel:
        yield finding(
            "place.pids-limit",
            "refuse",
            f"the image has {len(case.needs.tasks)} tasks, the new container may have {limit}",
            "raise the limit of processes (pids)",
        )


@rule("place.cpus", about="here", source="measured: cpuset.cpus answers numerical result out of range")
def cpus(case: Case) -> Iterator[Finding]:
    """The processors that the new spec names for the container must be there. Name others (cpu.cpus)."""
    wanted = part(part(part(case.new, "linux"), "resources"), "cpu").get("cpus") or ""
    try:
        lacking = _numbers(str(wanted)) - _numbers(_ONLINE.read_text())
    except (OSError, ValueError):
        return  # the runtime says what it thinks of it
    if lacking:
        yield finding(
            "place.cpus",
            "refuse",
            f"the new container is to have processor {min(lacking)}, which {case.where()} has not",
            "name processors that are there (linux.resources.cpu.cpus)",
        )


def _numbers(text: str) -> set[int]:
    """What a list like 0-3,8 names. Raises ValueError."""
    found: set[int] = set()
    for item in filter(None, text.strip().split(",")):
        first, _, last = item.partition("-")
        found.update(range(int(first), min(int(last or first), _MAX_CPU) + 1))
    return found


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
                f"the image has up to {count} huge pages of {_mib(int(size))} mapped, {case.where()} has "
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
        yield from case.untold("place.disk", "disk", f"{_mib(wanted)} are to be unpacked")
    elif wanted > free:
        yield finding(
            "place.disk",
            "refuse",
            f"the image unpacks {_mib(wanted)} into the root file system, {case.where()} has {_mib(free)} "
            "free",
            "free space there",
        )


def _mib(size: int) -> str:
    return f"{max(size, 1 << 20) >> 20} MiB"


# --- ports ---------------------------------------------------------------------------------------------


@rule("place.ports", about="here", source="measured: Address already in use, with two clones in a namespace")
def ports(case: Case) -> Iterator[Finding]:
    """A port that somebody else listens on in the network namespace that the new container joins cannot be
    bound again. End the other one, or give the container another network namespace.
    """
    wanted = [need for need in case.needs.sockets if need.state == "listen" or need.protocol == "udp"]
    kind = given(case.new, "network")
    if not wanted or kind == "own" or case.has_kernel:
        return
    path = _namespace_path(case.new, "network") if kind == "joined" else None
    try:
        taken = _taken(path)
    except FileNotFoundError:
        return  # spec.namespaces says so
    except OSError as error:
        yield finding(
            "place.ports",
            "unknown",
            f"the network namespace {path} cannot be looked into: {error.strerror}",
            "look whether it is there",
        )
        return
    for need in wanted:
        if any(_clash(need, other) for other in taken.get((need.protocol, need.port), ())):
            yield finding(
                "place.ports",
                "refuse",
                f"{need.protocol} port {need.port} ({need.address}) is taken in the new container's network "
                "namespace",
                "end what listens there, or give the container another network namespace",
            )


def _clash(need: SocketNeed, other: str) -> bool:
    mine, theirs = ipaddress.ip_address(need.address), ipaddress.ip_address(other)
    return mine.is_unspecified or theirs.is_unspecified or mine == theirs


def _taken(path: str | None) -> Mapping[tuple[str, int], list[str]]:
    """Protocol and port to the addresses that are bound in a network namespace; None is this one's."""
    import ctypes  # few restores come here
    import threading

    found: dict[tuple[str, int], list[str]] = {}
    problem: list[OSError] = []

    def inside() -> None:
        try:
            if path is not None:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                finally:
                    os.close(descriptor)
            for name, state in (
                ("tcp", _LISTEN),
                ("tcp6", _LISTEN),
                ("udp", _UDP_BOUND),
                ("udp6", _UDP_BOUND),
            ):
                table = Path(f"/proc/thread-self/net/{name}")
                if table.exists():  # not without IPv6
                    _read(table.read_text(), name.rstrip("6"), state, found)
        except OSError as error:
            problem.append(error)

    # A thread of its own joins the namespace and ends there: the caller's never changes.
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    if problem:
        raise problem[0]
    return found


def _read(text: str, protocol: str, state: str, into: dict[tuple[str, int], list[str]]) -> None:
    for line in text.splitlines()[1:]:
        words = line.split()
        address, _, port = words[1].partition(":")
        if words[3] == state:
            raw = bytes.fromhex(address)
            # The kernel prints 32-bit words in its own order.
            plain = b"".join(raw[n : n + 4][::-1] for n in range(0, len(raw), 4))
            into.setdefault((protocol, int(port, 16)), []).append(str(ipaddress.ip_address(plain)))


# --- process ids ---------------------------------------------------------------------------------------


@rule("place.pids", about="here", source="measured: Can't fork for N: File exists")
def pids(case: Case) -> Iterator[Finding]:
    """In a PID namespace that the container shares, its process ids must be free: they are restored. End
    those processes, or give the container a PID namespace of its own.
    """
    kind = given(case.new, "pid")
    if kind == "own" or case.has_kernel or not case.needs.tasks:
        return
    path = _namespace_path(case.new, "pid") if kind == "joined" else "/proc/self/ns/pid"
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


def _namespace_path(spec: Mapping[str, Any], kind: str) -> str:
    entries: list[Mapping[str, Any]] = part(spec, "linux").get("namespaces") or []
    return next(str(entry["path"]) for entry in entries if entry.get("type") == kind)


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
    renew them. Checkpoint again, or set torpor.dev/use: clone where the program can live with it.
    """
    if case.origin.use == "move" and case.origin.used_by:
        yield finding(
            "identity.once",
            "refuse",
            f"the image may be used once and container '{case.origin.used_by}' has used it",
            "checkpoint again, or set torpor.dev/use: clone",
        )
    elif case.origin.use == "clone" and case.origin.leave_running:
        yield finding(
            "identity.once",
            "ok",
            "clones have the same random state, UUIDs and cached credentials as the container they came from",
            "",
        )
