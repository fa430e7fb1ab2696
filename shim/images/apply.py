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
from typing import BinaryIO, NamedTuple, cast

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
from shim.images.tarwrite import MAX_KEPT_BYTES, kept_bytes

_XATTR_PREFIX = "SCHILY.xattr."
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_MAX_DELETED = 4_000_000
_NO_SIZE = 1 << 63  # of a file: the kernel's numbers end before
_DEFAULT_MAX_BYTES = 1 << 40

Parts = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a difference holds. n_bytes: content of its files, holes not counted. deleted: relative names."""

    n_bytes: int
    deleted: tuple[str, ...]


class _Attributes(NamedTuple):
    uid: int
    gid: int
    mode: int
    mtime_ns: int
    xattrs: dict[str, bytes]


class _Directory:
    """The entries of a directory in an archive, None for what is no directory. attributes: None if only its
    entries are in the archive.
    """

    __slots__ = ("attributes", "entries")

    def __init__(self) -> None:
        self.entries: dict[str, _Directory | None] = {}
        self.attributes: _Attributes | None = None


class _Tree:
    """The names of an archive as a tree, so that deep names share what they have in common."""

    def __init__(self) -> None:
        self.top = _Directory()
        self._left_bytes = MAX_KEPT_BYTES

    def put(self, parts: Parts, directory: _Attributes | None) -> None:
        """Add a member. directory: its attributes, None for anything else. Raises BadArchive."""
        self._charge(parts[-1] if parts else "", directory and directory.xattrs)
        if not parts:
            return
        here, shown = self.top, ascii("/".join(parts)[:200])
        for part in parts[:-1]:
            if part not in here.entries:
                self._charge(part, {})
                here.entries[part] = _Directory()
            below = here.entries[part]
            if below is None:
                raise BadArchive(f"{shown} lies below something that is not a directory")
            here = below
        present = here.entries.get(parts[-1])
        if parts[-1] in here.entries and (present is None or directory is None):
            raise BadArchive(f"{shown} stands in it twice, or is not a directory but has entries")
        if directory is None:
            here.entries[parts[-1]] = None
            return
        present = present or _Directory()
        present.attributes = directory
        here.entries[parts[-1]] = present

    def find(self, parts: Parts) -> _Directory | None:
        """The directory of this name, None if none is in the archive."""
        here: _Directory | None = self.top
        for part in parts:
            here = here and here.entries.get(part)
        return here

    def _charge(self, name: str, xattrs: dict[str, bytes] | None) -> None:
        self._left_bytes -= kept_bytes(name, xattrs)
        if self._left_bytes < 0:
            raise BadArchive("it is larger than the limit")


def parse_deleted(data: bytes) -> tuple[str, ...]:
    """Read deleted.files: a JSON list of names, with or without a leading slash. Raises ImageCorrupt."""
    try:
        if data.count(b",") > _MAX_DELETED:
            raise BadArchive("it is larger than the limit")
        names = json.loads(data)
        if names is None:  # what an empty list of Go looks like
            return ()
        if not isinstance(names, list):
            raise BadArchive("it is no JSON list of names")
        found: list[str] = []
        for name in cast("list[object]", names):
            if not isinstance(name, str):
                raise BadArchive("it is no JSON list of names")
            found.append(name.lstrip("/"))
            if not split_name(found[-1]):
                raise BadArchive(f"the name {name!a} is the root itself")
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
    tree = _Tree()
    n_bytes = 0
    with open_tar(diff, what="the rootfs difference", max_bytes=2 * max_bytes) as tar:
        for info in members(tar):
            parts = _check_member(info, tree, whiteouts)
            if parts and parts[-1].startswith(_WHITEOUT) and whiteouts == "oci":
                continue
            if info.size >= _NO_SIZE:
                raise BadArchive(f"{info.name[:200]!a} claims {info.size} bytes")
            if info.isreg():
                pieces = cast("list[tuple[int, int]] | None", getattr(info, "sparse", None))
                n_bytes += info.size if pieces is None else sum(length for _, length in pieces)
            if n_bytes > max_bytes:
                raise BadArchive("it is larger than the limit")
    return Checked(n_bytes=n_bytes, deleted=gone)


def _check_member(info: tarfile.TarInfo, tree: _Tree, whiteouts: Whiteouts) -> Parts:
    parts = split_name(info.name)
    attributes = _attributes(info)
    shown = ascii(info.name[:200])
    if not parts:
        if not info.isdir():
            raise BadArchive("its top directory is not a directory")
        tree.put(parts, attributes)
        return parts
    if not (info.isreg() or info.isdir() or info.issym() or info.islnk() or info.isfifo()):
        raise BadArchive(f"{shown} is a {kind_of(info)}, which is never restored")
    tree.put(parts, attributes if info.isdir() else None)
    if info.islnk():
        target = split_name(info.linkname)
        if not target or target == parts or tree.find(target):
            raise BadArchive(f"{shown} is a hard link to {info.linkname[:200]!a}, which is no file")
    if info.issym() and (
        not info.linkname or "\0" in info.linkname or len(os.fsencode(info.linkname)) > 4095
    ):
        raise BadArchive(f"{shown} is a symbolic link without a valid target")
    if whiteouts == "oci" and parts[-1].startswith(_WHITEOUT) and parts[-1] != _OPAQUE:
        name = parts[-1].removeprefix(_WHITEOUT)
        if name in {"", ".", ".."}:
            raise BadArchive(f"{shown} marks nothing as deleted")
    return parts


def _attributes(info: tarfile.TarInfo) -> _Attributes:
    """What a member's file is to have besides content. Raises BadArchive."""
    if not (0 <= info.uid < 2**32 - 1 and 0 <= info.gid < 2**32 - 1):
        raise BadArchive(f"{info.name[:200]!a} has the owner {info.uid}:{info.gid}")
    kept = {
        name: value.encode("utf-8", "surrogateescape")
        for key, value in info.pax_headers.items()
        if key.startswith(_XATTR_PREFIX) and (name := key.removeprefix(_XATTR_PREFIX)).startswith(KEPT_XATTRS)
    }
    if any("\0" in name for name in kept):
        raise BadArchive(f"{info.name[:200]!a} has an extended attribute without a valid name")
    return _Attributes(info.uid, info.gid, info.mode & 0o7777, mtime_ns(info), kept)


def apply(
    rootfs_path: Path, diff: BinaryIO, deleted: bytes, *, whiteouts: Whiteouts = "deleted.files"
) -> None:
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
            for name in checked.deleted:
                job.delete(split_name(name))
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


class _Job:
    """The second pass: everything is done with descriptors of parent directories."""

    def __init__(self, root_fd: int, *, oci: bool) -> None:
        self._root_fd = root_fd
        self._oci = oci
        self._tree = _Tree()
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
        else:
            if info.islnk() and split_name(info.linkname) == parts:
                raise BadArchive(f"{info.name[:200]!a} is a hard link to itself")
            _remove(parent_fd, name, present)
            self._make(tar, info, parent_fd, name)
        self._tree.put(parts, _attributes(info) if info.isdir() else None)

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
            _dress(_attributes(info), fd)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, 0o600, dir_fd=parent_fd)
            try:
                for offset, data in chunks(tar, info):
                    _write_at(fd, data, offset)
                if os.fstat(fd).st_size != info.size:
                    os.ftruncate(fd, info.size)  # ends in a hole
            except BaseException:
                os.close(fd)
                raise
            _dress(_attributes(info), fd)

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
        finally:
            os.close(parent_fd)

    def _clear(self, parts: Parts) -> None:
        """Delete what the container image has in a directory, but not what this archive put there."""
        ours = self._tree.find(parts)
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._open_parent(parts))
        try:
            for name in os.listdir(fd):  # noqa: PTH208  # of a descriptor
                if ours is None or name not in ours.entries:
                    _remove(fd, name, _lstat(fd, name))
        finally:
            os.close(fd)

    def finish(self) -> None:
        """Give the directories their attributes, as what is put into them changes their times."""
        self._finish(self._tree.top, ())

    def _finish(self, directory: _Directory, parts: Parts) -> None:
        for name, below in directory.entries.items():
            if below is not None:
                self._finish(below, (*parts, name))
        if directory.attributes is None:
            return
        parent_fd = self._resolve(parts[:-1])
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(parts[-1], flags, dir_fd=parent_fd)
        finally:
            os.close(parent_fd)
        _dress(directory.attributes, fd)

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


def _dress(attributes: _Attributes, fd: int) -> None:
    """Owner first: it clears set-id bits and capabilities. Times last. Closes the descriptor."""
    try:
        os.fchown(fd, attributes.uid, attributes.gid)
        for name, value in attributes.xattrs.items():
            os.setxattr(fd, name, value)
        os.fchmod(fd, attributes.mode)
        os.utime(fd, ns=(attributes.mtime_ns, attributes.mtime_ns))
    finally:
        os.close(fd)


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
