"""What CRIU and runc leave undone in a network namespace that they make at a restore.

Its loopback device is down, so that connections that the container has to itself could not be made again, and
its settings (`net.*` of the spec's sysctl) are the kernel's. At a cold start runc sees to both. A namespace
given by path is its maker's business.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from engines.namespaces import inside

_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP = 1


def raise_loopback(netns_path: Path) -> None:
    """Bring `lo` up in a network namespace. Raises OSError."""

    def bring_up() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            request = struct.pack("16sH22x", b"lo", 0)
            (flags,) = struct.unpack_from("H", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))

    inside("net", netns_path, bring_up)


def of_network(sysctls: Mapping[str, str]) -> dict[str, str]:
    """Those of a spec's sysctls that belong to a network namespace."""
    return {name: str(value) for name, value in sysctls.items() if name.replace(".", "/").startswith("net/")}


def set_sysctls(netns_path: Path, sysctls: Mapping[str, str]) -> None:
    """Set sysctls of a network namespace, by names as in a spec. Raises OSError, which names the file."""

    def write() -> None:
        for name, value in sysctls.items():
            # As runc does, which has looked at the names too.
            path = os.path.normpath(f"/proc/sys/{name.replace('.', '/')}")
            if not path.startswith("/proc/sys/net/"):
                raise PermissionError(errno.EPERM, "it belongs to no network namespace", path)
            try:
                Path(path).write_text(value)
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from error

    inside("net", netns_path, write)
