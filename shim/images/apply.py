"""Putting a kept root file system difference under the root of a new container.

The archive may come from an enemy. It is read through once before anything is touched; then every name is
resolved by the kernel with the container's root as its root, so that no link, neither one of the container
image nor one of the archive, leads outside.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from engines.api import ImageCorrupt, ImageError
from shim.images.beneath import open_in_root
from shim.images.manifest import Whiteouts
from shim.images.rootfs import KEPT_XATTRS
from shim.images.seal import cause_of
from shim.images.tarball import (
    BadArchive,
    chunks,
    kind_of,
    members,
    mtime_ns,
    open_tar,
    split_name,
)

_XATTR_PREFIX = "SCHILY.xattr."
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_MAX_ENTRIES = 4_000_000
_DEFAULT_MAX_BYTES = 1 << 40

Parts = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What `apply` did, as names inside the container. n_bytes: content written."""

    written: tuple[str, ...]
    deleted: tuple[str, ...]
    n_bytes: int


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a difference holds. n_bytes: content of its files, holes not counted."""

    n_entries: int
    n_bytes: int
    deleted: tuple[Parts, ...]


def parse_deleted(data: bytes) -> tuple[Parts, ...]:
    """Read deleted.files: a JSON list of names, with or without a leading slash. Raises ImageCorrupt."""
    try:
        names = json.loads(data)
        if names is None:  # what an empty list of Go looks like
            return ()
        if not isinstance(names, list):
            raise BadArchive("it is no JSON list of names")
        found: list[Parts] = []
        for name in cast("list[object]", names):
            if not isinstance(name, str):
                raise BadArchive("it is no JSON list of names")
            parts = split_name(name.lstrip("/"))
            if not parts:
                raise BadArchive(f"the name {name!a} is the root itself")
            found.append(parts)
    except (ValueError, RecursionError, BadArchive) as error:
        raise ImageCorrupt(
            f"could not read the list of deleted files: {error}; checkpoint or import again"
        ) from error
    return tuple(found)


def check_diff(
    diff: BinaryIO, deleted: bytes, *, whiteouts: Whiteouts, max_bytes: int = _DEFAULT_MAX_BYTES
) -> Checked:
    """Read a difference through without touching anything.

    diff: the open archive. deleted: content of deleted.files, b"[]" for none. max_bytes: refused above that.
    Raises ImageCorrupt on anything that `apply` must not do.
    """
    gone = parse_deleted(deleted)
    kinds: dict[Parts, bool] = {}  # True: a directory
    parents: set[Parts] = set()
    n_bytes = n_entries = 0
    with open_tar(diff, what="the rootfs difference", max_bytes=2 * max_bytes) as tar:
        for info in members(tar):
            n_entries += 1
            parts = _check_member(info, kinds, parents, whiteouts)
            if parts and parts[-1].startswith(_WHITEOUT) and whiteouts == "oci":
                continue
            if info.isreg():
                pieces = cast("list[tuple[int, int]] | None", getattr(info, "sparse", None))
                n_bytes += info.size if pieces is None else sum(length for _, length in pieces)
            if n_bytes > max_bytes or n_entries > _MAX_ENTRIES:
                raise BadArchive("it is larger than the limit")
    return Checked(n_entries=n_entries, n_bytes=n_bytes, deleted=gone)


def _check_member(
    info: tarfile.TarInfo, kinds: dict[Parts, bool], parents: set[Parts], whiteouts: Whiteouts
) -> Parts:
    parts = split_name(info.name)
    shown = ascii(info.name[:200])
    if not parts:
        if not info.isdir():
            raise BadArchive("its top directory is not a directory")
        return parts
    if not (info.isreg() or info.isdir() or info.issym() or info.islnk() or info.isfifo()):
        raise BadArchive(f"{shown} is a {kind_of(info)}, which is never restored")
    if parts in kinds and not (kinds[parts] and info.isdir()):
        raise BadArchive(f"{shown} stands in it twice")
    for depth in range(1, len(parts)):
        if not kinds.get(parts[:depth], True):
            raise BadArchive(f"{shown} lies below something that is not a directory")
        parents.add(parts[:depth])
    if not info.isdir() and parts in parents:
        raise BadArchive(f"{shown} is not a directory but has entries")
    if info.islnk():
        target = split_name(info.linkname)
        if not target or target == parts or kinds.get(target, False):
            raise BadArchive(f"{shown} is a hard link to {info.linkname[:200]!a}, which is no file")
    if info.issym() and (
        not info.linkname or "\0" in info.linkname or len(os.fsencode(info.linkname)) > 4095
    ):
        raise BadArchive(f"{shown} is a symbolic link without a valid target")
    if whiteouts == "oci" and parts[-1].startswith(_WHITEOUT) and parts[-1] != _OPAQUE:
        name = parts[-1].removeprefix(_WHITEOUT)
        if name in {"", ".", ".."}:
            raise BadArchive(f"{shown} marks nothing as deleted")
    mtime_ns(info)
    if not (0 <= info.uid < 2**32 - 1 and 0 <= info.gid < 2**32 - 1):
        raise BadArchive(f"{shown} has the owner {info.uid}:{info.gid}")
    kinds[parts] = info.isdir()
    return parts


def apply(
    rootfs_path: Path, diff: BinaryIO, deleted: bytes, *, whiteouts: Whiteouts = "deleted.files"
) -> Applied:
    """Apply a difference below a mounted root.

    diff: the open archive, seekable. deleted: content of deleted.files, b"[]" for none. whiteouts: whether
    `.wh.` names in the archive mean deletion. Modes, owners, times and extended attributes become what they
    were, whatever the umask. Raises ImageCorrupt before anything is touched if the archive is not acceptable;
    ImageError if writing fails or the container image is in the way: then the root is half changed and its
    upper directory must be undone.
    """
    checked = check_diff(diff, deleted, whiteouts=whiteouts)
    root_fd = -1
    try:
        root_fd = os.open(rootfs_path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        space = os.fstatvfs(root_fd)
        if checked.n_bytes > space.f_bavail * space.f_frsize:
            raise ImageError(
                f"could not apply the rootfs difference to '{rootfs_path}': it holds {checked.n_bytes} bytes "
                f"and {space.f_bavail * space.f_frsize} are free; free some space",
                after="stopped",
            )
        job = _Job(root_fd, oci=whiteouts == "oci")
        try:
            diff.seek(0)
            with open_tar(diff, what="the rootfs difference", max_bytes=2 * _DEFAULT_MAX_BYTES) as tar:
                for info in members(tar):
                    job.add(tar, info)
            for parts in checked.deleted:
                job.delete(parts)
            job.finish()
        finally:
            job.close()
    except OSError as error:
        raise ImageError(
            f"could not apply the rootfs difference to '{rootfs_path}': {cause_of(error)}", after="stopped"
        ) from error
    finally:
        if root_fd >= 0:
            os.close(root_fd)
    return Applied(written=tuple(job.written), deleted=tuple(job.deleted), n_bytes=job.n_bytes)


class _Job:
    """The second pass: everything is done with descriptors of parent directories."""

    def __init__(self, root_fd: int, *, oci: bool) -> None:
        self.written: list[str] = []
        self.deleted: list[str] = []
        self.n_bytes = 0
        self._root_fd = root_fd
        self._oci = oci
        self._done: set[Parts] = set()
        self._directories: list[tuple[Parts, tarfile.TarInfo]] = []
        self._parent: tuple[Parts, int] | None = None  # the last one, as neighbours share it

    def close(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None

    def add(self, tar: tarfile.TarFile, info: tarfile.TarInfo) -> None:
        parts = split_name(info.name)
        if not parts:
            return
        if self._oci and parts[-1] == _OPAQUE:
            self._clear(parts[:-1])
            return
        if self._oci and parts[-1].startswith(_WHITEOUT):
            self.delete((*parts[:-1], parts[-1].removeprefix(_WHITEOUT)))
            return
        parent_fd, name = self._open_parent(parts[:-1]), parts[-1]
        present = _lstat(parent_fd, name)
        if info.isdir():
            if present is None or not stat.S_ISDIR(present.st_mode):
                _remove(parent_fd, name, present)
                os.mkdir(name, 0o700, dir_fd=parent_fd)
            self._directories.append((parts, info))  # children still change its times
        else:
            if info.islnk() and split_name(info.linkname) == parts:
                raise BadArchive(f"{info.name[:200]!a} is a hard link to itself")
            _remove(parent_fd, name, present)
            self._make(tar, info, parent_fd, name)
        self._done.add(parts)
        self.written.append("/" + "/".join(parts))

    def _make(self, tar: tarfile.TarFile, info: tarfile.TarInfo, parent_fd: int, name: str) -> None:
        if info.issym():
            os.symlink(info.linkname, name, dir_fd=parent_fd)
            os.chown(name, info.uid, info.gid, dir_fd=parent_fd, follow_symlinks=False)
            _set_times(info, name, parent_fd)
        elif info.islnk():
            self._link(info, parent_fd, name)
        elif info.isfifo():
            os.mkfifo(name, 0o600, dir_fd=parent_fd)
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
            self._dress(info, fd)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, 0o600, dir_fd=parent_fd)
            try:
                for offset, data in chunks(tar, info):
                    _write_at(fd, data, offset)
                    self.n_bytes += len(data)
                if os.fstat(fd).st_size != info.size:
                    os.ftruncate(fd, info.size)  # ends in a hole
            except BaseException:
                os.close(fd)
                raise
            self._dress(info, fd)

    def _link(self, info: tarfile.TarInfo, parent_fd: int, name: str) -> None:
        target = split_name(info.linkname)
        target_fd = self._resolve(target[:-1])
        try:
            present = _lstat(target_fd, target[-1])
            if present is None or not (stat.S_ISREG(present.st_mode) or stat.S_ISFIFO(present.st_mode)):
                raise BadArchive(
                    f"{info.name[:200]!a} is a hard link to {info.linkname[:200]!a}, which is no file"
                )
            os.link(target[-1], name, src_dir_fd=target_fd, dst_dir_fd=parent_fd, follow_symlinks=False)
        finally:
            os.close(target_fd)

    @staticmethod
    def _dress(info: tarfile.TarInfo, fd: int) -> None:
        """Owner first: it clears set-id bits and capabilities. Times last. Closes the descriptor."""
        try:
            os.fchown(fd, info.uid, info.gid)
            for key, value in info.pax_headers.items():
                name = key.removeprefix(_XATTR_PREFIX)
                if key.startswith(_XATTR_PREFIX) and name.startswith(KEPT_XATTRS):
                    os.setxattr(fd, name, value.encode("utf-8", "surrogateescape"))
            os.fchmod(fd, info.mode & 0o7777)
            moment = mtime_ns(info)
            os.utime(fd, ns=(moment, moment))
        finally:
            os.close(fd)

    def delete(self, parts: Parts) -> None:
        """Delete a name of the container image; one that is not there counts as deleted."""
        try:
            parent_fd = self._resolve(parts[:-1])
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR}:
                return
            raise
        try:
            present = _lstat(parent_fd, parts[-1])
            if present is not None:
                _remove(parent_fd, parts[-1], present)
                self.deleted.append("/" + "/".join(parts))
        finally:
            os.close(parent_fd)

    def _clear(self, parts: Parts) -> None:
        """Delete what the container image has in a directory, but not what this archive put there."""
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._open_parent(parts))
        try:
            for name in os.listdir(fd):  # noqa: PTH208  # of a descriptor
                if (*parts, name) not in self._done:
                    _remove(fd, name, _lstat(fd, name))
                    self.deleted.append("/" + "/".join((*parts, name)))
        finally:
            os.close(fd)

    def finish(self) -> None:
        """Give the directories their attributes, the deepest first."""
        for parts, info in sorted(self._directories, key=lambda pair: -len(pair[0])):
            parent_fd = self._resolve(parts[:-1])
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(parts[-1], flags, dir_fd=parent_fd)
            finally:
                os.close(parent_fd)
            self._dress(info, fd)

    def _resolve(self, parts: Parts) -> int:
        return open_in_root(self._root_fd, "/".join(parts) or ".", os.O_PATH | os.O_DIRECTORY)

    def _open_parent(self, parts: Parts) -> int:
        if self._parent is not None and self._parent[0] == parts:
            return self._parent[1]
        fd = self._resolve_or_make(parts)
        self.close()
        self._parent = (parts, fd)
        return fd

    def _resolve_or_make(self, parts: Parts) -> int:
        try:
            return self._resolve(parts)
        except FileNotFoundError:
            if not parts:
                raise
        above = self._resolve_or_make(parts[:-1])
        try:
            os.mkdir(parts[-1], 0o755, dir_fd=above)  # fails at a dangling link, which is what we want
            os.chmod(parts[-1], 0o755, dir_fd=above)  # noqa: S103  # as other tools make missing parents
        finally:
            os.close(above)
        return self._resolve(parts)


def _lstat(dir_fd: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _remove(dir_fd: int, name: str, present: os.stat_result | None) -> None:
    """Remove an entry with everything below it, following no link and entering no other mount."""
    if present is None:
        return
    if not stat.S_ISDIR(present.st_mode):
        os.unlink(name, dir_fd=dir_fd)
        return
    fd = open_in_root(dir_fd, name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for child in os.listdir(fd):  # noqa: PTH208  # of a descriptor
            _remove(fd, child, _lstat(fd, child))
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=dir_fd)


def _set_times(info: tarfile.TarInfo, name: str, dir_fd: int) -> None:
    moment = mtime_ns(info)
    os.utime(name, ns=(moment, moment), dir_fd=dir_fd, follow_symlinks=False)


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        n_written = os.pwrite(fd, view, offset)
        view, offset = view[n_written:], offset + n_written
