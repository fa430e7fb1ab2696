"""Reading tar archives that may have been made by an enemy.

Python's tarfile stops silently at a damaged header, trusts the sizes of extended headers and of lists of
holes, and keeps every member in memory; this module does not.
"""

from __future__ import annotations

import gzip
import io
import math
import tarfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import IO, Any, Self, cast

import zstandard

from engines.api import ImageCorrupt
from shim.images.tarwrite import MAX_DEPTH, MAX_HEADER_BYTES

_MAX_HEADERS_BYTES = 4 * MAX_HEADER_BYTES  # all that belong to one member, with the list of its holes
_MAX_GLOBAL_BYTES = 16 << 10  # they hold for every member that follows, so tarfile keeps them
MAX_NAME_BYTES = 4096
MAX_COMPONENT_BYTES = 255
_N_MAGIC_BYTES = 4
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_CHUNK_BYTES = 1 << 20
_EXTENDED = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


class BadArchive(Exception):
    """The archive is damaged or asks for something that is not allowed; the message is the cause."""


class _StrictInfo(tarfile.TarInfo):
    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except _END:
            raise
        except _HEADER_ERROR as error:
            raise BadArchive(f"a header is damaged or the archive is cut off ({error})") from error

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        # The documented place to look at a header before tarfile acts on it.
        if self.size < 0 or (self.type in _EXTENDED and self.size > MAX_HEADER_BYTES):
            raise BadArchive(f"an extended header claims {self.size} bytes")
        if self.type == tarfile.XGLTYPE:
            cast("_StrictTar", tar).charge_global(tarfile.BLOCKSIZE + self.size)
        return cast("Any", super())._proc_member(tar)


class _Metered:
    """What tarfile reads from, with a limit (bytes) on what it may take."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.left: float = math.inf
        self.seek = file.seek
        self.tell = file.tell
        self.close = file.close

    def seekable(self) -> bool:
        return True  # forward at least

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise BadArchive("a header is larger than the limit")
        return data


class _StrictTar(tarfile.TarFile):
    def __init__(self, name: str | None, mode: Any, fileobj: IO[bytes], **options: Any) -> None:
        self._meter = _Metered(fileobj)
        self._global_left = _MAX_GLOBAL_BYTES
        super().__init__(name, mode, cast("Any", self._meter), **options)

    def next(self) -> tarfile.TarInfo | None:
        self._meter.left = _MAX_HEADERS_BYTES
        info = super().next()
        self._meter.left = math.inf
        self.members = []  # tarfile would keep all of them
        return info

    def charge_global(self, n_bytes: int) -> None:
        self._global_left -= n_bytes
        if self._global_left < 0:
            raise BadArchive("its global headers are larger than the limit")


_HEADER_ERROR: type[Exception] = tarfile.HeaderError
_END: type[Exception] = cast("Any", tarfile).EOFHeaderError


class _Capped(io.RawIOBase):
    """A stream that ends in an error after so many bytes: compressed archives can be small and grow huge."""

    def __init__(self, source: IO[bytes], max_bytes: int) -> None:
        self._source = source
        self._left = max_bytes

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise BadArchive("it is larger than the limit")
        return data


# What tarfile and the decompressors are known to raise on damaged input.
_DAMAGE = (
    tarfile.TarError,
    EOFError,
    gzip.BadGzipFile,
    zlib.error,
    zstandard.ZstdError,
    ValueError,
    OverflowError,
    LookupError,
    RecursionError,
)


@contextmanager
def _damage() -> Generator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise BadArchive(f"it is damaged ({error})") from error


@contextmanager
def open_tar(file: IO[bytes], *, what: str, max_bytes: int) -> Generator[tarfile.TarFile]:
    """Open a tar archive, plain or compressed with gzip or zstd, recognised by its first bytes.

    file: seekable, at its start. max_bytes: how much may come out of it. what: the archive in words, for
    messages. A BadArchive inside the block comes out as ImageCorrupt, and so does the end of memory or stack.
    """
    try:
        magic = file.read(_N_MAGIC_BYTES)
        file.seek(0)
        source, mode = file, "r:"
        if magic.startswith(_GZIP):
            source, mode = cast("IO[bytes]", gzip.GzipFile(fileobj=file)), "r|"
        elif magic == _ZSTD:
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            source, mode = cast("IO[bytes]", reader), "r|"
        with _damage():
            tar = cast("Any", _StrictTar).open(
                fileobj=_Capped(source, max_bytes) if mode == "r|" else source,
                mode=mode,
                tarinfo=_StrictInfo,
                encoding="utf-8",
                errors="surrogateescape",
                bufsize=_CHUNK_BYTES,
            )
        with tar:
            yield tar
    except BadArchive as error:
        raise ImageCorrupt(f"could not read {what}: {error}; make it again") from error
    except (MemoryError, RecursionError) as error:
        raise ImageCorrupt(
            f"could not read {what}: it takes more memory or deeper directories than this node has; "
            "make it again with less in it"
        ) from error


def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """All members in order, without keeping them. Raises BadArchive."""
    while True:
        with _damage():
            info = tar.next()
        if info is None:
            return
        yield info


def chunks(tar: tarfile.TarFile, info: tarfile.TarInfo) -> Iterator[tuple[int, bytes]]:
    """Content of a regular member as pairs of offset and data; holes are left out. Raises BadArchive."""
    with _damage():
        content = tar.extractfile(info)
    if content is None:
        return
    pieces = cast("list[tuple[int, int]] | None", cast("Any", info).sparse)
    end = 0
    for offset, n_bytes in [(0, info.size)] if pieces is None else pieces:
        if offset < end or n_bytes < 0 or offset + n_bytes > info.size:
            raise BadArchive(f"the holes of {info.name[:200]!a} overlap")
        end = offset + n_bytes
        while offset < end:
            with _damage():
                if pieces is not None:
                    content.seek(offset)
                data = content.read(min(_CHUNK_BYTES, end - offset))
            if not data:
                raise BadArchive(f"it is cut off inside {info.name[:200]!a}")
            yield offset, data
            offset += len(data)


def is_sparse(info: tarfile.TarInfo) -> bool:
    """Whether the member is stored with holes."""
    return cast("Any", info).sparse is not None


def split_name(name: str) -> tuple[str, ...]:
    """The components of a member's name; () for the top directory.

    Raises BadArchive on anything that could lead out of it.
    """
    shown = ascii(name[:200])
    if "\0" in name:
        raise BadArchive(f"the name {shown} holds a NUL byte")
    if name.startswith("/"):
        raise BadArchive(f"the name {shown} is absolute")
    parts = tuple(part for part in name.split("/") if part not in {"", "."})
    if ".." in parts:
        raise BadArchive(f"the name {shown} leads out of its directory by '..'")
    if len(parts) > MAX_DEPTH:
        raise BadArchive(f"the name {shown} lies deeper than {MAX_DEPTH} levels")
    raw = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    if any(n_bytes > MAX_COMPONENT_BYTES for n_bytes in raw) or sum(raw) + len(raw) > MAX_NAME_BYTES:
        raise BadArchive(f"the name {shown} is too long")
    return parts


def kind_of(info: tarfile.TarInfo) -> str:
    """What a member is, in words."""
    if info.isreg():
        return "file"
    if info.isdir():
        return "directory"
    if info.issym():
        return "symbolic link"
    if info.islnk():
        return "hard link"
    if info.isfifo():
        return "fifo"
    return "device node" if info.ischr() or info.isblk() else f"member of type {info.type!r}"


def mtime_ns(info: tarfile.TarInfo) -> int:
    """Modification time in nanoseconds, exact where the archive has it exact. Raises BadArchive."""
    text = info.pax_headers.get("mtime", "")
    seconds, _, fraction = text.partition(".")
    try:
        if not text:
            text = str(int(info.mtime))
            seconds = text
        sign = -1 if seconds.startswith("-") else 1
        moment = int(seconds) * 10**9 + sign * int((fraction + "0" * 9)[:9])
        if abs(moment) < 2**62:
            return moment
        raise ValueError("out of range")
    except (ValueError, OverflowError) as error:
        raise BadArchive(f"{info.name[:200]!a} has the modification time {text[:40]!a}") from error
