"""The node's memory of a pod's translated connections, carried to another node.

A pod's connection to a Service goes to an address that the node rewrites (DNAT), and only the node's
connection tracking knows to what. Elsewhere the next packet would be taken for a new connection's, go to
another backend, and be answered with a reset. So the entries are read on the old node, made again on the new
one, and forgotten on the old one: a connection is translated once, and its backend may be beside either.

What cannot be carried: connections that leave by the node's own address (SNAT, masquerading). Their answers
come to the old node. What others open to the pod stays as well: it is translated where they send it.

The kernel's ctnetlink is spoken directly: its attributes are nested three deep, and this needs eight of them.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from netmig.errors import NetworkError
from netmig.ns import Netns

_NETFILTER = 12  # NETLINK_NETFILTER
_CTNETLINK = 1 << 8  # NFNL_SUBSYS_CTNETLINK
_NEW, _GET, _DELETE = 0, 1, 2
_REQUEST, _ACK, _DUMP, _CREATE, _EXCLUSIVE = 0x1, 0x4, 0x300, 0x400, 0x200
_ERROR, _DONE = 2, 3
_HOW = {_NEW: _ACK | _CREATE | _EXCLUSIVE, _GET: 0, _DELETE: _ACK}
_NESTED, _TYPE = 0x8000, 0x3FFF

# CTA_*
_ORIGINAL, _REPLY, _STATUS, _PROTOCOL_STATE, _NAT_SRC, _TIMEOUT, _MARK, _NAT_DST = 1, 2, 3, 4, 6, 7, 8, 13
_FILTER = 25
_SEEN_REPLY, _ASSURED, _CONFIRMED = 0x2, 0x4, 0x8  # IPS_*
_BE_LIBERAL = 0x08  # the window is not known here: take what comes
_TRIES = 3
_ip = lru_cache(ipaddress.ip_address)  # a pod's connections have few
_AT_ONCE = 32  # the answers must find room in the socket's buffer


class Tuple(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a connection."""

    src: str
    dst: str
    src_port: int
    dst_port: int

    def turned(self) -> Tuple:
        """The other direction, if nothing were translated."""
        return Tuple(src=self.dst, dst=self.src, src_port=self.dst_port, dst_port=self.src_port)


class Tcp(msgspec.Struct, frozen=True, kw_only=True):
    """State (TCP_CONNTRACK_*), and window scales and flags (IP_CT_TCP_FLAG_*) of both directions."""

    state: int
    scales: tuple[int, int]
    flags: tuple[int, int]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A connection that the node translates.

    protocol: IPPROTO_TCP or IPPROTO_UDP. original: as its opener sent it. reply: as it is answered.
    timeout_s: seconds until the node forgets it.
    """

    protocol: int
    original: Tuple
    reply: Tuple
    status: int
    timeout_s: int
    mark: int = 0
    tcp: Tcp | None = None

    def __str__(self) -> str:
        name = "TCP" if self.protocol == socket.IPPROTO_TCP else "UDP"
        one = self.original
        return f"{name} {one.src} port {one.src_port} to {one.dst} port {one.dst_port}"


Translations = tuple[Entry, ...]


def capture(host: Netns, addresses: Iterable[str]) -> tuple[Translations, tuple[str, ...]]:
    """What a node translates that these addresses opened, and what of it cannot be carried, a sentence each.

    Raises NetworkError where the kernel has no connection tracking.
    """
    wanted = {str(ipaddress.ip_address(address)) for address in addresses}
    carried: list[Entry] = []
    left: list[str] = []
    for entry in _listed(host, wanted):
        if entry.original.src not in wanted or entry.reply == entry.original.turned():
            continue
        if entry.reply.dst != entry.original.src:
            left.append(f"{entry} leaves by {entry.reply.dst}, the old node's address: it will be reset")
        else:
            carried.append(entry)
    return tuple(carried), tuple(left)


def restore(host: Netns, entries: Translations) -> tuple[str, ...]:
    """Let a node translate these connections, before their first packet comes.

    One that it has already is left as it is. What else it knows of their packets goes: it saw them pass,
    translated elsewhere, and the kernel would give ours another port. Returns what went wrong, a sentence
    each. Raises NetworkError where the kernel has no connection tracking.
    """
    wrong: dict[Entry, int] = dict.fromkeys(entries, 0)
    with _opened(host) as netlink:
        for _ in range(_TRIES):  # a packet may come between
            named = [(entry, entry.original) for entry in wrong]
            made, has = _asked(netlink, _NEW, named), _asked(netlink, _GET, named)
            wrong = {
                entry: number
                for entry, (number, _), (_, one) in zip(wrong, made, has, strict=True)
                if one is None or (one.original, one.reply) != (entry.original, entry.reply)
            }
            _asked(
                netlink,
                _DELETE,
                [(one, name) for one in wrong for name in (one.original, one.reply, one.reply.turned())],
            )
    return tuple(
        f"{entry} will be reset: the node does not take it over: "
        + (os.strerror(number) if number else "another connection has its ports")
        for entry, number in wrong.items()
    )


def untranslated(host: Netns, addresses: Iterable[str]) -> Translations:
    """What a node tracks of these addresses without translating it. Raises NetworkError as `capture`."""
    wanted = {str(ipaddress.ip_address(address)) for address in addresses}
    return tuple(
        entry
        for entry in _listed(host, wanted, (_ORIGINAL, _REPLY))
        if wanted & {entry.original.src, entry.original.dst} and entry.reply == entry.original.turned()
    )


def forget(host: Netns, entries: Translations) -> None:
    """Let a node translate these connections no more: from now on they pass it translated, or not at all.

    Those that it has not are fine. Raises NetworkError where the kernel has no connection tracking.
    """
    with _opened(host) as netlink:
        _asked(netlink, _DELETE, [(entry, entry.original) for entry in entries])


def _asked(
    netlink: socket.socket, what: int, named: Sequence[tuple[Entry, Tuple]]
) -> list[tuple[int, Entry | None]]:
    """Have entries made, read or deleted, many in one call: an errno of each, and what was read.

    named: with a direction of the one that is meant, whatever else it is.
    """
    answers: list[tuple[int, Entry | None]] = []
    for at in range(0, len(named), _AT_ONCE):
        some = named[at : at + _AT_ONCE]
        netlink.send(b"".join(_question(what, entry, one) for entry, one in some))
        for _ in some:
            data = netlink.recv(1 << 16)
            if struct.unpack_from("=H", data, 4)[0] == _ERROR:
                answers.append((-struct.unpack_from("=i", data, 16)[0], None))
            else:
                answers.append((0, _entry(data[20:])))
    return answers


def _question(what: int, entry: Entry, one: Tuple) -> bytes:
    family = socket.AF_INET6 if ":" in one.src else socket.AF_INET
    attributes = _attributes(entry) if what == _NEW else _nested(_ORIGINAL, _tuple_data(one, entry.protocol))
    return _message(what, _REQUEST | _HOW[what], family, attributes)


def _opened(host: Netns) -> socket.socket:
    try:
        with host.inside():
            return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER)
    except OSError as error:
        raise NetworkError(
            f"could not read the translations of {host.path}: {error.strerror}; load nf_conntrack_netlink"
        ) from error


def _listed(
    host: Netns, addresses: Collection[str], sides: tuple[int, ...] = (_ORIGINAL,)
) -> Iterator[Entry]:
    """The entries of connections that these addresses opened, or answer (_REPLY), and maybe others."""
    packed = [ipaddress.ip_address(address).packed for address in addresses]
    with _opened(host) as netlink:
        netlink.settimeout(10)
        for family, only in sorted({_narrowed(address, side) for address in addresses for side in sides}):
            netlink.send(_message(_GET, _REQUEST | _DUMP, family, only))
            yield from _dumped(netlink, host.path, packed)


def _narrowed(address: str, side: int) -> tuple[int, bytes]:
    """The family of an address, and what lets the kernel list only the connections that it opened or answers.

    A node has some hundred thousand, and its pod is frozen meanwhile. A kernel before 5.8 lists all. So must
    every one for IPv6: of that (Linux 6.18 still) it would list those that are not meant.
    """
    ip = ipaddress.ip_address(address)
    if ip.version == 6:
        return socket.AF_INET6, b""
    by_source = _nested(_FILTER, _attribute(side, struct.pack("=I", 1)))  # numbered alike
    return socket.AF_INET, by_source + _nested(side, _nested(1, _attribute(1, ip.packed)))


def _dumped(netlink: socket.socket, path: Path, packed: Collection[bytes]) -> Iterator[Entry]:
    """packed: what has none of these bytes is none of theirs; to decode all of a node's takes long."""
    while True:
        data = netlink.recv(1 << 18)
        at = 0
        while at + 16 <= len(data):
            length, kind = struct.unpack_from("=IH", data, at)
            if kind == _DONE:
                return
            if kind == _ERROR:
                number = -struct.unpack_from("=i", data, at + 16)[0]
                raise NetworkError(
                    f"could not read the translations of {path}: {os.strerror(number)}; "
                    "load nf_conntrack_netlink"
                )
            one = data[at + 20 : at + length]
            if any(address in one for address in packed) and (entry := _entry(one)) is not None:
                yield entry
            at += (length + 3) & ~3


def _entry(data: bytes) -> Entry | None:
    """An entry of TCP or UDP; None for others."""
    found = dict(_split(data))
    protocol, original = _tuple(found[_ORIGINAL])
    if original is None:
        return None
    _, reply = _tuple(found[_REPLY])
    tcp = None
    if protocol == socket.IPPROTO_TCP and _PROTOCOL_STATE in found:
        state = dict(_split(dict(_split(found[_PROTOCOL_STATE])).get(1, b"")))
        one, other = (state.get(key, b"\0")[0] for key in (4, 5))
        scales = state.get(2, b"\0")[0], state.get(3, b"\0")[0]
        tcp = Tcp(state=state.get(1, b"\0")[0], scales=scales, flags=(one, other))
    return Entry(
        protocol=protocol,
        original=original,
        reply=reply or original.turned(),
        status=_number(found.get(_STATUS)),
        timeout_s=_number(found.get(_TIMEOUT)) or 600,
        mark=_number(found.get(_MARK)),
        tcp=tcp,
    )


def _number(data: bytes | None) -> int:
    return int.from_bytes(data or b"", "big")


def _tuple(data: bytes) -> tuple[int, Tuple | None]:
    """A CTA_TUPLE_*: its protocol, and its addresses and ports; None for protocols that have no ports."""
    found = dict(_split(data))
    ip, protocol = dict(_split(found[1])), dict(_split(found[2]))
    number = protocol[1][0]
    if number not in (socket.IPPROTO_TCP, socket.IPPROTO_UDP):
        return number, None
    src, dst = (_ip(ip.get(v4) or ip[v6]) for v4, v6 in ((1, 3), (2, 4)))
    ports = _number(protocol[2]), _number(protocol[3])
    return number, Tuple(src=str(src), dst=str(dst), src_port=ports[0], dst_port=ports[1])


def _attributes(entry: Entry) -> bytes:
    """What makes the kernel translate as it did before.

    As the reply it is told the untranslated one: it sets its translation bits only where its own work on
    _NAT_SRC and _NAT_DST changes that.
    """
    plain = entry.original.turned()
    data = _nested(_ORIGINAL, _tuple_data(entry.original, entry.protocol))
    data += _nested(_REPLY, _tuple_data(plain, entry.protocol))
    status = entry.status & (_SEEN_REPLY | _ASSURED) | _CONFIRMED
    data += _attribute(_STATUS, struct.pack("!I", status))
    if (entry.reply.src, entry.reply.src_port) != (plain.src, plain.src_port):
        data += _nested(_NAT_DST, _translation(entry.reply.src, entry.reply.src_port))
    if (entry.reply.dst, entry.reply.dst_port) != (plain.dst, plain.dst_port):
        data += _nested(_NAT_SRC, _translation(entry.reply.dst, entry.reply.dst_port))
    data += _attribute(_TIMEOUT, struct.pack("!I", entry.timeout_s))
    if entry.mark:
        data += _attribute(_MARK, struct.pack("!I", entry.mark))
    if entry.tcp is not None:
        state = _attribute(1, bytes([entry.tcp.state]))
        state += b"".join(_attribute(2 + n, bytes([scale])) for n, scale in enumerate(entry.tcp.scales))
        for n, flags in enumerate(entry.tcp.flags):
            liberal = flags | _BE_LIBERAL
            state += _attribute(4 + n, bytes([liberal, liberal]))  # the flags, and which of them are meant
        data += _nested(_PROTOCOL_STATE, _nested(1, state))
    return data


def _tuple_data(one: Tuple, protocol: int) -> bytes:
    src, dst = _ip(one.src), _ip(one.dst)
    first = 1 if src.version == 4 else 3
    ip = _attribute(first, src.packed) + _attribute(first + 1, dst.packed)
    ports = _attribute(2, struct.pack("!H", one.src_port)) + _attribute(3, struct.pack("!H", one.dst_port))
    return _nested(1, ip) + _nested(2, _attribute(1, bytes([protocol])) + ports)


def _translation(address: str, port: int) -> bytes:
    ip = _ip(address)
    lowest = 1 if ip.version == 4 else 4
    number = struct.pack("!H", port)
    ports = _attribute(1, number) + _attribute(2, number)
    return _attribute(lowest, ip.packed) + _attribute(lowest + 1, ip.packed) + _nested(3, ports)


def _message(what: int, flags: int, family: int, attributes: bytes) -> bytes:
    head = struct.pack("=IHHII", 20 + len(attributes), _CTNETLINK | what, flags, 1, 0)
    return head + struct.pack("=BBH", family, 0, 0) + attributes


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", len(value) + 4, kind) + value + bytes(-len(value) % 4)


def _nested(kind: int, value: bytes) -> bytes:
    return _attribute(kind | _NESTED, value)


def _split(data: bytes) -> Generator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            return
        yield kind & _TYPE, data[at + 4 : at + length]
        at += (length + 3) & ~3
