"""A container's processes: who descends from its first one, and what they call themselves."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path


def of(init: int) -> list[int]:
    """A process and its descendants: what CRIU dumps. Sessions of `exec` are not among them."""
    found = [init]
    for pid in found:
        for thread in threads(pid):
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                found += [int(word) for word in children.split()]
    return found


def text(pid: int, name: str) -> str:
    """A file of /proc on a process, whose name may be bytes that are no text. Raises OSError."""
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace")


def descriptor(pid: int, number: int | str) -> str:
    """What the kernel tells of an open descriptor. Raises OSError."""
    with open(f"/proc/{pid}/fdinfo/{number}", "rb", buffering=0) as file:  # noqa: PTH123
        return file.read().decode(errors="replace")


def threads(pid: int) -> list[int]:
    """The threads of a process, none if it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
    except OSError:
        return []


_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
_libc = ctypes.CDLL(None)


def same(pid: int, other: int, what: int, first: int = 0, second: int | bytes = 0) -> bool:
    """Whether two processes have one and the same thing (kcmp); False where nobody tells."""
    if _KCMP is None:
        return False
    return _libc.syscall(_KCMP, pid, other, what, ctypes.c_ulong(first), second) == 0


def inner(pid: int) -> int:
    """A process's or thread's number in its innermost pid namespace, 0 if it is gone."""
    try:
        found = text(pid, "status")
    except OSError:
        return 0
    return int(found.partition("\nNSpid:")[2].partition("\n")[0].split()[-1])
