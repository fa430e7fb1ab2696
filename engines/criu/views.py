"""What a restored container sees of its control groups.

Version 1, without a cgroup namespace: runc gives such a container binds of its own cgroups. At a restore it
binds those of the process that calls it: the container would see another's, and write to them where its
mounts are writable. Version 2, with a cgroup namespace: CRIU makes no such namespace again, and mounts all of
the hierarchy.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from engines import mountinfo
from engines.criu.cgroups import Groups
from engines.criu.watches import sayable
from engines.namespaces import inside

_OPEN_TREE, _MOVE_MOUNT = 428, 429  # the same on every architecture
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4
_AT_FDCWD, _MNT_DETACH = -100, 2
_MS_REMOUNT, _MS_BIND, _MS_PRIVATE = 0x20, 0x1000, 1 << 18
_FLAGS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048}
_RELATIME = 1 << 21


def bound(init: int, places: Collection[str]) -> tuple[str, ...]:
    """Mounts of a container's cgroups of version 2 that CRIU must be told to come from outside.

    Those are binds, in one that was restored before, and any in a user namespace, whose root may not mount
    them anew. places: see `mend`. Raises OSError.
    """
    mapped = os.readlink(f"/proc/{init}/ns/user") != os.readlink("/proc/self/ns/user")  # noqa: PTH115
    apart = os.readlink(f"/proc/{init}/ns/cgroup") != os.readlink("/proc/self/ns/cgroup")  # noqa: PTH115
    found: list[str] = []
    for mount in mountinfo.mounts(init):
        if mount.kind != "cgroup2" or mount.point not in places or sayable(mount.point) != mount.point:
            continue
        if mapped or (mount.root != "/" and not apart):
            found.append(mount.point)
    return tuple(found)


def outside(places: Iterable[str]) -> dict[str, str]:
    """What is mounted there at first, where such binds are to come. places: see `mend`."""
    hierarchy = "/sys/fs/cgroup"
    if not Path(hierarchy, "cgroup.controllers").exists():
        return {}
    return {place: hierarchy for place in places if sayable(place) == place}


def mend(pids: Iterable[int], places: Collection[str], groups: Groups, *, apart: bool) -> None:
    """Mount a restored container's own cgroups in place of those of somebody else.

    pids: its processes, which do not run yet. places: where its specification mounts control groups. groups:
    those that the runtime made for it. apart: it asks for a cgroup namespace. Raises OSError.
    """
    seen: set[str] = set()
    for pid in pids if places else ():
        namespace = os.readlink(f"/proc/{pid}/ns/mnt")  # noqa: PTH115
        if namespace not in seen:
            seen.add(namespace)
            wrong = list(_wrong(pid, places, groups, apart=apart))
            if wrong:
                _replace(pid, wrong)


def _wrong(
    pid: int, places: Collection[str], groups: Groups, *, apart: bool
) -> Iterator[tuple[str, str, int]]:
    """Places that show something else, what they should, and the flags of the mounts."""
    for mount in mountinfo.mounts(pid):
        own = ""
        if mount.kind == "cgroup" and os.path.dirname(mount.point) in places:  # noqa: PTH120
            own = next((groups[name] for name in mount.super_options if name in groups), "")
        elif mount.kind == "cgroup2" and mount.point in places and apart:
            own = groups.get("", "")
        # In a hierarchy that the runtime did not join, the container is where its caller is.
        if own and not Path(own).samefile(f"/proc/{pid}/root{mount.point}"):
            flags = sum(bit for name, bit in _FLAGS.items() if name in mount.options)
            yield mount.point, own, flags | (0 if "noatime" in mount.options else _RELATIME)


def _replace(pid: int, wrong: Iterable[tuple[str, str, int]]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def call(result: int, what: str) -> int:
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)
        return result

    def mount() -> None:
        for tree, (point, _, flags) in zip(trees, wrong, strict=False):
            place = os.fsencode(point)
            call(libc.umount2(place, _MNT_DETACH), point)
            call(libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, place, _MOVE_MOUNT_F_EMPTY_PATH), point)
            for change in (_MS_PRIVATE, _MS_REMOUNT | _MS_BIND | flags):
                call(libc.mount(None, place, None, ctypes.c_ulong(change), None), point)

    trees: list[int] = []
    try:
        for _, own, _ in wrong:
            found = libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(own), _OPEN_TREE_CLONE | os.O_CLOEXEC)
            trees.append(call(found, own))
        inside("mnt", Path(f"/proc/{pid}/ns/mnt"), mount)
    finally:
        for tree in trees:
            os.close(tree)
