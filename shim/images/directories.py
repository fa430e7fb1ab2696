"""The directories of the store: for root alone, on disk, and in nobody's use while they change."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from engines.api import ImageError
from shim.errors import ShimError
from shim.images.layout import Reference

_UNSAFE_BITS = 0o077


def check_mode(path: Path) -> None:
    """Refuse a directory that others can read or change: an image is root code and holds secrets.

    Raises ShimError, OSError.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ShimError(f"could not use store '{path}': it is not a directory; move it away")
    if status.st_uid != os.geteuid():
        raise ShimError(
            f"could not use store '{path}': it belongs to user {status.st_uid}, not {os.geteuid()}; "
            "check who put it there, then chown it"
        )
    if status.st_mode & _UNSAFE_BITS:
        raise ShimError(
            f"could not use store '{path}': its mode is {stat.S_IMODE(status.st_mode):04o}; "
            "check what is in it, then chmod it to 0700"
        )


def make_directory(path: Path) -> None:
    """Make a directory where it is missing. Raises OSError, ShimError if what is there is unsafe."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        check_mode(path)
    else:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Force the names in a directory to disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_open(path: Path, fd: int) -> bool:
    """Whether the path still leads to the directory that is open."""
    try:
        return path.stat().st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


@contextmanager
def unused(path: Path, reference: Reference) -> Generator[None]:
    """Nobody restores the image in this directory, nor begins to. Raises ImageError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ImageError(
            f"could not remove or replace image '{reference}': a container is being restored from it; "
            "try again"
        ) from error
    finally:
        os.close(fd)
