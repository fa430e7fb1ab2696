"""Finds what a test left behind on the machine.

Other work may go on beside the tests, so only what carries the session's own tag counts: processes by
command line, environment or cgroup, mounts and directories by path, network rules by the namespaces that
those processes and paths lead to. The tag is a word that stands in every path, name and environment of the
session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.support.containers import command, there, tool

CGROUPS = Path("/sys/fs/cgroup")
CRIU_REMNANTS = ("/tmp/.criu*", "/tmp/cr-*", "/tmp/crtools*", "/run/criu*")
TAG_VARIABLE = "TORPOR_TEST_TAG"


class Watch:
    """Remembers what is there when it is made; `leaks` says what has come since and did not go.

    tag: the session's word. gone: patterns of files that must be gone again, such as torpor's state of a
    container and what lies in the store's staging area.
    """

    def __init__(self, tag: str, *, gone: Sequence[str] = ()) -> None:
        self.tag = tag
        self.gone = gone
        self.before = self._look()

    def leaks(self, *, timeout_s: float = 20.0) -> list[str]:
        """What is left, in words; waits up to timeout_s for it to go (callers clean up after they answer)."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = sorted(self._look() - self.before)
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)

    def _look(self) -> frozenset[str]:
        return frozenset(
            [
                # Without the pid: a daemon that a test restarted is no leak.
                *(f"process: {' '.join(argv)[:200]}" for _, argv in processes(self.tag)),
                *(f"mount: {path}" for path in mounts(self.tag)),
                *(f"cgroup: {path}" for path in cgroups(self.tag) if path.name != self.tag),
                *(f"network lock: {table}" for table in locks(self.tag)),
                *(f"left by criu: {path}" for pattern in CRIU_REMNANTS for path in _glob(pattern)),
                *(f"file: {path}" for pattern in self.gone for path in _glob(pattern)),
            ]
        )


def processes(tag: str) -> Iterator[tuple[int, list[str]]]:
    """Processes that carry the tag, without this one and its ancestors, zombies without a reaper included."""
    mark = f"{TAG_VARIABLE}={tag}".encode()
    ours = set(_ancestors())
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in ours:
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes()
            carried = (
                tag.encode() in words
                or tag in (entry / "cgroup").read_text()
                or mark in (entry / "environ").read_bytes().split(b"\0")
            )
            if carried:
                yield int(entry.name), words.decode(errors="replace").rstrip("\0").split("\0")


def mounts(tag: str) -> list[str]:
    """Mount points of this mount namespace that have the tag in their path, deepest first."""
    lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    points = [line.split()[4].replace("\\040", " ") for line in lines]
    return sorted((point for point in points if tag in point), reverse=True)


def cgroups(tag: str) -> list[Path]:
    """Control groups of every hierarchy that have the tag in their path, deepest first."""
    found: list[Path] = []
    for hierarchy in hierarchies():
        for folder, names, _ in os.walk(hierarchy):
            found += [Path(folder) / name for name in names if tag in f"{folder}/{name}"]
    return sorted(found, key=lambda path: (-len(path.parts), str(path)))


def frozen_cgroups(tag: str) -> list[Path]:
    """Those of the session's control groups that are frozen."""
    states = {"freezer.state": "FROZEN", "cgroup.freeze": "1"}
    return [
        group
        for group in cgroups(tag)
        for file, value in states.items()
        if _read(group / file).strip() == value
    ]


def remove_cgroup(name: str) -> None:
    """Remove the control group `name` (below the hierarchies' roots) as its maker does: it must be empty.

    What has died stays in it for a moment.
    """
    deadline = time.monotonic() + 20
    for hierarchy in hierarchies():
        group = hierarchy / name.lstrip("/")
        while group.exists():
            with contextlib.suppress(OSError):
                group.rmdir()
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)


def remove_cgroups(tag: str) -> None:
    """Thaw and remove the session's control groups, which must be empty."""
    for group in frozen_cgroups(tag):
        for file, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            with contextlib.suppress(OSError):
                (group / file).write_text(value)
    for group in cgroups(tag):
        with contextlib.suppress(OSError):
            group.rmdir()


def unmount(tag: str) -> None:
    """Unmount whatever has the tag in its path, lazily."""
    libc = ctypes.CDLL(None, use_errno=True)
    for point in mounts(tag):
        libc.umount2(point.encode(), 2)  # MNT_DETACH


def locks(tag: str) -> list[str]:
    """CRIU's traffic locks in every network namespace that the session's processes and paths lead to."""
    found: list[str] = []
    for namespace in _network_namespaces(tag):
        listing = command("nsenter", f"--net={namespace}", tool("nft"), "list", "tables", check=False).stdout
        found += [line for line in listing.splitlines() if "CRIU" in line]
    return found


def _network_namespaces(tag: str) -> Iterator[str]:
    seen = {os.stat("/proc/self/ns/net").st_ino}
    paths = [f"/proc/{pid}/ns/net" for pid, _ in processes(tag)]
    paths += [point for point in mounts(tag) if "netns" in point]
    for path in paths:
        with contextlib.suppress(OSError):
            inode = os.stat(path).st_ino
            if inode not in seen:
                seen.add(inode)
                yield path


def hierarchies() -> Iterable[Path]:
    """The roots of the control group hierarchies: one with cgroup v2, one for each controller with v1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in CGROUPS.iterdir() if path.is_dir() and not path.is_symlink()]


def _ancestors() -> Iterator[int]:
    pid = os.getpid()
    while pid:
        yield pid
        pid = int(_read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[1])


def _glob(pattern: str) -> list[Path]:
    return there(Path("/"), pattern.lstrip("/"))


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
