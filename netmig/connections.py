"""Established TCP connections of a pod that nobody runs: their peers wait, or are told that it is over.

A guard drops, on the node, what peers send to connections that sleep in an image. It knows each connection by
its four numbers, so nothing else of whoever has the address meanwhile is touched, and forgets them after a
day: somebody may have the same four again. It stands behind all translation of addresses (postrouting), where
packets of other nodes and of the node itself pass alike.

The farewell makes a peer ask: a SYN within an established connection is answered with an acknowledgement of
the peer's true numbers (RFC 5961, section 4.2), and that the pod's kernel, which has no such connection,
answers with a reset that the peer believes. Without it an idle peer would not notice for hours.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from netmig import nft
from netmig.errors import NftError
from netmig.ns import Netns

PREFIX = "torpor-guard-"
_MAX_NAME = 31
_AFTER_ALL = 300  # behind source NAT (100)
_TIMEOUT = "1d"
_IPV6_CHECKSUM = 7
_SYN = 0x02
_CHECKSUM_AT = 16


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A TCP connection, seen from the pod. Addresses without prefix; of one family."""

    local: str
    local_port: int
    remote: str
    remote_port: int

    @property
    def version(self) -> int:
        """4 or 6."""
        return ipaddress.ip_address(self.local).version


def guard_name(owner: str) -> str:
    """The name of a guard's tables."""
    return (PREFIX + "".join(c if c.isalnum() else "-" for c in owner))[:_MAX_NAME]


def guard(host: Netns, table: str, connections: Iterable[Connection]) -> bool:
    """Let nothing of these connections' peers through on a node. Again does no harm.

    Returns whether what is bridged past the node's own layer 3 is dropped too, which not every kernel can.
    Raises NetworkError.
    """
    listed = sorted(set(connections), key=str)
    if not listed:
        return True
    nft.run(host, _rules("inet", table, "postrouting", _AFTER_ALL, listed))
    try:
        nft.run(host, _rules("bridge", table, "forward", 0, listed))
    except NftError:
        return False
    return True


def unguard(host: Netns, table: str) -> bool:
    """Let the peers through again. Returns whether there was a guard. Raises NetworkError."""
    found = {
        (str(entry["table"]["family"]), str(entry["table"]["name"]))
        for entry in nft.run(host, "list tables")
        if "table" in entry
    }
    ours = [family for family, name in found if name == table]
    if ours:
        nft.run(host, "".join(f"delete table {family} {table}\n" for family in ours))
    return bool(ours)


def _rules(family: str, table: str, hook: str, priority: int, connections: list[Connection]) -> str:
    sets, rules = "", ""
    for version, kind, word in ((4, "ipv4_addr", "ip"), (6, "ipv6_addr", "ip6")):
        elements = [
            f"{one.remote} . {one.remote_port} . {one.local} . {one.local_port}"
            for one in connections
            if one.version == version
        ]
        if elements:
            sets += f" set v{version} {{\n  type {kind} . inet_service . {kind} . inet_service\n"
            sets += f"  timeout {_TIMEOUT}\n  elements = {{ {', '.join(elements)} }}\n }}\n"
            rules += f"  {word} saddr . tcp sport . {word} daddr . tcp dport @v{version} drop\n"
    # Deleted and made in one transaction: there is no moment without it.
    return (
        f"add table {family} {table}\ndelete table {family} {table}\ntable {family} {table} {{\n{sets}"
        f" chain peers {{\n  type filter hook {hook} priority {priority}; policy accept\n{rules} }}\n}}\n"
    )


def farewell(netns: Netns, connections: Iterable[Connection]) -> int:
    """Make the peers of ended connections notice, from the namespace that has their local address.

    Returns how many could be asked. Raises NetworkError if the namespace cannot be entered.
    """
    n_sent = 0
    for one in sorted(set(connections), key=str):
        with contextlib.suppress(OSError):  # no route to it, or the address is not here
            _ask(netns, one)
            n_sent += 1
    return n_sent


def _ask(netns: Netns, one: Connection) -> None:
    family = socket.AF_INET if one.version == 4 else socket.AF_INET6
    with netns.inside():
        raw = socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_TCP)
    with raw:
        segment = struct.pack(
            "!HHIIBBHHH",
            one.local_port,
            one.remote_port,
            int.from_bytes(os.urandom(4), "big"),
            0,
            5 << 4,  # 20 bytes of header
            _SYN,
            1024,
            0,
            0,
        )
        if family == socket.AF_INET:
            sum_ = checksum(_pseudo_header(one, len(segment)) + segment)
            segment = segment[:_CHECKSUM_AT] + struct.pack("!H", sum_) + segment[_CHECKSUM_AT + 2 :]
        else:
            raw.setsockopt(socket.IPPROTO_IPV6, _IPV6_CHECKSUM, _CHECKSUM_AT)
        raw.bind((one.local, 0))
        raw.sendto(segment, (one.remote, 0))


def _pseudo_header(one: Connection, n_bytes: int) -> bytes:
    ends = ipaddress.IPv4Address(one.local).packed + ipaddress.IPv4Address(one.remote).packed
    return ends + struct.pack("!BBH", 0, socket.IPPROTO_TCP, n_bytes)


def checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071)."""
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
