"""Reads /proc/PID/mountinfo."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One mount, as proc_pid_mountinfo(5) has it.

    device: "major:minor". root: of the mount within its file system. point: where it is mounted, in the mount
    namespace of the process. options: of this mount. kind, source, super_options: of the file system; a comma
    within one of these options is still in octal.
    """

    id: str
    device: str
    root: str
    point: str
    options: tuple[str, ...]
    kind: str
    source: str
    super_options: tuple[str, ...]


def mounts(pid: int | str = "self") -> tuple[Mount, ...]:
    """The mounts that a process sees; of two in one place the later is on top. Raises OSError."""
    return tuple(parse(Path(f"/proc/{pid}/mountinfo").read_bytes()))


def parse(data: bytes) -> Iterator[Mount]:
    """The mounts that a table names."""
    # The kernel writes blanks, tabs, line ends and backslashes in octal, and all else as it is: a name may
    # hold what others take for the end of a line or of a word.
    for line in os.fsdecode(data).split("\n"):
        before, separator, after = line.partition(" - ")
        words, rest = before.split(" "), after.split(" ")
        if separator and len(words) > 5 and len(rest) > 2:
            yield Mount(
                id=words[0],
                device=words[2],
                root=unescaped(words[3]),
                point=unescaped(words[4]),
                options=tuple(words[5].split(",")),
                kind=rest[0],
                source=unescaped(rest[1]),
                super_options=tuple(rest[2].split(",")),
            )


def unescaped(text: str) -> str:
    """A name as it is, of which /proc writes some characters in octal."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
