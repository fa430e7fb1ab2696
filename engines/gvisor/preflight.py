"""What is looked at before a container is touched, and written down about it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engines.api import DumpFailed, InvalidRequest, NotSupported
from engines.gvisor import held, pod, terminal
from engines.gvisor.births import Birth, from_exec
from engines.gvisor.image import Member, Record
from engines.gvisor.runsc import Container, Runsc, Task, sandbox_flags, setup
from engines.places import resolve

_SPARE_BYTES = 64 << 20
# Since then its epoll sets are made anew at a restore: google/gvisor, pull request 14147.
_EPOLL_MENDED = 20260901
_ENDED_BYTES = 80 << 10  # measured with runsc 20240729, for each process that has ended


class Source:
    """A container that is to be dumped. words: the start of each error message."""

    def __init__(
        self, runsc: Runsc, container: Container, spec: Mapping[str, Any], rootfs_path: Path, words: str
    ) -> None:
        self._runsc = runsc
        self._container = container
        self._spec = spec
        self._rootfs = rootfs_path
        self._words = words
        self._setup = setup(sandbox_flags(container.pid))
        self._fellows: tuple[pod.Fellow, ...] = ()
        self._tasks: dict[str, tuple[Task, ...]] = {}
        self._births: tuple[Birth, ...] = ()

    def check_kind(self) -> None:
        """Raises NotSupported for a container that gVisor cannot dump with all that share its sandbox."""
        self._fellows = pod.fellows(self._runsc, self._container, self._spec, self._rootfs, self._words)
        if self._setup["network"] == "host":
            raise NotSupported(
                f"{self._words}: its sandbox uses the host's network (--network=host), which gVisor cannot "
                "save; start it with --network=none or sandbox",
                after="running",
            )
        if self._setup["overlay"] == "none":
            raise NotSupported(
                f"{self._words}: its sandbox writes to the root file system itself (--overlay2=none), so "
                "that what it changed would not be in the image; start it with --overlay2=root:self",
                after="running",
            )

    def check_tasks(self) -> None:
        """Raises DumpFailed while an exec session lives: runsc makes an image then that it cannot restore."""
        for fellow in self._fellows:
            tasks = self._runsc.tasks(fellow.container.id)
            if not tasks:
                raise InvalidRequest(f"{self._words}: its sandbox does not answer; look whether it is alive")
            # The container's own first process is older than any session.
            guests = sorted(task.pid for task in tasks if task.parent == 0)[1:]
            if guests:
                name = next(task.name for task in tasks if task.pid == guests[0])
                where = "it" if fellow.container.id == self._container.id else f"'{fellow.name}' of its pod"
                raise DumpFailed(
                    f"{self._words}: an exec session runs in {where} ({name}, process {guests[0]}), and "
                    "runsc could not restore the image; end the session, then try again",
                    after="paused" if self._container.status == "paused" else "running",
                )
            self._tasks[fellow.container.id] = tasks

    def check_births(self) -> None:
        """Raises DumpFailed for what exec sessions left behind. The sandbox must be paused."""
        births = self._runsc.births(self._container.id)
        self._births = births or ()
        if all(task.parent == 0 for tasks in self._tasks.values() for task in tasks):
            return
        after = "paused" if self._container.status == "paused" else "running"
        if births is None:
            raise DumpFailed(
                f"{self._words}: runsc does not say where its processes come from (trace procfs), so that "
                "the image might not be restorable; use a release of runsc that does",
                after=after,
            )
        marks = [self._runsc.first_exec_ns(fellow.container.id) for fellow in self._fellows]
        found = from_exec(births, min((mark for mark in marks if mark is not None), default=None))
        if found:
            raise DumpFailed(
                f"{self._words}: an exec session has left {found.name} behind (process {found.pid}), or may "
                "have, and runsc could not restore it; end that process, then try again",
                after=after,
            )

    def check_space(self, directory: Path) -> None:
        """Raises DumpFailed if the sandbox's memory would not fit."""
        need = int(memory_bytes(self._container.pid) * 1.1) + _SPARE_BYTES
        found = os.statvfs(directory)
        free = found.f_bavail * found.f_frsize
        if free < need:
            raise DumpFailed(
                f"{self._words}: {directory} has {free >> 20} MiB free, the image may need {need >> 20} MiB; "
                "free space, or give the image another place",
                after="paused" if self._container.status == "paused" else "running",
            )

    def warnings(self, version: str) -> tuple[str, ...]:
        """What is wrong with the image all the same, in sentences. version: runsc's release."""
        return (*self._waste(), *self._polling(version))

    def _waste(self) -> Iterator[str]:
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        ended = max(task.pid for task in tasks) - len(tasks)
        waste = ended * _ENDED_BYTES
        if waste >= _SPARE_BYTES:
            yield (
                f"runsc keeps something of the {ended} processes that have ended in container "
                f"'{self._container.id}', about {waste >> 20} MiB of the image; start it anew now and then"
            )

    def _polling(self, version: str) -> Iterator[str]:
        # Such a runsc saves the list of what was ready. Two descriptors that one epoll_wait found no longer
        # ready stay linked, so that one which has been closed since is saved, and woken, with the other.
        release = re.search(r"20\d{6}", version)
        names = sorted({birth.name for birth in self._births if birth.polls})
        if names and (not release or int(release[0]) < _EPOLL_MENDED):
            yield (
                f"runsc {version} may give the epoll sets of {', '.join(map(ascii, names[:3]))} in container "
                f"'{self._container.id}' events of descriptors that were closed before, for ever, so that a "
                "new connection with such a number may be cut; look after each restore whether it serves, "
                "and use a runsc of September 2026 or later"
            )

    def record(self, version: str) -> Record:
        """What runsc does not write down. version: runsc's release."""
        parts = {fellow.container.id: (fellow.name, self._member(fellow)) for fellow in self._fellows}
        own = parts[self._container.id][1]
        process: Mapping[str, Any] = self._spec.get("process") or {}
        return Record(
            runsc=version,
            setup=self._setup,
            spec=own.spec,
            mounts=own.mounts,
            tasks=own.tasks,
            memory_bytes=memory_bytes(self._container.pid),
            # Of a pod's processes runsc does not say to which container they belong.
            files=held.files(self._births, self._rootfs, own.mounts) if len(parts) == 1 else (),
            terminal=terminal.read(self._container.pid) if process.get("terminal") else "",
            pod=dict(parts.values()) if len(parts) > 1 else {},
        )

    def _member(self, fellow: pod.Fellow) -> Member:
        spec = fellow.spec
        process, linux = dict(spec.get("process") or {}), dict(spec.get("linux") or {})
        seccomp = linux.get("seccomp")
        kept = ("namespaces", "uidMappings", "gidMappings", "maskedPaths", "readonlyPaths")
        return Member(
            spec={
                "process": {key: value for key, value in process.items() if key not in ("args", "env")},
                "root": {"readonly": bool(spec["root"].get("readonly"))},
                "linux": {key: linux[key] for key in kept if linux.get(key)},
                "seccomp": _digest(seccomp) if seccomp else "",
            },
            mounts={
                resolve(fellow.rootfs_path, str(entry.get("destination"))): entry
                for entry in spec.get("mounts") or ()
            },
            tasks=self._tasks[fellow.container.id],
        )


def _digest(document: object) -> str:
    """Of a seccomp profile, as manifests of images have it: so that the two can be compared."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def memory_bytes(pid: int) -> int:
    """What a sandbox's process has in memory, its application's memory included; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    return 0
