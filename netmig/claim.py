"""An address on the wire: has somebody got it, and where is it now?

Both are matters of whole frames on packet sockets, which the firewall does not see: a namespace that is held
can announce itself. Frames that announce a pod must leave by the pod's own interface: only so does the bridge
learn on the right port.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import struct
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from netmig.errors import NetworkError

if TYPE_CHECKING:
    from netmig.ns import Netns

_ETH_P_ALL = 3
_ARP = b"\x08\x06"
_IPV6 = b"\x86\xdd"
_BROADCAST = b"\xff" * 6
_ALL_NODES, _ALL_MLD_ROUTERS = "ff02::1", "ff02::16"
_SOLICITATION, _ADVERTISEMENT = 135, 136  # ICMPv6 types, RFC 4861
_REPORT, _CHANGE_TO_EXCLUDE = 143, 4  # a message and a record of MLDv2, RFC 3810
_ROUTER_ALERT = b"\x3a\x00\x05\x02\x00\x00\x01\x00"  # hop-by-hop options, then ICMPv6
_OUTGOING = 4  # PACKET_OUTGOING: our own frames come back to us
_MAX_FRAME = 2048
_MAX_QUEUED = 4096  # frames: more than a socket keeps for us


class Announced(Protocol):
    """An address of a pod and the interface that has it, as `netmig.identity.Address` is one."""

    @property
    def ip(self) -> str: ...
    @property
    def ifname(self) -> str: ...
    @property
    def mac(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Somebody has an address. mac: who answered for it."""

    ip: str
    mac: str

    def __str__(self) -> str:
        return f"address {self.ip} is in use by {self.mac}"


def probe(
    host: Netns,
    bridge: str,
    addresses: Collection[str],
    own_macs: Iterable[str] = (),
    *,
    n_probes: int = 3,
    interval_s: float = 0.1,
) -> list[Conflict]:
    """Ask a segment whether somebody has one of these addresses.

    ARP probes (RFC 5227) and neighbour solicitations of duplicate address detection (RFC 4862), with short
    timers and an unspecified sender, so that nobody's cache changes. Somebody else who probes for the same
    address at the same time counts as its owner. The kernel of a frozen pod answers too.

    bridge: the device of `host` on the segment. addresses: without prefix lengths. own_macs: answers from
    these do not count (a source that still runs). interval_s: the wait after each question, which begins when
    it is sent, however busy this node is.
    Raises NetworkError if there is no such device, or it is down.
    """
    ips = {ipaddress.ip_address(address) for address in addresses}
    found: dict[str, Conflict] = {}
    with ExitStack() as stack:
        wire = stack.enter_context(_packet_socket(host, bridge, _ETH_P_ALL))
        me: bytes = wire.getsockname()[4]
        own = {_mac(text) for text in own_macs} | {me}
        questions = [_question(ip, me) for ip in ips]
        asked = n_late = 0
        due = time.monotonic()
        while len(found) < len(ips):
            now = time.monotonic()
            late = now >= due
            if late and asked < n_probes:
                for frame in questions:
                    _send(wire, frame, bridge)
                asked += 1
                due = time.monotonic() + interval_s
                continue
            # On a busy node, what has come in time may not have been read then.
            if not select.select([wire], [], [], max(0.0, due - now))[0]:
                if late:
                    break
                continue
            n_late += late
            if n_late > _MAX_QUEUED:
                break
            frame, source = wire.recvfrom(_MAX_FRAME)
            claim = _claim(frame) if source[2] != _OUTGOING else None
            if claim is not None and claim[0] in ips and claim[1] not in own:
                ip = str(claim[0])
                found[ip] = Conflict(ip=ip, mac=claim[1].hex(":"))
    return sorted(found.values(), key=lambda conflict: conflict.ip)


class Announcer:
    """Says where a pod's addresses are: gratuitous ARP as request and as reply, and neighbour advertisements.

    Also what groups its interfaces are in, those of its IPv6 addresses above all: the kernel says that only
    once, when an address comes, and nobody heard it. Switches that listen for it would keep what others ask
    about these addresses from the pod until the next general query, 125 s at worst.

    Open it beforehand: `send` then takes 0.1 ms. Closing takes around 10 ms (the kernel waits until nobody
    looks at the sockets any more), so do it when the pod runs. Usable as a context manager.
    """

    def __init__(self, netns: Netns, addresses: Iterable[Announced]) -> None:
        """Open the pod's interfaces in its namespace. Raises NetworkError if one is missing.

        An interface without a MAC has no neighbours that would want to know.
        """
        frames: dict[str, list[bytes]] = {}
        for address in addresses:
            if not address.mac:
                continue
            mac = _mac(address.mac)
            if address.ifname not in frames:
                frames[address.ifname] = [_report(one, mac) for one in _groups(netns, address.ifname)]
            frames[address.ifname] += _announcements(address.ip, mac)
        self._sockets = _open_all(netns, frames)

    def send(self) -> int:
        """Send every announcement once; returns how many. Raises NetworkError where an interface is down."""
        return _send_all(self._sockets)

    def close(self) -> None:
        """Close the sockets; again does no harm."""
        while self._sockets:
            self._sockets.pop()[0].close()

    def __enter__(self) -> Announcer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def announce_on(host: Netns, device: str, addresses: Iterable[str]) -> int:
    """Tell a device's segment that these addresses are behind the device itself, which answers by proxy.

    For the routed mode: the pods that stay on the source reach the one that left through their own bridge.
    host: the namespace of the device. Returns how many frames were sent. Raises NetworkError.
    """
    with _packet_socket(host, device, 0) as wire:
        mac: bytes = wire.getsockname()[4]
        return _send_all([(wire, device, [f for ip in addresses for f in _announcements(ip, mac)])])


_Open = tuple[socket.socket, str, list[bytes]]


def _open_all(netns: Netns, frames: dict[str, list[bytes]]) -> list[_Open]:
    with ExitStack() as stack:
        opened = [
            (stack.enter_context(_packet_socket(netns, ifname, 0)), ifname, todo)
            for ifname, todo in frames.items()
        ]
        stack.pop_all()
    return opened


def _send_all(sockets: Iterable[_Open]) -> int:
    n_sent = 0
    for wire, device, frames in sockets:
        for frame in frames:
            _send(wire, frame, device)
            n_sent += 1
    return n_sent


def _send(wire: socket.socket, frame: bytes, device: str) -> None:
    try:
        wire.send(frame)
    except OSError as error:
        raise NetworkError(f"could not send on interface '{device}': {error.strerror}; set it up") from error


def _packet_socket(netns: Netns, device: str, protocol: int) -> socket.socket:
    """A socket on one device. protocol: what it receives; 0 for nothing."""
    with netns.inside():
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    try:
        # Named only now, so that no frame of another device is ever queued.
        wire.bind((device, protocol))
    except OSError as error:
        wire.close()
        raise NetworkError(
            f"could not open interface '{device}' of network namespace '{netns.path}': {error.strerror}; "
            "name one that it has"
        ) from error
    return wire


def _announcements(ip: str, mac: bytes) -> list[bytes]:
    address = ipaddress.ip_address(ip)
    if address.version == 4:
        # RFC 5227 announces with a request; some devices learn from replies alone.
        return [
            _arp(1, mac, address.packed, bytes(6), address.packed),
            _arp(2, mac, address.packed, mac, address.packed),
        ]
    # Override, and the option with our link-layer address: RFC 4861, 7.2.6.
    body = struct.pack("!BBHI", _ADVERTISEMENT, 0, 0, 0x20000000) + address.packed + b"\x02\x01" + mac
    return [_icmpv6(mac, address.packed, _ALL_NODES, body)]


def _groups(netns: Netns, device: str) -> list[bytes]:
    """The IPv6 groups that an interface is in, without those that nobody reports."""
    with netns.inside():
        try:
            lines = Path("/proc/thread-self/net/igmp6").read_text().splitlines()
        except FileNotFoundError:  # a kernel without IPv6
            return []
    listed = [bytes.fromhex(fields[2]) for fields in map(str.split, lines) if fields[1] == device]
    # RFC 3810, 6: all nodes, and scopes that do not leave the interface.
    return [one for one in listed if one[1] & 0xF > 1 and one != ipaddress.IPv6Address(_ALL_NODES).packed]


def _report(group: bytes, mac: bytes) -> bytes:
    """That an interface is in a group: from nowhere, since its link-local address may still be on trial."""
    record = struct.pack("!BBH", _CHANGE_TO_EXCLUDE, 0, 0) + group
    body = struct.pack("!BBHHH", _REPORT, 0, 0, 0, 1) + record
    return _icmpv6(mac, bytes(16), _ALL_MLD_ROUTERS, body, _ROUTER_ALERT)


def _question(ip: ipaddress.IPv4Address | ipaddress.IPv6Address, mac: bytes) -> bytes:
    if ip.version == 4:
        return _arp(1, mac, bytes(4), bytes(6), ip.packed)
    group = ipaddress.IPv6Address(b"\xff\x02" + bytes(9) + b"\x01\xff" + ip.packed[13:])
    # The nonce keeps our own question, should it come back, from being taken for a rival's: RFC 7527.
    body = struct.pack("!BBHI", _SOLICITATION, 0, 0, 0) + ip.packed + b"\x0e\x01" + os.urandom(6)
    return _icmpv6(mac, bytes(16), str(group), body)


def _claim(frame: bytes) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, bytes] | None:
    """The address that a frame's sender has, or probes for, and its MAC."""
    if frame[12:14] == _ARP and len(frame) >= 42:
        sender = frame[28:32]
        return ipaddress.IPv4Address(sender if any(sender) else frame[38:42]), frame[22:28]
    if frame[12:14] != _IPV6 or len(frame) < 78 or frame[20] != socket.IPPROTO_ICMPV6:
        return None
    target = ipaddress.IPv6Address(frame[62:78])
    if frame[54] == _ADVERTISEMENT:
        return target, frame[80:86] if len(frame) >= 86 and frame[78] == 2 else frame[6:12]
    if frame[54] == _SOLICITATION and not any(frame[22:38]):
        return target, frame[6:12]
    return None


def _arp(operation: int, mac: bytes, sender: bytes, target_mac: bytes, target: bytes) -> bytes:
    head = struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation)
    return _BROADCAST + mac + _ARP + head + mac + sender + target_mac + target


def _icmpv6(mac: bytes, source: bytes, group: str, body: bytes, options: bytes = b"") -> bytes:
    """options: hop-by-hop, which messages of MLD have, and no hop farther than the link."""
    target = ipaddress.IPv6Address(group).packed
    pseudo = source + target + struct.pack("!I3xB", len(body), socket.IPPROTO_ICMPV6)
    body = body[:2] + struct.pack("!H", _checksum(pseudo + body)) + body[4:]
    following, n_hops = (socket.IPPROTO_HOPOPTS, 1) if options else (socket.IPPROTO_ICMPV6, 255)
    head = struct.pack("!IHBB", 6 << 28, len(options) + len(body), following, n_hops)
    return b"\x33\x33" + target[12:] + mac + _IPV6 + head + source + target + options + body


def _checksum(data: bytes) -> int:
    """RFC 1071; `data` has an even length here."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))
