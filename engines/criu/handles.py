"""Open descriptors that CRIU does not dump, or dumps and cannot open again."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from engines import mountinfo
from engines.criu.outlook import Outlook
from engines.criu.tree import descriptor, same

_KCMP_EPOLL_TFD = 7
_O_PATH = 0o10000000
_HUGETLBFS_MAGIC = 0x958458F6
_ALARM_CLOCKS = ("8", "9")
_OF_THREAD = re.compile(r"/\d+/task/\d+(/|$)")
_NAMESPACE = re.compile(r"(cgroup|ipc|mnt|net|pid|time|user|uts):\[\d+\]")
_CLOSE = "let the program close it before the checkpoint"
_TARGET = re.compile(r"^tfd:\s*(\d+) .*?\bino:([0-9a-f]+)", re.MULTILINE)


@dataclass(slots=True)
class Handles:
    """Looks at the descriptors of one container's processes, one after the other.

    init: its first process. mounts: of its first process. namespaces: those that its processes live in, as
    links. named: paths of devices and mounts that its specification names.
    """

    outlook: Outlook
    init: int
    mounts: Mounts
    namespaces: Container[str]
    named: Container[str]
    _polled: set[frozenset[tuple[str, str]]] = field(default_factory=set[frozenset[tuple[str, str]]])

    def look(self, pid: int, number: str, link: str, who: str) -> None:
        """Note what stands against one descriptor. link: where it leads. Raises OSError if it is gone."""
        if link.startswith("anon_inode:"):
            self._anonymous(pid, number, link.removeprefix("anon_inode:"), who)
        elif found := _NAMESPACE.fullmatch(link):
            self._namespace(found[1], link, who)
        elif link.startswith("/"):
            self._file(pid, number, link, who)

    def _anonymous(self, pid: int, number: str, kind: str, who: str) -> None:
        if kind == "[pidfd]":
            if int(_info(pid, number).get("flags", "0"), 8) & os.O_EXCL:
                self._add("pidfd", f"{who} has a descriptor of a thread (PIDFD_THREAD)")
        elif kind == "[timerfd]":
            if _info(pid, number).get("clockid") in _ALARM_CLOCKS:
                self._add(
                    "alarm", f"{who} has a timer that wakes up the machine (a timerfd of an alarm clock)"
                )
        elif kind == "[eventpoll]":
            self._poll(pid, number, who)

    def _poll(self, pid: int, number: str, who: str) -> None:
        """A file may be closed here, and watched on: then somebody else has it.

        CRIU looks in the first process that has the epoll.
        """
        targets = frozenset(_TARGET.findall(descriptor(pid, number)))
        if not targets or targets in self._polled:
            return
        self._polled.add(targets)
        lost = {name for name, _ in targets if not os.path.lexists(f"/proc/{pid}/fd/{name}")}
        if any(not _has_target(pid, int(number), int(name)) for name in lost):
            self._add(
                "epoll", f"{who} has an epoll that watches a file which is open in another process only"
            )

    def _namespace(self, kind: str, link: str, who: str) -> None:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/ns/{kind}") == link:  # noqa: PTH115
                self._add("node-namespace", f"{who} has a descriptor of the node's {kind} namespace")
                return
        if link not in self.namespaces:
            self._add(
                "empty-namespace", f"{who} has a descriptor of a {kind} namespace that no process is in"
            )

    def _file(self, pid: int, number: str, link: str, who: str) -> None:
        path = f"/proc/{pid}/fd/{number}"
        info = _info(pid, number)
        by_path = int(info.get("flags", "0"), 8) & _O_PATH
        if link.startswith("/memfd:"):
            if by_path:
                self._add("path", f"{who} has a file in memory (memfd) open with O_PATH")
            elif os.statvfs(path).f_bsize > os.sysconf("SC_PAGE_SIZE"):
                self._add("huge-memory", f"{who} has a file of huge pages in memory (MFD_HUGETLB)")
        elif link.startswith("/dev/pts/") and link.endswith(" (deleted)"):
            self._add("terminal", f"{who} has a terminal whose other side was closed")
        elif _OF_THREAD.search(link) and not os.path.lexists(f"/proc/{self.init}/root{link}"):
            self._add("ended-thread", f"{who} has a file of an ended thread's /proc")
        elif by_path and (stat.S_ISSOCK(mode := os.stat(path).st_mode) or stat.S_ISFIFO(mode)):  # noqa: PTH116
            self._add("path", f"{who} has a {_what(mode)} open with O_PATH")
        elif self.mounts.hide(link, info.get("mnt_id", "")):
            self._hidden(link, f"{who}, descriptor {number},")
        elif self.is_own_device(path, link, info.get("mnt_id", "")):
            self._add(
                "own-device",
                f"{who} has the device {link} open, which the specification does not name",
                "name it there (linux.devices), or let the program close it before the checkpoint",
            )

    def places(self, pid: int, who: str) -> None:
        """Note a working directory that a later mount hides. Raises OSError if the process is gone."""
        link = os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115
        place = os.open(f"/proc/{pid}/cwd", _O_PATH | os.O_CLOEXEC)
        try:
            mount_id = _info(os.getpid(), str(place)).get("mnt_id", "")
        finally:
            os.close(place)
        if self.mounts.hide(link, mount_id):
            self._hidden(link, f"the working directory of {who}")

    def _hidden(self, link: str, who: str) -> None:
        """Note a file or directory that a later mount hides."""
        self._add(
            "hidden",
            f"{who} leads to {link}, over which something else was mounted later",
            "unmount that, or let the program leave it, before the checkpoint",
        )

    def is_own_device(self, path: str, link: str, mount_id: str) -> bool:
        """Whether a device (of memory) is open whose numbers no image tells: only those below a tmpfs do.

        path: where it is opened here, link: what it is called there. Raises OSError.
        """
        if self.mounts.kinds.get(mount_id) in (None, "tmpfs", "devpts") or link in self.named:
            return False
        status = os.stat(path)  # noqa: PTH116
        is_device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
        return is_device and os.major(status.st_rdev) == 1

    def _add(self, rule: str, message: str, remedy: str = _CLOSE) -> None:
        self.outlook.add(
            rule, f"{message}, which CRIU cannot bring back" if remedy is _CLOSE else message, remedy
        )


@dataclass(slots=True)
class Mounts:
    """The mounts of a container.

    kinds: of file systems, by the mounts' numbers. tops: places to the mount that is seen there.
    without_programs: devices (major:minor) of file systems that are mounted noexec wherever they are.
    """

    kinds: dict[str, str] = field(default_factory=dict[str, str])
    without_programs: frozenset[str] = frozenset()
    tops: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, init: int) -> Mounts:
        """Read them. Raises OSError."""
        made = cls()
        closed: set[str] = set()
        open_: set[str] = set()
        for mount in mountinfo.mounts(init):
            made.tops[mount.point] = mount.id  # of several in one place the last is on top
            made.kinds[mount.id] = mount.kind
            (closed if "noexec" in mount.options else open_).add(mount.device)
        made.without_programs = frozenset(closed - open_)
        return made

    def hide(self, path: str, mount_id: str) -> bool:
        """Whether another mount is where a file of this mount is, as far as paths tell."""
        if mount_id not in self.kinds or path.endswith(" (deleted)") or len(self.tops) == 1:
            return False
        while path not in self.tops:
            path = path.rpartition("/")[0] or "/"
            if path == "/" and path not in self.tops:
                return False
        return self.tops[path] != mount_id


def _info(pid: int, number: str) -> Mapping[str, str]:
    return dict(re.findall(r"^(flags|clockid|mnt_id):\s*(\S+)", descriptor(pid, number), re.MULTILINE))


def _has_target(pid: int, poll: int, name: int) -> bool:
    """Whether what an epoll watches is open in a process, under whatever number."""
    slot = struct.pack("=III", poll, name, 0)
    numbers = map(int, os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    return any(same(pid, pid, _KCMP_EPOLL_TFD, number, slot) for number in numbers)


def _what(mode: int) -> str:
    return "unix socket" if stat.S_ISSOCK(mode) else "FIFO"
