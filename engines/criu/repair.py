"""Takes TCP sockets of other processes out of CRIU's repair mode, and lets them call their peers.

A killed dump leaves established sockets in repair mode: they swallow nothing and send nothing, and `send`
fails with EINVAL. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
from collections.abc import Iterable

_TCP_REPAIR = 19
_ESTABLISHED = 1
_PIDFD_GETFD = 438  # the same on every architecture
_libc = ctypes.CDLL(None, use_errno=True)
_KIND = (39, socket.SO_TYPE, 38)  # SO_DOMAIN, SO_PROTOCOL: Python does not name them


def borrow(pidfd: int, descriptor: int) -> int:
    """Our own copy of another process's descriptor, which it does not notice. Raises OSError."""
    copy = _libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return int(copy)


def copy_of(pidfd: int, number: int) -> socket.socket:
    """Our own copy of a process's socket, for the caller to close. Raises OSError.

    Python would find its family out by getsockname, which some families do not have.
    """
    descriptor = borrow(pidfd, number)
    try:
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise
    with raw:
        family, kind, protocol = (raw.getsockopt(socket.SOL_SOCKET, option) for option in _KIND)
        return socket.socket(family, kind, protocol, fileno=raw.detach())


def tcp_sockets(pid: int) -> list[socket.socket]:
    """Our own copies of a process's TCP sockets, for the caller to close; none if it is gone."""
    found: list[socket.socket] = []
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return found
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):  # noqa: PTH115
                    continue
                with contextlib.ExitStack() as stack:
                    copy = stack.enter_context(copy_of(pidfd, int(name)))
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        stack.pop_all()
                        found.append(copy)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESRCH, errno.EPERM):
            raise
    finally:
        os.close(pidfd)
    return found


def end_repair(pid: int) -> int:
    """Take all TCP sockets of a process out of repair mode; how many were in it."""
    listening: set[int] = set()
    mended: list[socket.socket] = []
    copies = tcp_sockets(pid)
    try:
        for copy in copies:
            with contextlib.suppress(OSError):
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    if copy.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR):
                        listening.add(copy.getsockname()[1])
                elif copy.getsockopt(socket.IPPROTO_TCP, _TCP_REPAIR) == 1:
                    copy.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 0)
                    mended.append(copy)
        # Repair mode lost the sockets' SO_REUSEADDR. A connection had it from its listener.
        for copy in mended:
            with contextlib.suppress(OSError):
                if copy.getsockname()[1] in listening:
                    copy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    finally:
        for copy in copies:
            copy.close()
    return len(mended)


def call_peers(pids: Iterable[int]) -> int:
    """Let every established connection of some processes send a probe to its peer; how many did.

    CRIU does so at the end of a restore. If the container was held and cut off then, nobody has heard it, and
    without another probe a connection waits for a timer of a second and more, on both sides.
    """
    called: set[int] = set()
    for pid in pids:
        for copy in tcp_sockets(pid):
            with copy, contextlib.suppress(OSError):
                number = os.fstat(copy.fileno()).st_ino
                state = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                if number in called or state != _ESTABLISHED:
                    continue
                called.add(number)
                reuse = copy.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
                copy.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
                copy.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 0)
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    return len(called)
