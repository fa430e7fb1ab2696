"""Names resolved beneath a directory by the kernel, which Python's os module does not offer.

openat2 decides atomically where a name may lead; looking at each component first and opening it afterwards
would leave a gap in which the component can change.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path

_NR_OPENAT2 = 437  # the same on every architecture
_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_RESOLVE_IN_ROOT = 0x10
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_N_TRIES = 64

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _openat2(dir_fd: int, name: str, flags: int, resolve: int) -> int:
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    raw = os.fsencode(name)
    if b"\0" in raw:
        raise OSError(errno.EINVAL, "a NUL byte in the name", name)
    for _ in range(_N_TRIES):
        fd = _libc.syscall(
            ctypes.c_long(_NR_OPENAT2),
            ctypes.c_int(dir_fd),
            ctypes.c_char_p(raw),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if fd >= 0:
            return int(fd)
        code = ctypes.get_errno()
        if code not in {errno.EAGAIN, errno.EINTR}:  # EAGAIN: something was renamed meanwhile
            break
    else:
        code = errno.EAGAIN
    raise OSError(code, os.strerror(code), name)


def open_in_root(root_fd: int, name: str, flags: int) -> int:
    """Open `name` as if `root_fd` were the root directory: links inside lead to places inside.

    Does not cross mount points. Returns a descriptor. Raises OSError (EXDEV at a mount point).
    """
    return _openat2(root_fd, name, flags, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_XDEV)


def open_plain(directory: Path, name: str) -> int:
    """Open a regular file beneath `directory` for reading, following no link at all.

    Returns a descriptor. Raises OSError (ELOOP for a link, EINVAL for anything but a regular file).
    """
    dir_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fd = _openat2(
            dir_fd,
            name,
            os.O_RDONLY | os.O_NONBLOCK,
            _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_XDEV,
        )
    finally:
        os.close(dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return fd


def read_plain(directory: Path, name: str, max_bytes: int) -> bytes:
    """Content of a regular file of `directory`, following no link. Raises OSError (EFBIG above the cap)."""
    with os.fdopen(open_plain(directory, name), "rb") as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", name)
        return file.read(max_bytes + 1)


def exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one step. False where the file system cannot do it. Raises OSError."""
    if not hasattr(_libc, "renameat2"):
        return False
    at = ctypes.c_int(_AT_FDCWD)
    names = (ctypes.c_char_p(os.fsencode(one)), ctypes.c_char_p(os.fsencode(other)))
    if _libc.renameat2(at, names[0], at, names[1], ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in {errno.EINVAL, errno.ENOSYS}:
        return False
    raise OSError(code, os.strerror(code), str(one))
