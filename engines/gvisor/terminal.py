"""The settings of a container's terminal.

runsc gives a container a terminal of the node, and a restored container gets another one. What the program
had set (no echo, raw mode) belongs to the old terminal and is in no image of runsc: the engine carries it
over.
"""

from __future__ import annotations

import fcntl
import os
import stat
import termios
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_SETTINGS_BYTES = 36  # struct termios of asm-generic/termbits.h, the same for x86 and Arm
_SLAVE_MAJORS = range(136, 144)  # Documentation/admin-guide/devices.txt


def read(pid: int) -> str:
    """The settings of a sandbox's only terminal, as hexadecimal digits; empty if it has none.

    pid: of the sandbox. Raises OSError.
    """
    with _opened(pid) as descriptor:
        if descriptor is None:
            return ""
        return fcntl.ioctl(descriptor, termios.TCGETS, bytes(_SETTINGS_BYTES)).hex()


def write(pid: int, settings: str) -> None:
    """Give a sandbox's only terminal the settings that `read` told; nothing if it has none.

    pid: of the sandbox. Raises OSError, and ValueError for what `read` never tells.
    """
    wanted = bytes.fromhex(settings)
    if len(wanted) != _SETTINGS_BYTES:
        raise ValueError(f"settings of a terminal have {_SETTINGS_BYTES} bytes, not {len(wanted)}")
    with _opened(pid) as descriptor:
        if descriptor is not None:
            fcntl.ioctl(descriptor, termios.TCSETS, wanted)


@contextmanager
def _opened(pid: int) -> Generator[int | None]:
    found = list(_terminals(pid).values())
    if len(found) != 1:
        yield None
        return
    descriptor = os.open(found[0], os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _terminals(pid: int) -> dict[tuple[int, int], Path]:
    """The terminals among a process's descriptors, each once; none if it is gone."""
    found: dict[tuple[int, int], Path] = {}
    try:
        paths = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return {}
    for path in paths:
        with suppress(OSError):  # closed meanwhile
            status = path.stat()
            if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) in _SLAVE_MAJORS:
                found.setdefault((status.st_dev, status.st_rdev), path)
    return found
