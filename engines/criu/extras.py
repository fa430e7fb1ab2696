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

NAME = "criu-extras.json"
_OLD_NAME = "torpor-extras.json"  # of earlier images; not to be written: see `engines.api.CheckpointRequest`
_SCHEMA = 1
_MAX_PROCESSOR = 2**16
_MAX_INTERVAL_NS = 2**63 - 1


class Extras(TypedDict):
    """Numbers of processes and threads are those inside the container.

    affinity: thread to its processors. cgroups: process to controller to path below the container's cgroup.
    timers: process, descriptor, interval in nanoseconds.
    """

    schema: int
    affinity: dict[int, list[int]]
    cgroups: dict[int, dict[str, str]]
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
                extras["cgroups"][tree.inner(pid)] = below
            for thread in tree.threads(pid):
                bound = os.sched_getaffinity(thread)
                if bound != usual:
                    extras["affinity"][tree.inner(thread)] = sorted(bound)
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


def read(image_path: Path) -> Extras | None:
    """What an image notes; None if nothing.

    Whoever made the image wrote it, so nothing in it is believed. Raises OSError, and ValueError if it is
    damaged.
    """
    path = next((path for name in (NAME, _OLD_NAME) if (path := image_path / name).exists()), None)
    if path is None:
        return None
    text = path.read_bytes()
    try:
        found = json.loads(text)
        if found["schema"] != _SCHEMA:
            raise ValueError(f"its schema is {found['schema']!r:.80}, this is for {_SCHEMA}")
        return Extras(
            schema=_SCHEMA,
            affinity={
                _number(thread): [_number(processor, _MAX_PROCESSOR) for processor in bound]
                for thread, bound in found["affinity"].items()
            },
            cgroups={
                _number(pid): {controller: _below(path) for controller, path in below.items()}
                for pid, below in found["cgroups"].items()
            },
            timers=[
                (_number(pid), _number(descriptor), _number(interval_ns, _MAX_INTERVAL_NS))
                for pid, descriptor, interval_ns in found["timers"]
            ],
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path.name} is damaged: {error!r}") from error


def _number(value: object, most: int = 2**31 - 1) -> int:
    number = int(value) if isinstance(value, str) else value
    if type(number) is not int or not 0 <= number <= most:
        raise ValueError(f"{value!r:.80} is no number from 0 to {most}")
    return number


def _below(path: object) -> str:
    """A cgroup's path, which is appended to that of the container's own and must not lead out of it."""
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise ValueError(f"{path!r:.80} is no path below a cgroup")
    os.fsencode(path)
    return path


def apply(extras: Extras, init: int, groups: cgroups.Groups) -> None:
    """Put right what an image notes, in a restored container that does not run yet.

    init: its first process; groups: its new cgroups. Raises OSError.
    """
    processes = {tree.inner(pid): pid for pid in tree.of(init)}
    for inner, below in extras["cgroups"].items():
        for controller, path in below.items():
            if controller in groups and inner in processes:
                place = Path(f"{groups[controller]}{path}")
                place.mkdir(parents=True, exist_ok=True)
                (place / "cgroup.procs").write_text(str(processes[inner]))
    if extras["affinity"]:
        for pid in processes.values():
            for thread in tree.threads(pid):
                bound = extras["affinity"].get(tree.inner(thread))
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
