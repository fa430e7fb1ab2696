"""Files with holes in a tar archive (the PAX format 1.0 of GNU tar, which Go's and Python's readers know)."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from typing import IO, cast

_BLOCK_BYTES = 512
_WORTHWHILE_BYTES = 64 << 10  # smaller holes are written out

Pieces = list[tuple[int, int]]


def data_pieces(fd: int, status: os.stat_result) -> Pieces | None:
    """Offsets and lengths (bytes) of a file's data, None if it has no hole worth the trouble."""
    size_bytes = status.st_size
    if size_bytes - status.st_blocks * _BLOCK_BYTES < _WORTHWHILE_BYTES:
        return None
    pieces: Pieces = []
    offset = 0
    while offset < size_bytes:
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                break
            if error.errno == errno.EINVAL:  # the file system does not tell
                os.lseek(fd, 0, os.SEEK_SET)
                return None
            raise
        offset = os.lseek(fd, start, os.SEEK_HOLE)
        pieces.append((start, offset - start))
    return pieces


class _Pieces(io.RawIOBase):
    """The map and the data of a sparse file as one stream."""

    def __init__(self, head: bytes, fd: int, pieces: Pieces) -> None:
        self._head = head
        self._fd = fd
        self._left = list(reversed(pieces))

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        # tarfile takes a short read for the end.
        head, self._head = self._head[:size], self._head[size:]
        out = [head]
        size -= len(head)
        while size and self._left:
            offset, n_bytes = self._left.pop()
            data = os.pread(self._fd, min(size, n_bytes), offset)
            if not data:
                break
            out.append(data)
            size -= len(data)
            if len(data) < n_bytes:
                self._left.append((offset + len(data), n_bytes - len(data)))
        return b"".join(out)


def add_sparse(tar: tarfile.TarFile, info: tarfile.TarInfo, fd: int, pieces: Pieces, size_bytes: int) -> None:
    """Add a file to the archive without its holes. size_bytes: with the holes."""
    numbers = [str(len(pieces)), *(str(number) for piece in pieces for number in piece)]
    head = ("\n".join(numbers) + "\n").encode()
    head += b"\0" * (-len(head) % _BLOCK_BYTES)
    info.pax_headers = {
        **info.pax_headers,
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": info.name,
        "GNU.sparse.realsize": str(size_bytes),
    }
    directory, _, name = info.name.rpartition("/")
    info.name = f"{directory}/GNUSparseFile.0/{name}" if directory else f"GNUSparseFile.0/{name}"
    info.size = len(head) + sum(n_bytes for _, n_bytes in pieces)
    tar.addfile(info, cast("IO[bytes]", _Pieces(head, fd, pieces)))
