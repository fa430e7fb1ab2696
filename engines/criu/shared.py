"""Memory of an image that is no process's own: shared memory, and what lies in file systems in memory.

It is charged to the new container like the processes' own. Contents are never read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from engines.criu.images import ImageReader, Message

_PAGE_PARENT, _PAGE_PRESENT = 1 << 0, 1 << 2
_TMPFS = 5
_GHOST = 1  # a remapped path that was deleted while open, with its content in a file of its own


def pages(reader: ImageReader, name: str) -> int:
    """Pages that a pagemap has in the image or in its parents. Raises ImageCorrupt."""
    found = 0
    for entry in reader.read(name, "PAGEMAP"):
        kept = bool(entry.flags & (_PAGE_PRESENT | _PAGE_PARENT)) if entry.HasField("flags") else True
        found += (int(entry.nr_pages) or int(entry.compat_nr_pages)) if kept else 0
    return found


def size(reader: ImageReader, mounts: Iterable[Message], page_bytes: int) -> int:
    """Bytes of shared memory (anonymous, System V, memfd), of file systems in memory, and of files that were
    deleted there while open.

    mounts: entries of the image's mount tables. Raises ImageCorrupt.
    """
    names = sorted(path.name for path in reader.path.glob("pagemap-shmem-*.img"))
    found = page_bytes * sum(pages(reader, name) for name in names)
    in_memory = [mount for mount in mounts if int(mount.fstype) == _TMPFS and not mount.ext_mount]
    for device in {int(mount.root_dev) for mount in in_memory}:
        found += _unpacked(reader, f"tmpfs-dev-{device}.tar.gz.img")
    return found + _ghosts(reader, {int(mount.mnt_id) for mount in in_memory})


def _unpacked(reader: ImageReader, name: str) -> int:
    """What an archive unpacks to: gzip ends with the size, modulo 4 GiB; holes are not in it."""
    if not reader.exists(name):
        return 0
    with os.fdopen(reader.open(name), "rb") as file:
        length = file.seek(0, 2)
        if length < 18:  # shorter than an empty one
            return 0
        file.seek(-4, 2)
        (unpacked,) = struct.unpack("<I", file.read(4))
        # Beyond 4 GiB its own length is at least a bound from below.
        return max(int(unpacked), length)


def _ghosts(reader: ImageReader, mount_ids: set[int]) -> int:
    if not mount_ids or not reader.exists("remap-fpath.img"):
        return 0
    ghosts = {
        int(entry.orig_id): int(entry.remap_id)
        for entry in reader.read("remap-fpath.img", "REMAP_FPATH")
        if int(entry.remap_type) == _GHOST
    }
    numbers = {
        ghosts[int(entry.reg.id)]
        for entry in reader.read("files.img", "FILES")
        if entry.HasField("reg") and int(entry.reg.id) in ghosts and int(entry.reg.mnt_id) in mount_ids
    }
    paths = (reader.path / f"ghost-file-{number:x}.img" for number in numbers)
    return sum(path.lstat().st_size for path in paths if path.exists())
