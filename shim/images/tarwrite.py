"""Writing tar archives fast: a container stands still meanwhile, and tarfile spends its time on headers.

The format is PAX (POSIX.1-2001) with nanoseconds, extended attributes as GNU tar and Go write them
(`SCHILY.xattr.`), and files with holes in GNU tar's format 1.0.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
from collections.abc import Mapping
from typing import AnyStr

XATTR_PREFIX = b"SCHILY.xattr."
REGULAR, HARD_LINK, SYMBOLIC_LINK, DIRECTORY, FIFO = b"0", b"1", b"2", b"5", b"6"

_BLOCK_BYTES = 512
_HEADER = struct.Struct("100s8s8s8s12s12s8s1s100s8s32s32s8s8s155s12x")
_MAX_NAME_BYTES = 100
_MAX_ID = 0o7777777
_MAX_SIZE = 0o77777777777
_BUFFER_BYTES = 1 << 20
_WORTHWHILE_HOLE_BYTES = 64 << 10  # smaller holes are written out
_PAGE_BYTES = 4096

# What the reader accepts, so that no checkpoint makes an archive that no restore takes.
MAX_DEPTH = 256  # names in a path; Python's own removal of trees goes little deeper
MAX_HEADER_BYTES = 1 << 20  # of one extended header
MAX_PIECES = 50_000  # of a file with holes
MAX_KEPT_BYTES = 512 << 20  # memory for names, and for what is set last on directories

Pieces = list[tuple[int, int]]


class TarWriter:
    """Appends members to an open file. Raises OSError; EIO if a source becomes shorter while it is read."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = bytearray()

    def add(
        self,
        name: bytes,
        status: os.stat_result,
        kind: bytes,
        *,
        link: bytes = b"",
        xattrs: dict[bytes, bytes] | None = None,
    ) -> None:
        """Append a member without content. link: where a link leads."""
        self._head(name, status, kind, 0, link, _attributes(xattrs))

    def add_file(
        self, name: bytes, status: os.stat_result, fd: int, *, xattrs: dict[bytes, bytes] | None = None
    ) -> None:
        """Append a regular file with the content that `fd` has."""
        records = _attributes(xattrs)
        pieces = data_pieces(fd, status)
        if pieces is None:
            self._head(name, status, REGULAR, status.st_size, b"", records)
            self._copy(fd, 0, status.st_size)
            self._pad(status.st_size)
            return
        numbers = [len(pieces), *(number for piece in pieces for number in piece)]
        table = b"".join(b"%d\n" % number for number in numbers)
        table += bytes(-len(table) % _BLOCK_BYTES)
        n_bytes = len(table) + sum(length for _, length in pieces)
        records += [
            (b"GNU.sparse.major", b"1"),
            (b"GNU.sparse.minor", b"0"),
            (b"GNU.sparse.name", name),
            (b"GNU.sparse.realsize", b"%d" % status.st_size),
        ]
        directory, slash, base = name.rpartition(b"/")
        self._head(directory + slash + b"GNUSparseFile.0/" + base, status, REGULAR, n_bytes, b"", records)
        self._write(table)
        for offset, length in pieces:
            self._copy(fd, offset, length)
        self._pad(n_bytes)

    def finish(self) -> None:
        """Write the end of the archive; the file stays open."""
        self._write(bytes(2 * _BLOCK_BYTES))
        self._flush()

    def _head(
        self,
        name: bytes,
        status: os.stat_result,
        kind: bytes,
        n_bytes: int,
        link: bytes,
        records: list[tuple[bytes, bytes]],
    ) -> None:
        if kind == DIRECTORY:
            name += b"/"
        seconds, nanoseconds = divmod(status.st_mtime_ns, 10**9)
        if nanoseconds or seconds < 0:
            sign, moment = (
                (b"-", -status.st_mtime_ns) if status.st_mtime_ns < 0 else (b"", status.st_mtime_ns)
            )
            records.append((b"mtime", b"%s%d.%09d" % (sign, moment // 10**9, moment % 10**9)))
            seconds = max(seconds, 0)
        for key, text in ((b"path", name), (b"linkpath", link)):
            if len(text) > _MAX_NAME_BYTES or not text.isascii():
                records.append((key, text))
        for key, number, limit in (
            (b"uid", status.st_uid, _MAX_ID),
            (b"gid", status.st_gid, _MAX_ID),
            (b"size", n_bytes, _MAX_SIZE),
        ):
            if number > limit:
                records.append((key, b"%d" % number))
        if records:
            self._extended(name, records)
        mode, uid, gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
        self._block(name, mode, uid, gid, n_bytes, seconds, kind, link)

    def _extended(self, name: bytes, records: list[tuple[bytes, bytes]]) -> None:
        if not all(_is_utf8(value) for key, value in records if not key.startswith(XATTR_PREFIX)):
            records.insert(0, (b"hdrcharset", b"BINARY"))
        data = b"".join(_record(key, value) for key, value in records)
        label = b"PaxHeaders/" + name.rstrip(b"/").rpartition(b"/")[2]
        self._block(label, 0o644, 0, 0, len(data), 0, b"x", b"")
        self._write(data)
        self._pad(len(data))

    def _block(
        self, name: bytes, mode: int, uid: int, gid: int, n_bytes: int, mtime: int, kind: bytes, link: bytes
    ) -> None:
        fields = [
            name[:_MAX_NAME_BYTES],
            b"%07o\0" % mode,
            b"%07o\0" % (uid if uid <= _MAX_ID else 0),
            b"%07o\0" % (gid if gid <= _MAX_ID else 0),
            b"%011o\0" % (n_bytes if n_bytes <= _MAX_SIZE else 0),
            b"%011o\0" % min(mtime, _MAX_SIZE),
            b" " * 8,
            kind,
            link[:_MAX_NAME_BYTES],
            b"ustar\x0000",
            b"",
            b"",
            b"0000000\0",
            b"0000000\0",
            b"",
        ]
        fields[6] = b"%06o\0 " % sum(_HEADER.pack(*fields))
        self._write(_HEADER.pack(*fields))

    def _pad(self, n_bytes: int) -> None:
        self._write(bytes(-n_bytes % _BLOCK_BYTES))

    def _copy(self, fd: int, offset: int, n_bytes: int) -> None:
        while n_bytes:
            data = os.pread(fd, min(n_bytes, _BUFFER_BYTES), offset)
            if not data:
                raise OSError(errno.EIO, "a file became shorter while it was read")
            self._write(data)
            offset, n_bytes = offset + len(data), n_bytes - len(data)

    def _write(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > _BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        with memoryview(self._buffer) as view:
            n_written = 0
            while n_written < len(view):
                n_written += os.write(self._fd, view[n_written:])
        self._buffer.clear()


def _attributes(xattrs: dict[bytes, bytes] | None) -> list[tuple[bytes, bytes]]:
    return [(XATTR_PREFIX + key, value) for key, value in sorted((xattrs or {}).items())]


def _record(key: bytes, value: bytes) -> bytes:
    """One line of an extended header, which begins with its own length."""
    n_bytes = len(key) + len(value) + 3
    total = n_bytes + len(str(n_bytes))
    total = n_bytes + len(str(total))
    return b"%d %s=%s\n" % (total, key, value)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def data_pieces(fd: int, status: os.stat_result) -> Pieces | None:
    """Offsets and lengths (bytes) of a file's data, None if it has no hole worth the trouble."""
    size_bytes = status.st_size
    if size_bytes - status.st_blocks * _BLOCK_BYTES < _WORTHWHILE_HOLE_BYTES:
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
                return None
            raise
        offset = os.lseek(fd, start, os.SEEK_HOLE)
        pieces.append((start, offset - start))
    pieces = _fewer(pieces)
    if not pieces or sum(pieces[-1]) < size_bytes:
        pieces.append((size_bytes, 0))  # GNU tar takes the end of the last piece for the end of the file
    return pieces


def _fewer(pieces: Pieces) -> Pieces:
    """Fill the smallest holes until a reader's memory holds the list."""
    hole_bytes = _PAGE_BYTES
    while len(pieces) >= MAX_PIECES:
        merged = pieces[:1]
        for offset, length in pieces[1:]:
            start, before = merged[-1]
            if offset - (start + before) <= hole_bytes:
                merged[-1] = (start, offset + length - start)
            else:
                merged.append((offset, length))
        pieces, hole_bytes = merged, 2 * hole_bytes
    return pieces


def kept_bytes(name: str, xattrs: Mapping[AnyStr, bytes] | None) -> int:
    """Memory that a reader needs for a member until the end (measured). xattrs: None for no directory."""
    if xattrs is None:
        return sys.getsizeof(name) + 80
    return sys.getsizeof(name) + 520 + sum(200 + 4 * len(key) + len(value) for key, value in xattrs.items())
