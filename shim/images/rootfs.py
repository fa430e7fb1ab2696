"""What a container changed in its root file system, taken from the upper directory of its overlay.

Written as Podman and CRI-O write it: `rootfs-diff.tar` holds what is new or changed, `deleted.files` (a JSON
list of names) what is gone. An opaque directory is told by listing the entries that it hides. It runs while
the container is frozen, so it streams and looks at nothing but the upper directory.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from engines.api import ImageError, NotSupported
from engines.mountinfo import Mount, unescaped
from shim.images.layout import DELETED_FILES, ROOTFS_DIFF
from shim.images.manifest import Rootfs
from shim.images.mounts import mount_at, mounts_below
from shim.images.seal import cause_of
from shim.images.tarwrite import (
    DIRECTORY,
    FIFO,
    HARD_LINK,
    MAX_DEPTH,
    MAX_HEADER_BYTES,
    MAX_KEPT_BYTES,
    SYMBOLIC_LINK,
    TarWriter,
    kept_bytes,
)

_ESCAPED_COLON = "\\:"

# Labels and hashes belong to the node and the pod; the overlay's own marks are not content.
KEPT_XATTRS = ("user.", "security.capability", "system.posix_acl_")


@dataclass(frozen=True, kw_only=True)
class RootfsView:
    """Where a container's root file system lies on this node.

    path: the mounted root. upper_path: where its changes are, None if nothing can be changed. lower_paths:
    from top to bottom. mark: prefix of the overlay's own extended attributes.
    """

    path: Path
    kind: str  # "overlay" or "directory"
    upper_path: Path | None = None
    lower_paths: tuple[Path, ...] = ()
    mark: str = "trusted.overlay."
    mount: Mount | None = None


@dataclass(frozen=True, kw_only=True)
class Diff:
    """What `write_diff` wrote. n_bytes: size of the archive; deleted: names that are gone."""

    rootfs: Rootfs
    n_entries: int
    n_bytes: int
    deleted: tuple[str, ...]


@dataclass
class _Writer:
    view: RootfsView
    mount_points: Collection[str]
    linked: dict[tuple[int, int], bytes] = field(default_factory=dict[tuple[int, int], bytes])
    deleted: list[str] = field(default_factory=list[str])
    skipped: list[str] = field(default_factory=list[str])
    n_entries: int = 0
    n_kept_bytes: int = 0


def find_rootfs(bundle_path: Path, root_path: str = "rootfs") -> RootfsView:
    """Look up what is mounted at a bundle's root file system.

    root_path: `root.path` of the specification, relative to the bundle or absolute. Raises ImageError.
    """
    path = Path(os.path.realpath(bundle_path / root_path))
    if not path.is_dir():
        raise ImageError(f"could not find rootfs '{path}': it is no directory; check the bundle")
    mount = mount_at(path)
    if mount is None or mount.kind != "overlay":
        return RootfsView(path=path, kind="directory", mount=mount)
    options = dict(_options(mount.super_options))
    upper = options.get("upperdir", [""])[0]
    return RootfsView(
        path=path,
        kind="overlay",
        upper_path=Path(upper) if upper else None,
        lower_paths=_lower_paths(options, upper),
        mark="user.overlay." if "userxattr" in options else "trusted.overlay.",
        mount=mount,
    )


def _options(words: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for option in words:
        key, _, value = option.partition("=")
        found.setdefault(key, []).append(unescaped(value))
    yield from found.items()


def _lower_paths(options: dict[str, list[str]], upper: str) -> tuple[Path, ...]:
    single = [part for text in options.get("lowerdir", []) for part in _split_lowers(text)]
    names = single + options.get("lowerdir+", [])
    return tuple(_absolute(Path(name), Path(upper)) for name in names)


def _split_lowers(text: str) -> list[str]:
    parts = text.replace(_ESCAPED_COLON, "\0").split(":")
    return [part.replace("\0", ":").replace("\\\\", "\\") for part in parts if part]


def _absolute(lower: Path, upper: Path) -> Path:
    """Callers mount with relative layers when there are many; they lie near the upper directory."""
    if lower.is_absolute():
        return lower
    return next((base / lower for base in upper.parents if (base / lower).is_dir()), lower)


def write_diff(
    view: RootfsView, out_path: Path, *, mount_points: Collection[str] = (), full_copy: bool = False
) -> Diff:
    """Write `rootfs-diff.tar` and `deleted.files` into the directory `out_path`.

    mount_points: destinations of the specification's mounts; empty files that the runtime made there are
    left out. full_copy: keep a plain directory whole. Sockets (CRIU makes them again) and device nodes are
    left out and named in the result. Raises NotSupported for a plain directory without `full_copy`, for
    renamed directories that only point into a lower layer and for what no restore would take (too deep, too
    much), ImageError if writing fails; then neither file is left.
    """
    if view.kind == "directory" and not full_copy:
        raise NotSupported(
            f"could not keep rootfs '{view.path}': it is a plain directory, so what the container changed "
            "cannot be told from what it was given; use an overlay or ask for a full copy",
            after="running",
        )
    top = view.path if view.kind == "directory" else view.upper_path
    writer = _Writer(view=view, mount_points={point.strip("/") for point in mount_points})
    try:
        fd = _create(out_path / ROOTFS_DIFF)
        try:
            tar = TarWriter(fd)
            if top is not None:
                _Walk(writer, tar, str(top)).run()
            tar.finish()
            n_bytes = os.fstat(fd).st_size
        finally:
            os.close(fd)
        with os.fdopen(_create(out_path / DELETED_FILES), "wb") as file:
            file.write(json.dumps(sorted(writer.deleted)).encode())
    except BaseException as error:
        for name in (ROOTFS_DIFF, DELETED_FILES):
            (out_path / name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            cause = cause_of(error)
            raise ImageError(f"could not keep rootfs '{view.path}': {cause}", after="running") from error
        raise
    return Diff(
        rootfs=Rootfs(
            kind="overlay" if view.kind == "overlay" else "directory",
            lower_paths=tuple(map(_printable, view.lower_paths)),
            skipped=tuple(sorted(writer.skipped)),
        ),
        n_entries=writer.n_entries,
        n_bytes=n_bytes,
        deleted=tuple(sorted(writer.deleted)),
    )


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _printable(path: Path) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


class _Walk:
    """One pass over the upper directory (or the whole root), parents before children."""

    def __init__(self, writer: _Writer, tar: TarWriter, top: str) -> None:
        self._writer = writer
        self._tar = tar
        self._top = top
        self._overlay = writer.view.kind == "overlay"
        self._mark = writer.view.mark
        self._mounted = {mount.point for mount in mounts_below(Path(top))}

    def run(self) -> None:
        pending: list[tuple[str, bool]] = [("", False)]
        while pending:
            below, opaque = pending.pop()
            directory = f"{self._top}/{below}" if below else self._top
            opaque = opaque or (self._overlay and is_opaque(directory, self._mark))
            with os.scandir(directory) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
            if opaque and below:
                own = {entry.name for entry in entries}
                hidden = merged_names(self._writer.view, below) - own
                self._writer.deleted += [f"/{below}/{name}" for name in hidden]
            directories: list[tuple[str, bool]] = []
            for entry in entries:
                name = f"{below}/{entry.name}" if below else entry.name
                if self._add(name, entry.path, entry.stat(follow_symlinks=False)):
                    directories.append((name, opaque))
            pending += reversed(directories)

    def _add(self, name: str, path: str, status: os.stat_result) -> bool:
        """Write one entry; True for a directory to go into."""
        writer, mode = self._writer, status.st_mode
        if self._overlay and is_whiteout(path, status, self._mark):
            writer.deleted.append("/" + name)
            return False
        if stat.S_ISSOCK(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            writer.skipped.append(os.fsencode("/" + name).decode("utf-8", "backslashreplace"))
            return False
        if name in writer.mount_points and stat.S_ISREG(mode) and status.st_size == 0:
            return False
        attributes = _xattrs(path)
        kept = {os.fsencode(key): data for key, data in attributes.items() if key.startswith(KEPT_XATTRS)}
        self._check(name, kept, directory=stat.S_ISDIR(mode))
        raw = os.fsencode(name)
        if stat.S_ISDIR(mode):
            if self._mark + "redirect" in attributes:
                raise NotSupported(
                    f"could not keep rootfs '{writer.view.path}': directory {'/' + name!a} was renamed and "
                    "its content is still in a lower layer; mount the overlay with redirect_dir=off",
                    after="running",
                )
            self._tar.add(raw, status, DIRECTORY, xattrs=kept)
            return path not in self._mounted
        if stat.S_ISLNK(mode):
            target = os.readlink(os.fsencode(path))  # noqa: PTH115  # Path would tidy the target
            self._tar.add(raw, status, SYMBOLIC_LINK, link=target, xattrs=kept)
        elif stat.S_ISFIFO(mode):
            self._tar.add(raw, status, FIFO, xattrs=kept)
        elif status.st_nlink > 1 and (first := writer.linked.get((status.st_dev, status.st_ino))) is not None:
            self._tar.add(raw, status, HARD_LINK, link=first)
        else:
            if status.st_nlink > 1:
                writer.linked[status.st_dev, status.st_ino] = raw
            # A file whose data is still in a lower layer is read through the mounted root.
            bare = self._overlay and self._mark + "metacopy" in attributes
            self._add_file(raw, f"{writer.view.path}/{name}" if bare else path, status, kept)
        return False

    def _check(self, name: str, xattrs: dict[bytes, bytes], *, directory: bool) -> None:
        """Refuse while the source still runs what no restore would take."""
        writer = self._writer
        writer.n_entries += 1
        writer.n_kept_bytes += kept_bytes(name.rpartition("/")[2], xattrs if directory else None)
        if directory and name.count("/") >= MAX_DEPTH - 1:
            cause = f"directory {'/' + name[:200]!a}... lies deeper than {MAX_DEPTH - 1} levels"
        elif sum(len(key) + len(data) + 32 for key, data in xattrs.items()) > MAX_HEADER_BYTES - (64 << 10):
            cause = f"the extended attributes of {'/' + name[-200:]!a} are too large"
        elif writer.n_kept_bytes > MAX_KEPT_BYTES:
            cause = f"it holds more than {writer.n_entries - 1} changed files and directories"
        else:
            return
        raise NotSupported(
            f"could not keep rootfs '{writer.view.path}': {cause}; "
            "remove what is not needed or keep it on a volume",
            after="running",
        )

    def _add_file(self, raw: bytes, path: str, status: os.stat_result, kept: dict[bytes, bytes]) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._tar.add_file(raw, status, fd, xattrs=kept)
        finally:
            os.close(fd)


def device_nodes(view: RootfsView, *, mount_points: Collection[str] = (), changed: bool = False) -> list[str]:
    """Names of the device nodes in a root file system, which `write_diff` leaves out, sorted.

    mount_points: destinations of the specification's mounts, below which nobody sees any. changed: only those
    that the container has made. Raises OSError.
    """
    top = view.upper_path if changed and view.kind == "overlay" else view.path
    if top is None:
        return []
    hidden = {f"{top}/{point.strip('/')}" for point in mount_points}
    hidden |= {mount.point for mount in mounts_below(top)}
    found: list[str] = []
    pending = [str(top)]
    while pending:
        # Whoever runs in there may remove anything meanwhile.
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(pending.pop()) as scan:
            for entry in scan:
                if entry.path in hidden:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif _is_device(entry):
                    found.append(os.path.relpath(entry.path, top))
    return sorted("/" + os.fsencode(name).decode("utf-8", "backslashreplace") for name in found)


def _is_device(entry: os.DirEntry[str]) -> bool:
    if entry.is_file(follow_symlinks=False) or entry.is_symlink():
        return False  # told by the directory itself
    with suppress(FileNotFoundError):
        status = entry.stat(follow_symlinks=False)
        device = stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode)
        return device and status.st_rdev != 0  # that is a whiteout
    return False


def is_whiteout(path: str, status: os.stat_result, mark: str) -> bool:
    """Whether an entry of an overlay layer says that the entry of the layers below is gone."""
    if stat.S_ISCHR(status.st_mode):
        return status.st_rdev == 0
    # Nested overlays write an empty file with a mark instead of a device.
    return stat.S_ISREG(status.st_mode) and status.st_size == 0 and _has_xattr(path, mark + "whiteout")


def is_opaque(path: str, mark: str) -> bool:
    """Whether a directory of an overlay layer hides the directories of the same name below it."""
    try:
        return os.getxattr(path, mark + "opaque", follow_symlinks=False) == b"y"
    except OSError:
        return False


def merged_names(view: RootfsView, below: str) -> set[str]:
    """Names that the lower layers alone show in the directory `below`.

    Raises ImageError if they are out of reach.
    """
    layers = list(view.lower_paths)
    for layer in layers:
        if not layer.is_dir():
            raise ImageError(
                f"could not keep rootfs '{view.path}': its lower layer '{_printable(layer)}' is out of "
                f"reach, so it is unknown what {'/' + below!a} hides",
                after="running",
            )
    parts = below.split("/")
    for depth in range(1, len(parts) + 1):
        layers = list(_continuing(layers, "/".join(parts[:depth]), view.mark))
    names: set[str] = set()
    gone: set[str] = set()
    for layer in layers:
        with os.scandir(layer / below) as entries:
            for entry in entries:
                if entry.name in gone or entry.name in names:
                    continue
                status = entry.stat(follow_symlinks=False)
                hidden = is_whiteout(entry.path, status, view.mark)
                (gone if hidden else names).add(entry.name)
    return names


def _continuing(layers: list[Path], below: str, mark: str) -> Iterator[Path]:
    """The layers that take part in the merged directory `below`, given those of its parent."""
    for layer in layers:
        path = layer / below
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(status.st_mode):
            return
        yield layer
        if is_opaque(str(path), mark):
            return


def _has_xattr(path: str, name: str) -> bool:
    with suppress(OSError):
        os.getxattr(path, name, follow_symlinks=False)
        return True
    return False


def _xattrs(path: str) -> dict[str, bytes]:
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:  # the file system has none
        return {}
    found: dict[str, bytes] = {}
    for name in names:
        with suppress(OSError):
            found[name] = os.getxattr(path, name, follow_symlinks=False)
    return found
