"""Where a namespace is, in a form that another process can use."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from netmig.errors import NetworkError
from netmig.ns import Netns

_NODE = (Path("/proc/1/ns/net"), Path("/proc/thread-self/ns/net"))


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace. inode: the kernel's number, since another may be at the path later."""

    path: str
    inode: int


def place_of(netns: Netns) -> Place:
    """The place of an open namespace."""
    return Place(path=str(netns.path), inode=netns.inode)


def open_place(place: Place) -> Netns | None:
    """The namespace again; None if it is gone, as far as can be seen. /proc/self/... means the node's own."""
    for path in (Path(place.path), *_NODE):
        with suppress(NetworkError):
            netns = Netns.open(path)
            if netns.inode == place.inode:
                return netns
            netns.close()
    return None
