"""Connections of a container that is held here and may never run here: until it does, in repair mode.

Then they neither try to reach their peers, which would make them more and more patient, nor say good-bye when
the container is killed: they go on elsewhere, and could be made again here at once.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path

_TCP_REPAIR = 19
_PIDFD_GETFD = 438  # the same on every architecture
_libc = ctypes.CDLL(None, use_errno=True)


def part(pids: Iterable[int]) -> None:
    """Put the TCP connections of processes that do not run into repair mode."""
    for pid in pids:
        for copy in _sockets(pid):
            with copy, suppress(OSError):  # one that listens has no repair mode
                copy.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)


def rejoin(pids: Iterable[int]) -> None:
    """Take them out of it: each asks its peer at once."""
    reusing: set[int] = set()
    parted: list[socket.socket] = []
    with ExitStack() as stack:
        for copy in chain.from_iterable(map(_sockets, pids)):
            stack.enter_context(copy)
            with suppress(OSError):
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    if copy.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR):
                        reusing.add(copy.getsockname()[1])
                elif copy.getsockopt(socket.IPPROTO_TCP, _TCP_REPAIR) == 1:
                    parted.append(copy)
        for copy in parted:
            with suppress(OSError):
                copy.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 0)
                # Repair mode loses it. A connection had it from its listener.
                if copy.getsockname()[1] in reusing:
                    copy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _sockets(pid: int) -> Iterator[socket.socket]:
    """Our own copies of a process's sockets of TCP, which it does not notice."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if str(path.readlink()).startswith("socket:"):
                    number = _libc.syscall(_PIDFD_GETFD, pidfd, int(path.name), 0)
                    copy = socket.socket(fileno=number) if number >= 0 else None
                    if copy is None or copy.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    if copy.type == socket.SOCK_STREAM:
                        yield copy
    except OSError:
        return
    finally:
        os.close(pidfd)
