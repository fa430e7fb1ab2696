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
    for path, use in held:
        base = _base(path, mounts)
        place = _place(path, base, rootfs_path, mounts)
        # Only in the overlay is a deleted file of the root deleted: below it is there, and runsc wants it.
        if place is None or (use == "deleted" and base != "/"):
            continue
        with contextlib.suppress(OSError):  # the container made it
            found = place.lstat()
            kind = _KINDS.get(stat.S_IFMT(found.st_mode))
            if kind is not None:
                # runsc itself compares nothing. Files of volumes live on, others are to be the same.
                fixed = use == "mapped" or (base == "/" and kind == "file")
                yield FileNeed(
                    path=path,
                    size_bytes=found.st_size if fixed else -1,
                    mode=-1,
                    build_id=_build(place) if use == "mapped" else "",
                    kind=kind,
                    use="working-directory" if use == "cwd" else "open",
                )


def _base(path: str, mounts: Iterable[str]) -> str:
    """The mount that a path of the sandbox lies in."""
    tops = [top for top in mounts if path == top or path.startswith(f"{top.rstrip('/')}/")]
    return max(tops, key=len, default="/")


def _place(path: str, base: str, rootfs_path: Path, mounts: Mapping[str, Mapping[str, Any]]) -> Path | None:
    """Where a path of the sandbox lies on this node, None if it is on no file system of the node's."""
    if base == "/":
        return rootfs_path / path.lstrip("/")
    entry = mounts[base]
    if entry.get("type") != "bind" and not {"bind", "rbind"} & set(entry.get("options") or ()):
        return None
    inside = path.removeprefix(base).lstrip("/")
    source = Path(str(entry.get("source")))
    return source / inside if inside else source


def _build(path: Path) -> str:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return build_id(descriptor)
        finally:
            os.close(descriptor)
    return ""
