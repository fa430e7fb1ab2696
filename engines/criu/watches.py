"""Finds the names of files under inotify and fanotify watches, where only the inode is known.

The kernel resolves the handle of a watched file, except on overlay file systems, which container root file
systems are. CRIU then looks for the inode below a few directories, and below those it is told
(`irmap-scan-path`). A path that is told in full is found at once.

Names come from the container. One that a line of CRIU's settings cannot hold would be lines of its own, which
can make CRIU run any program; so CRIU is told the directory above it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Collection

_MAX_ENTRIES = 500_000
# What CRIU's settings take for the end of a word, a quotation, a comment or a sign.
_UNSAYABLE = re.compile(r"""[\s\0-\x20\x7f"'#\\=]""")


def watched_paths(init: int, watches: Collection[tuple[int, int]]) -> tuple[tuple[str, ...], int]:
    """Paths (from the container's root) of what is watched on its root file system; how many are not found.

    A path may be that of a directory above, see the module. init: the container's first process. watches:
    (inode, device as the kernel numbers it). Watches on other file systems are left to CRIU, which asks the
    kernel.
    """
    root = f"/proc/{init}/root"
    device = os.stat(f"{root}/").st_dev  # noqa: PTH116
    missing = {inode for inode, number in watches if number == _kernel_number(device)}
    found: list[str] = []
    queue = deque([""])
    if missing and os.stat(f"{root}/").st_ino in missing:  # noqa: PTH116
        missing.discard(os.stat(f"{root}/").st_ino)  # noqa: PTH116
        found.append("/")
    entries = 0
    while queue and missing and entries < _MAX_ENTRIES:
        folder = queue.popleft()
        with contextlib.suppress(OSError), os.scandir(f"{root}{folder}/") as listing:
            for entry in listing:
                entries += 1
                path = f"{folder}/{entry.name}"
                is_folder = entry.is_dir(follow_symlinks=False)
                if not is_folder and entry.inode() not in missing:
                    continue
                status = entry.stat(follow_symlinks=False)
                if is_folder:
                    if status.st_dev != device:
                        continue
                    queue.append(path)
                if status.st_ino in missing:
                    missing.discard(status.st_ino)
                    found.append(path)
    told = [sayable(path) for path in found]
    return tuple(dict.fromkeys(filter(None, told))), len(missing) + told.count("")


def sayable(path: str) -> str:
    """The longest leading part of a path that a line of CRIU's settings can hold, "" if none can."""
    bad = _UNSAYABLE.search(path)
    return path if bad is None else path[: bad.start()].rpartition("/")[0]


def _kernel_number(device: int) -> int:
    """A device number as the kernel has it inside (and prints it in fdinfo)."""
    return os.major(device) << 20 | os.minor(device)
