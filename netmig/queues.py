"""Queueing disciplines and their classes, carried as the kernel's own attributes.

What the kernel lists is sent back nearly as it is (as `ip route save` does with routes), so kinds need not be
known one by one. Filters are not carried: their lists and their requests differ from kind to kind.
"""

from __future__ import annotations

import base64
import os
import socket
import struct
from collections.abc import Iterator
from typing import Literal

from netmig import rtnl
from netmig.identity import Queue
from netmig.ns import Netns

ROOT = 0xFFFFFFFF
INGRESS = 0xFFFFFFF1

_REQUEST_DUMP, _REQUEST_MAKE, _REQUEST_ACK = 0x301, 0x1 | 0x4 | 0x400 | 0x100, 0x1 | 0x4
_NEW = {"qdisc": 36, "class": 40, "filter": 44}
_GET = {"qdisc": 38, "class": 42, "filter": 46}
_DELETE_QDISC = 37
_ERROR, _DONE = 2, 3
_TCA_KIND, _TCA_OPTIONS = 1, 2
_TCA_CARRIED = (_TCA_KIND, _TCA_OPTIONS, 13, 14)  # and the blocks of ingress and egress
_CLASSFUL = frozenset({"htb", "hfsc", "drr", "qfq", "ets"})  # of others the classes come by themselves
_DEFAULTS = frozenset({"noqueue", "noop", "pfifo_fast", "mq", "fq_codel"})
_TCMSG = struct.Struct("=BBHiIII")
_HEADER = struct.Struct("=IHHII")


def capture(netns: Netns, index: int) -> tuple[Queue, ...]:
    """The disciplines and classes of an interface, parents first; without those that a device starts with.

    Raises NetworkError.
    """
    found = [
        queue
        for what in ("qdisc", "class")
        for queue in _listed(netns, index, what)
        if _set_by_somebody(queue)
    ]
    return tuple(_parents_first(found))


def has_filters(netns: Netns, index: int, queues: tuple[Queue, ...]) -> bool:
    """Is there a filter on one of them? Raises NetworkError."""
    parents = [queue.handle for queue in queues if queue.what == "qdisc"]
    return any(_dump(netns, index, "filter", parent) for parent in parents)


def replay(netns: Netns, index: int, queues: tuple[Queue, ...]) -> None:
    """Make them on an interface, as `capture` gave them. Raises OSError."""
    with _route_socket(netns) as connection:
        for queue in queues:
            body = _TCMSG.pack(0, 0, 0, index, queue.handle, queue.parent, queue.info)
            for number, text in queue.attributes:
                body += _attribute(number, base64.b64decode(text))
            _ask(connection, _NEW[queue.what], _REQUEST_MAKE, body, f"{queue.what} {queue.kind}")


def clear(netns: Netns, index: int, queues: tuple[Queue, ...]) -> None:
    """Give an interface back what it started with. Raises OSError."""
    with _route_socket(netns) as connection:
        for queue in queues:
            if queue.parent in {ROOT, INGRESS} and queue.what == "qdisc":
                body = _TCMSG.pack(0, 0, 0, index, 0, queue.parent, 0)
                _ask(connection, _DELETE_QDISC, _REQUEST_ACK, body, f"qdisc {queue.kind}")


def _set_by_somebody(queue: Queue) -> bool:
    if queue.what == "class":
        return queue.kind in _CLASSFUL
    return queue.kind not in _DEFAULTS or queue.handle != 0


def _parents_first(queues: list[Queue]) -> Iterator[Queue]:
    made, rest = {ROOT, INGRESS}, queues
    while rest:
        ready = [queue for queue in rest if _can_be_made(queue, made)] or rest
        yield from ready
        made |= {queue.handle for queue in ready}
        rest = [queue for queue in rest if queue not in ready]


def _can_be_made(queue: Queue, made: set[int]) -> bool:
    return queue.parent in made and (queue.what == "qdisc" or queue.handle & 0xFFFF0000 in made)


def _settled(what: str, kind: str, number: int, value: bytes) -> bytes:
    """An attribute without what is no setting."""
    if what == "qdisc" and kind == "htb" and number == _TCA_OPTIONS:
        # The kernel lists its version as 3 << 16 | revision, and asks for 3; the last word counts packets.
        changed = bytearray(value)
        struct.pack_into("=I", changed, 4, struct.unpack_from("=I", changed, 4)[0] >> 16)
        struct.pack_into("=I", changed, 20, 0)
        return bytes(changed)
    return value


def _listed(netns: Netns, index: int, what: Literal["qdisc", "class"]) -> Iterator[Queue]:
    for body in _dump(netns, index, what, 0):
        handle, parent, info = struct.unpack_from("=III", body, 8)
        attributes = dict(_attributes(body[_TCMSG.size :]))
        kind = attributes.get(_TCA_KIND, b"").rstrip(b"\0").decode()
        yield Queue(
            what=what,
            kind=kind,
            handle=handle,
            parent=parent,
            info=info if what == "class" else 0,  # of a qdisc: how many hold it
            attributes=tuple(
                (number, base64.b64encode(_settled(what, kind, number, value)).decode())
                for number, value in attributes.items()
                if number in _TCA_CARRIED
            ),
        )


def _dump(netns: Netns, index: int, what: str, parent: int) -> list[bytes]:
    with _route_socket(netns) as connection:
        return rtnl.whole(lambda: _dumped(connection, index, what, parent))


def _dumped(connection: socket.socket, index: int, what: str, parent: int) -> tuple[list[bytes], set[int]]:
    request = _TCMSG.pack(0, 0, 0, index, 0, parent, 0)
    connection.send(_HEADER.pack(_HEADER.size + len(request), _GET[what], _REQUEST_DUMP, 1, 0) + request)
    bodies: list[bytes] = []
    seen: set[int] = set()
    while True:
        answer = connection.recv(1 << 18)
        offset = 0
        while offset + _HEADER.size <= len(answer):
            length, kind, flags, _, _ = _HEADER.unpack_from(answer, offset)
            seen.add(flags)
            if kind in {_ERROR, _DONE}:
                return bodies, seen
            body = answer[offset + _HEADER.size : offset + length]
            if kind == _NEW[what] and struct.unpack_from("=i", body, 4)[0] == index:
                bodies.append(body)
            offset += _padded(length)


def _ask(connection: socket.socket, kind: int, flags: int, body: bytes, what: str) -> None:
    connection.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body)
    number = -struct.unpack_from("=i", connection.recv(1 << 16), _HEADER.size)[0]
    if number:
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _route_socket(netns: Netns) -> socket.socket:
    with netns.inside():
        return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + 4 <= len(data):
        length, number = struct.unpack_from("=HH", data, offset)
        if length < 4:
            return
        yield number & 0x3FFF, data[offset + 4 : offset + length]
        offset += _padded(length)


def _attribute(number: int, value: bytes) -> bytes:
    return struct.pack("=HH", len(value) + 4, number) + value + b"\0" * (-len(value) % 4)


def _padded(length: int) -> int:
    return length + 3 & ~3
