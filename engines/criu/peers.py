"""What the kernel's socket diagnosis tells of unix sockets: other ends, and what nobody has accepted."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from pathlib import Path

from engines.namespaces import inside

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x1 | 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_UDIAG_SHOW_PEER, _UDIAG_SHOW_ICONS, _UDIAG_SHOW_RQLEN = 0x4, 0x8, 0x10
_UNIX_DIAG_PEER, _UNIX_DIAG_ICONS, _UNIX_DIAG_RQLEN = 2, 3, 4
_HEADER = struct.Struct("=IHHII")
_ENTRY_BYTES = 16


def of_namespace(netns_path: Path) -> dict[int, int]:
    """Inode of each unix socket of a network namespace to the inode of its other end; empty if unknown."""
    found: dict[int, int] = {}
    for inode, told in _told(netns_path, _UDIAG_SHOW_PEER).items():
        (peer,) = struct.unpack_from("=I", told.get(_UNIX_DIAG_PEER, bytes(4)))
        if peer:
            found[inode] = peer
    return found


def unaccepted(netns_path: Path) -> set[int]:
    """Inodes of unix sockets that have sent data on a connection which nobody has accepted yet."""
    told = _told(netns_path, _UDIAG_SHOW_ICONS | _UDIAG_SHOW_RQLEN)
    waiting: set[int] = set()
    for attributes in told.values():
        packed = attributes.get(_UNIX_DIAG_ICONS, b"")
        waiting.update(inode for (inode,) in struct.iter_unpack("=I", packed[: len(packed) & ~3]))
    # Of a socket that does not listen these are the bytes that it has to read, and those that it has sent.
    lengths = {inode: told.get(inode, {}).get(_UNIX_DIAG_RQLEN, bytes(8)) for inode in waiting}
    return {inode for inode, length in lengths.items() if struct.unpack_from("=II", length)[1]}


def alone(netns_path: Path, held: Collection[int]) -> set[int]:
    """Inodes of unix sockets without a living other end that are not among those held.

    Empty if none of those has anything to read: what is under way lies in another socket.
    """
    told = _told(netns_path, _UDIAG_SHOW_PEER | _UDIAG_SHOW_RQLEN)
    waiting = (struct.unpack_from("=I", told.get(i, {}).get(_UNIX_DIAG_RQLEN, bytes(4)))[0] for i in held)
    if not any(waiting):
        return set()
    ends = {i: struct.unpack_from("=I", more.get(_UNIX_DIAG_PEER, bytes(4)))[0] for i, more in told.items()}
    # One that nobody has accepted has no inode of its own.
    return {inode for inode, peer in ends.items() if inode and inode not in held and peer not in held}


def _told(netns_path: Path, show: int) -> dict[int, Mapping[int, bytes]]:
    """Attributes of each unix socket of a network namespace by its inode."""
    try:
        return inside("net", netns_path, lambda: dict(_ask(show)))
    except OSError:
        return {}


def _ask(show: int) -> Iterator[tuple[int, Mapping[int, bytes]]]:
    # struct unix_diag_req: family, protocol, padding, states, inode, what to show, cookie.
    body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, show, 0, 0)
    head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as channel:
        channel.settimeout(5)
        channel.send(head + body)
        while True:
            data = channel.recv(1 << 18)
            while len(data) >= _HEADER.size:
                length, kind = _HEADER.unpack_from(data)[:2]
                if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < _HEADER.size:
                    return
                yield _entry(data[_HEADER.size : length])
                data = data[(length + 3) & ~3 :]


def _entry(message: bytes) -> tuple[int, Mapping[int, bytes]]:
    """The inode of one struct unix_diag_msg, and its attributes."""
    (inode,) = struct.unpack_from("=I", message, 4)
    attributes: dict[int, bytes] = {}
    rest = message[_ENTRY_BYTES:]
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        if length < 4:
            break
        attributes[kind] = rest[4:length]
        rest = rest[(length + 3) & ~3 :]
    return inode, attributes


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
