"""Taking back a root file system difference, so that a container can still start cold.

An overlay does not notice what is changed behind its back, so the changes are removed from the upper
directory while the overlay is unmounted, and then it is mounted again as it was.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from engines.api import ImageError
from engines.mountinfo import Mount, unescaped
from shim.images.mounts import mount_at
from shim.images.rootfs import RootfsView
from shim.images.seal import cause_of

_FLAGS = {
    "ro": 1,
    "nosuid": 2,
    "nodev": 4,
    "noexec": 8,
    "sync": 16,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
    "strictatime": 1 << 24,
}
_NOT_OPTIONS = {"rw", "ro", "seclabel"}  # shown by the kernel, not understood by the file system
_COPY_TIMEOUT_S = 60.0

_libc = ctypes.CDLL(None, use_errno=True)


def save_upper(view: RootfsView, backup_path: Path) -> None:
    """Copy the upper directory of a container that has not run yet; there is little in it.

    backup_path: a directory that does not exist, on a file system with extended attributes.
    Raises ImageError.
    """
    if view.upper_path is None:
        return
    try:
        backup_path.mkdir(mode=0o700)
        _copy(view.upper_path, backup_path)
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(backup_path, ignore_errors=True)
        raise ImageError(
            f"could not keep a copy of upper directory '{view.upper_path}': {_cause(error)}", after="stopped"
        ) from error


def undo_apply(view: RootfsView, backup_path: Path) -> None:
    """Make the root file system what it was at `save_upper`, and remove the copy.

    Raises ImageError if it cannot: then the container must not start.
    """
    if view.upper_path is None:
        return
    mount = mount_at(view.path)
    try:
        if mount is None or mount.kind != "overlay":
            raise ImageError(
                f"could not undo the changes below '{view.path}': it is no overlay any more; "
                "delete the container",
                after="stopped",
            )
        _call("umount2", os.fsencode(view.path), ctypes.c_int(0))
        try:
            for entry in list(os.scandir(view.upper_path)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    Path(entry.path).unlink()
            _copy(backup_path, view.upper_path)
        finally:
            _mount_again(view, mount)
        shutil.rmtree(backup_path)
    except (OSError, subprocess.SubprocessError) as error:
        raise ImageError(
            f"could not undo the changes below '{view.path}': {_cause(error)}; delete the container",
            after="stopped",
        ) from error


def _copy(source: Path, destination: Path) -> None:
    """Everything below, with owners, modes, times, links, whiteouts and attributes; shutil loses some."""
    command = ["cp", "--archive", "--no-target-directory", "--", str(source), str(destination)]
    subprocess.run(
        command, check=True, capture_output=True, timeout=_COPY_TIMEOUT_S, stdin=subprocess.DEVNULL
    )


def _mount_again(view: RootfsView, mount: Mount) -> None:
    options: list[str] = []
    base = Path("/")
    for option in mount.super_options:
        key, equals, value = option.partition("=")
        if key in _NOT_OPTIONS:
            continue
        plain = unescaped(value)
        if key == "lowerdir" and not plain.startswith("/") and view.upper_path is not None:
            first = plain.split(":")[0]
            base = next((up for up in view.upper_path.parents if (up / first).is_dir()), base)
        options.append(key + equals + plain.replace(",", "\\,"))
    flags = 0
    for word in mount.options:
        flags |= _FLAGS.get(word, 0)
    old = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(base)  # layers may be named relative to a directory, to keep the options short
        _call(
            "mount",
            os.fsencode(mount.source),
            os.fsencode(view.path),
            b"overlay",
            ctypes.c_ulong(flags),
            os.fsencode(",".join(options)),
        )
    finally:
        os.fchdir(old)
        os.close(old)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _cause(error: Exception) -> str:
    if isinstance(error, OSError):
        return cause_of(error)
    output = getattr(error, "stderr", None) or b""
    return os.fsdecode(output).strip() or str(error)
