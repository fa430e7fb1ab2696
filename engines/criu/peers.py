"""The other ends of unix sockets, as the kernel's socket diagnosis tells."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Container, Iterable
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x1 | 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_UDIAG_SHOW_PEER = 0x4
_UNIX_DIAG_PEER = 2
_HEADER = struct.Struct("=IHHII")
_ENTRY_BYTES = 16


def of_namespace(netns_path: Path) -> dict[int, int]:
    """Inode of each unix socket of a network namespace to the inode of its other end; empty if unknown."""
    found: dict[int, int] = {}

    def inside() -> None:
        # A thread of its own joins the namespace and ends there: the caller's never changes.
        with contextlib.suppress(OSError):
            descriptor = os.open(netns_path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
                    return
            finally:
                os.close(descriptor)
            found.update(_ask())

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    return found


def _ask() -> dict[int, int]:
    # struct unix_diag_req: family, protocol, padding, states, inode, what to show, cookie.
    body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _UDIAG_SHOW_PEER, 0, 0)
    head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0)
    found: dict[int, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as channel:
        channel.settimeout(5)
        channel.send(head + body)
        while True:
            data = channel.recv(1 << 18)
            while len(data) >= _HEADER.size:
                length, kind = _HEADER.unpack_from(data)[:2]
                if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < _HEADER.size:
                    return found
                _entry(data[_HEADER.size : length], found)
                data = data[(length + 3) & ~3 :]


def _entry(message: bytes, found: dict[int, int]) -> None:
    """One struct unix_diag_msg and its attributes."""
    (inode,) = struct.unpack_from("=I", message, 4)
    rest = message[_ENTRY_BYTES:]
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        if length < 4:
            return
        if kind == _UNIX_DIAG_PEER:
            (peer,) = struct.unpack_from("=I", rest, 4)
            if peer:
                found[inode] = peer
        rest = rest[(length + 3) & ~3 :]


def holders(inodes: Iterable[int], *, without: Container[int]) -> dict[int, int]:
    """Which of these sockets are open in which process, some processes left out."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, int] = {}
    if not wanted:
        return found
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit() or int(name) in without:
            continue
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{name}/fd"):  # noqa: PTH208
                with contextlib.suppress(OSError):
                    inode = wanted.get(os.readlink(f"/proc/{name}/fd/{number}"))  # noqa: PTH115
                    if inode is not None:
                        found.setdefault(inode, int(name))
    return found
