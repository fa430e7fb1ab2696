"""What a process runs, where it stands and what it has sealed, as far as CRIU cannot bring it back."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from engines.criu.outlook import Outlook

_LINKS = {"cwd": "working directory", "root": "root directory", "exe": "program"}
# The kernel seals these itself where it is built to (CONFIG_MSEAL_SYSTEM_MAPPINGS).
_KERNELS = frozenset({b"[vdso]", b"[vvar]", b"[vvar_vclock]", b"[vsyscall]", b"[uprobes]", b"[sigpage]"})
_SEALED = re.compile(rb"^VmFlags:.* sl\b")
_MAPPING = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ ")


def look(outlook: Outlook, pid: int, who: str) -> None:
    """Note what stands against a dump of a process. who: it, in words. Raises OSError if it is gone."""
    for name, what in _LINKS.items():
        link = read_link(outlook, f"/proc/{pid}/{name}", f"the {what} of {who}")
        # Of a program without a name on any file system CRIU keeps what it maps, and not what it is.
        if name == "exe" and link.startswith("/memfd:"):
            outlook.add(
                "memory-program",
                f"{who} runs a program that is in memory only (memfd_create and execve), which CRIU dumps "
                "but cannot restore",
                "let the program be started from a file, or end it before the checkpoint",
            )
    if _has_sealed(pid):
        outlook.add(
            "sealed-memory",
            f"{who} has sealed memory (mseal), which would come back without its seal",
            "start the program so that it does without",
        )


def read_link(outlook: Outlook, path: str, what: str) -> str:
    """Where a link in /proc leads; "" where that name is too long, which is noted. Raises OSError."""
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
    outlook.add(
        "long-name",
        f"{what} has a path longer than {os.pathconf('/', 'PC_PATH_MAX')} bytes, which CRIU cannot read",
        "let the program leave it, or shorten the path",
    )
    return ""


def _has_sealed(pid: int) -> bool:
    """Whether a process has called mseal.

    Nothing but smaps tells, which takes some 0.1 s for each GiB of small pages while the container runs.
    """
    data = Path(f"/proc/{pid}/smaps").read_bytes()
    if b" sl" not in data:
        return False
    name = b""
    for line in data.splitlines():
        if _MAPPING.match(line):
            name = line[73:]
        elif _SEALED.match(line) and name not in _KERNELS:
            return True
    return False
