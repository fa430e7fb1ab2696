"""The kernel's table of mounts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class MountEntry:
    """One line of /proc/self/mountinfo. options: those of the file system, as one text,
    still escaped (a comma inside a value is an escape).
    """

    mount_point: str
    fstype: str
    source: str
    flags: str
    options: str


def unescape(text: str) -> str:
    """Undo the octal escapes of mountinfo (blank, tab, newline, backslash, '#')."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def read_mounts(mountinfo_path: Path = Path("/proc/self/mountinfo")) -> tuple[MountEntry, ...]:
    """All mounts that this process sees, in mount order: of two on one place the later is on top."""
    entries: list[MountEntry] = []
    for line in os.fsdecode(mountinfo_path.read_bytes()).split("\n"):
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 3:
            continue
        entries.append(
            MountEntry(
                mount_point=unescape(fields[4]),
                fstype=rest[0],
                source=unescape(rest[1]),
                flags=fields[5],
                options=rest[2],
            )
        )
    return tuple(entries)


def mount_at(path: Path, mounts: tuple[MountEntry, ...]) -> MountEntry | None:
    """The topmost mount whose mount point is exactly `path` (resolved), or None."""
    wanted = os.path.realpath(path)
    return next((entry for entry in reversed(mounts) if entry.mount_point == wanted), None)


def mounts_below(path: Path, mounts: tuple[MountEntry, ...]) -> tuple[MountEntry, ...]:
    """Mounts strictly beneath `path`."""
    prefix = os.path.realpath(path).rstrip("/") + "/"
    return tuple(entry for entry in mounts if entry.mount_point.startswith(prefix))
