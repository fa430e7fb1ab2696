"""The one thing about a network namespace that CRIU and runc leave undone: its loopback device is down.

At a cold start runc brings it up in a namespace that it makes; at a restore nobody does, and connections that
the container has to itself could not be made again. A namespace given by path is its maker's business.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP = 1


def raise_loopback(netns_path: Path) -> None:
    """Bring `lo` up in a network namespace. Raises OSError."""
    failure: list[OSError] = []

    def inside() -> None:
        # A thread of its own joins the namespace and ends there: the caller's never changes.
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            descriptor = os.open(netns_path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if libc.setns(descriptor, _CLONE_NEWNET):
                    code = ctypes.get_errno()
                    raise OSError(code, os.strerror(code), str(netns_path))
            finally:
                os.close(descriptor)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
                request = struct.pack("16sH22x", b"lo", 0)
                (flags,) = struct.unpack_from("H", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)
                fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))
        except OSError as error:
            failure.append(error)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
