"""Mounts of a running container that CRIU does not dump, or that a restore would not accept."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines import mountinfo
from engines.criu.outlook import Outlook
from engines.mountinfo import Mount
from engines.places import is_bind, resolve

# What CRIU knows, from its own table; what it can only take as given from outside is not among them.
_KNOWN = frozenset(
    """proc sysfs devtmpfs binfmt_misc tmpfs devpts btrfs pstore securityfs fusectl debugfs tracefs cgroup
    cgroup2 mqueue autofs""".split()  # noqa: SIM905
)
_FOREIGN = ("overlay", "fuse", "nfs", "cifs", "smb3", "9p", "ceph", "virtiofs")
_NOWHERE = frozenset({"nsfs", "ramfs", "hugetlbfs", "bpf"})
NODE_DEVICES = frozenset(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))
"""What a runtime binds into a container that may not make device nodes."""


def look(outlook: Outlook, init: int, spec: Mapping[str, Any]) -> None:
    """Note mounts that stand against a checkpoint. init: the container's first process. Raises OSError."""
    mounts = mountinfo.mounts(init)
    entries: list[dict[str, Any]] = spec.get("mounts") or []
    root = Path(f"/proc/{init}/root")
    given = [(resolve(root, str(entry.get("destination", "/"))), entry) for entry in entries]
    places = [place for place, _ in given]
    binds = {place for place, entry in given if is_bind(entry)}
    from_outside = {mount.device for mount in mounts if mount.point == "/" or mount.point in binds}
    for mount in mounts:
        if "\n" in mount.point:
            outlook.add(
                "mount-name",
                f"the place of a mount has a line break in its name ('{mount.point}'), which CRIU misreads",
                "mount it elsewhere",
            )
        elif _is_foreign(mount, places, binds, from_outside):
            outlook.add(
                "mount",
                f"a file system of the kind {mount.kind} was mounted at {mount.point} inside the container",
                "unmount it, or let the runtime mount it",
            )
    unasked(outlook, mounts, places, spec)


def _is_foreign(mount: Mount, places: list[str], binds: set[str], from_outside: set[str]) -> bool:
    if mount.point == "/" or mount.point in binds:
        return False
    if mount.kind in _NOWHERE:
        return True
    if mount.kind in _KNOWN or any(mount.point == top or mount.point.startswith(f"{top}/") for top in places):
        return False
    # A bind of what came from outside does.
    return mount.device not in from_outside or mount.kind.startswith(_FOREIGN)


def unasked(outlook: Outlook, mounts: Sequence[Mount], places: list[str], spec: Mapping[str, Any]) -> None:
    """Without CAP_SYS_ADMIN the new container may have the mounts of its specification, and no others."""
    process: Mapping[str, Any] = spec.get("process") or {}
    sets: Mapping[str, Any] = process.get("capabilities") or {}
    reachable: set[str] = set(sets.get("permitted") or ())
    if not process.get("noNewPrivileges"):
        reachable.update(sets.get("bounding") or (), sets.get("inheritable") or ())
    if "CAP_SYS_ADMIN" in reachable or not spec:
        return
    linux: Mapping[str, Any] = spec.get("linux") or {}
    hidden = [*(linux.get("maskedPaths") or ()), *(linux.get("readonlyPaths") or ())]
    room = Counter([*places, *map(os.path.normpath, hidden), "/", "/dev/console"])
    apart = any(entry.get("type") == "cgroup" for entry in linux.get("namespaces") or ())
    groups = [str(e.get("destination")) for e in spec.get("mounts") or () if e.get("type") == "cgroup"]
    nodes = {str(entry.get("path")) for entry in linux.get("devices") or ()} | NODE_DEVICES
    for mount in mounts:
        room[mount.point] -= 1
        # With a cgroup namespace they are no binds, and an image does not tell whose they are.
        in_groups = not apart and any(mount.point.startswith(f"{top}/") for top in groups)
        if room[mount.point] < 0 and mount.point not in nodes and not in_groups:
            outlook.add(
                "unasked-mount",
                f"it has a {mount.kind} mounted on {mount.point}, which its specification does not name, so "
                "that no restore would accept it",
                "name it in the specification, unmount it, or bind its parent without what is below (bind in "
                "place of rbind)",
            )
