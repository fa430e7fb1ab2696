"""What a sandbox's processes hold of the node's files: its memory is in the image, these are not.

runsc looks for each of them at a restore, and fails if one is missing. What the container has written itself
lies in the overlay above its root file system, which is in the image.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from engines.api import FileNeed
from engines.elf import build_id
from engines.gvisor.births import Birth
from engines.places import Places, source

_KINDS: Mapping[int, Literal["file", "directory", "fifo"]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "fifo",
}


def files(
    births: Iterable[Birth], rootfs_path: Path, mounts: Mapping[str, Mapping[str, Any]]
) -> tuple[FileNeed, ...]:
    """What the processes of a sandbox of one container hold that lies on this node.

    mounts: the specification's, by where they really lie inside.
    """
    held = {one for birth in births for one in birth.holds}
    held -= {(path, "open") for path, use in held if use == "mapped"}
    return tuple(_needs(sorted(held), rootfs_path, mounts))


def _needs(
    held: Iterable[tuple[str, str]], rootfs_path: Path, mounts: Mapping[str, Mapping[str, Any]]
) -> Iterator[FileNeed]:
    # What the sandbox tells is its word: no link in it may lead to what the container does not have.
    places = Places(rootfs_path, {path: source(entry) for path, entry in mounts.items()})
    for path, use in held:
        with contextlib.suppress(OSError, ValueError):  # the container made it, or no file can be named so
            real = places.real(path)
            place, in_root = places.on_node(real), places.top(real) == "/"
            # Only in the overlay is a deleted file of the root deleted: below it is there; runsc wants it.
            if place is None or (use == "deleted" and not in_root):
                continue
            found = place.lstat()
            kind = _KINDS.get(stat.S_IFMT(found.st_mode))
            if kind is not None:
                # runsc itself compares nothing. Files of volumes live on, others are to be the same.
                fixed = use == "mapped" or (in_root and kind == "file")
                yield FileNeed(
                    path=path,
                    size_bytes=found.st_size if fixed else -1,
                    mode=-1,
                    build_id=_build(place) if use == "mapped" else "",
                    kind=kind,
                    use="working-directory" if use == "cwd" else "open",
                )


def _build(path: Path) -> str:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return build_id(descriptor)
        finally:
            os.close(descriptor)
    return ""
