"""Takes TCP sockets of other processes out of CRIU's repair mode.

A killed dump leaves established sockets in repair mode: they swallow nothing and send nothing, and `send`
fails with EINVAL. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket

_TCP_REPAIR = 19
_PIDFD_GETFD = 438  # the same on every architecture
_libc = ctypes.CDLL(None, use_errno=True)


def borrow(pidfd: int, descriptor: int) -> int:
    """Our own copy of another process's descriptor, which it does not notice. Raises OSError."""
    copy = _libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return int(copy)


def end_repair(pid: int) -> int:
    """Take all TCP sockets of a process out of repair mode; how many were in it."""
    ended = 0
    listening: set[int] = set()
    mended: list[socket.socket] = []
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return 0
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):  # noqa: PTH115
                    continue
                with contextlib.ExitStack() as stack:
                    copy = stack.enter_context(socket.socket(fileno=borrow(pidfd, int(name))))
                    inet = copy.family in (socket.AF_INET, socket.AF_INET6)
                    if not inet or copy.type != socket.SOCK_STREAM:
                        continue
                    if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        if copy.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR):
                            listening.add(copy.getsockname()[1])
                    elif copy.getsockopt(socket.IPPROTO_TCP, _TCP_REPAIR) == 1:
                        copy.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 0)
                        ended += 1
                        stack.pop_all()
                        mended.append(copy)
        # Repair mode lost the sockets' SO_REUSEADDR. A connection had it from its listener.
        for copy in mended:
            with contextlib.suppress(OSError):
                if copy.getsockname()[1] in listening:
                    copy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESRCH, errno.EPERM):
            raise
    finally:
        for copy in mended:
            copy.close()
        os.close(pidfd)
    return ended
