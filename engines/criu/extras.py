"""What CRIU loses without a word, noted beside its images and put right at a restore.

- Which processors a thread is bound to.
- Which cgroup below the container's own a process is in: the engine lets the runtime choose cgroups.
- That a fast periodic timerfd runs: one that has expired when the container is frozen would stay still.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from engines.criu import cgroups, tree
from engines.criu.repair import borrow

NAME = "torpor-extras.json"
_SCHEMA = 1


class Extras(TypedDict):
    """Numbers of processes and threads are those inside the container.

    affinity: thread to its processors. cgroups: process to controller to path below the container's cgroup.
    timers: process, descriptor, interval in nanoseconds.
    """

    schema: int
    affinity: dict[str, list[int]]
    cgroups: dict[str, dict[str, str]]
    timers: list[tuple[int, int, int]]


def note(image_path: Path, init: int, groups: cgroups.Groups, timers: Sequence[tuple[int, int]]) -> None:
    """Write what there is to note into an image; nothing if there is nothing.

    The container's processes stand still. groups: its cgroups; timers: see `foresee`. Raises OSError.
    """
    extras = Extras(schema=_SCHEMA, affinity={}, cgroups={}, timers=[])
    usual = _processors(groups)
    for pid in tree.of(init):
        with contextlib.suppress(OSError):
            below = {
                controller: path.removeprefix(groups[controller])
                for controller, path in cgroups.of_process(pid).items()
                if controller in groups and path.startswith(f"{groups[controller]}/")
            }
            if below:
                extras["cgroups"][str(tree.inner(pid))] = below
            for thread in tree.threads(pid):
                bound = os.sched_getaffinity(thread)
                if bound != usual:
                    extras["affinity"][str(tree.inner(thread))] = sorted(bound)
    for pid, descriptor in timers:
        with contextlib.suppress(OSError):
            interval_ns = _expired(Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text())
            if interval_ns:
                extras["timers"].append((tree.inner(pid), descriptor, interval_ns))
    if extras["affinity"] or extras["cgroups"] or extras["timers"]:
        (image_path / NAME).write_text(json.dumps(extras))


def _processors(groups: cgroups.Groups) -> set[int]:
    """The processors that a container's threads may use if they are not bound."""
    for controller, name in (("cpuset", "cpuset.effective_cpus"), ("", "cpuset.cpus.effective")):
        with contextlib.suppress(OSError, KeyError, ValueError):
            found: set[int] = set()
            for part in Path(groups[controller], name).read_text().strip().split(","):
                first, _, last = part.partition("-")
                found.update(range(int(first), int(last or first) + 1))
            return found
    return os.sched_getaffinity(0)


def _expired(fdinfo: str) -> int:
    """The interval (nanoseconds) of a periodic timerfd that has expired and was not read since, else 0."""
    fields = dict(re.findall(r"^(ticks|it_value|it_interval): (.+)$", fdinfo, re.MULTILINE))
    seconds, nanoseconds = (int(word) for word in re.findall(r"\d+", fields.get("it_interval", "0 0")))
    if fields.get("ticks", "0") != "0" and re.findall(r"\d+", fields.get("it_value", "")) == ["0", "0"]:
        return seconds * 1_000_000_000 + nanoseconds
    return 0


def apply(image_path: Path, init: int, groups: cgroups.Groups) -> None:
    """Put right what an image notes, in a restored container that does not run yet.

    init: its first process; groups: its new cgroups. Raises OSError, ValueError.
    """
    try:
        extras: Extras = json.loads((image_path / NAME).read_bytes())
    except FileNotFoundError:
        return
    processes = {tree.inner(pid): pid for pid in tree.of(init)}
    for inner, below in extras["cgroups"].items():
        for controller, path in below.items():
            # A name from an image: it must not lead out of the container's cgroup.
            if controller in groups and ".." not in path.split("/") and int(inner) in processes:
                place = Path(f"{groups[controller]}{path}")
                place.mkdir(parents=True, exist_ok=True)
                (place / "cgroup.procs").write_text(str(processes[int(inner)]))
    if extras["affinity"]:
        for pid in processes.values():
            for thread in tree.threads(pid):
                bound = extras["affinity"].get(str(tree.inner(thread)))
                # The new container may have none of these processors.
                with contextlib.suppress(OSError):
                    if bound:
                        os.sched_setaffinity(thread, bound)
    for inner, descriptor, interval_ns in extras["timers"]:
        if inner in processes:
            _rearm(processes[inner], descriptor, interval_ns)


def mend_terminals(terminals: Sequence[tuple[int, int, int]]) -> None:
    """Give terminals their flags back after a dump that failed: CRIU leaves O_NONBLOCK on some.

    terminals: see `foresee`.
    """
    for pid, descriptor, flags in terminals:
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                copy = borrow(pidfd, descriptor)
            finally:
                os.close(pidfd)
            try:
                if fcntl.fcntl(copy, fcntl.F_GETFL) & os.O_NONBLOCK != flags & os.O_NONBLOCK:
                    fcntl.fcntl(copy, fcntl.F_SETFL, flags)
            finally:
                os.close(copy)


def _rearm(pid: int, descriptor: int, interval_ns: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        copy = borrow(pidfd, descriptor)
    finally:
        os.close(pidfd)
    try:
        pair = divmod(interval_ns, 1_000_000_000)
        ctypes.CDLL(None).timerfd_settime(copy, 0, struct.pack("4q", *pair, *pair), None)
    finally:
        os.close(copy)
