"""Locks on files that an image's tasks will take again (filelocks.img)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from engines.api import LockNeed
from engines.criu.images import ImageReader, text

_FILE = "filelocks.img"
_POSIX, _FLOCK, _OFD, _LEASE = 1, 2, 4, 8
_F_WRLCK = 1


def read(reader: ImageReader, tables: Mapping[int, int]) -> tuple[LockNeed, ...]:
    """What is locked, each once.

    tables: the numbers of the processes' descriptor tables by process id. Raises ImageCorrupt.
    """
    if not reader.exists(_FILE):
        return ()
    return tuple(dict.fromkeys(_locks(reader, tables)))


def _locks(reader: ImageReader, tables: Mapping[int, int]) -> Iterator[LockNeed]:
    paths = {
        int(entry.id): "/" + text(entry.reg.name).lstrip("/")
        for entry in reader.read("files.img", "FILES")
        if entry.HasField("reg")
    }
    opened: dict[int, dict[int, int]] = {}
    for lock in reader.read(_FILE, "FILE_LOCKS"):
        table, kind = tables.get(int(lock.pid)), _kind(int(lock.flag))
        if table is None or kind is None:
            continue
        if table not in opened:
            entries = reader.read(f"fdinfo-{table}.img", "FDINFO")
            opened[table] = {int(entry.fd): int(entry.id) for entry in entries}
        path = paths.get(opened[table].get(int(lock.fd), -1))
        if path is not None:
            first, size = int(lock.start), int(lock.len)
            yield LockNeed(
                path=path,
                kind=kind,
                exclusive=int(lock.type) == _F_WRLCK,
                first=first if kind == "range" else 0,
                last=first + size - 1 if size and kind == "range" else None,
            )


def _kind(flag: int) -> Literal["flock", "range", "lease"] | None:
    if flag & _FLOCK:
        return "flock"
    if flag & _LEASE:
        return "lease"
    return "range" if flag & (_POSIX | _OFD) else None
