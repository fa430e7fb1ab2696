"""One network segment on the real kernel: a node with a bridge, and namespaces that are plugged into it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from netmig import claim
from netmig.ns import Netns
from tests.support.network import until_up

BRIDGE = "br0"
NODE4, NODE6 = "10.77.0.1", "fd77::1"


@dataclass(frozen=True, kw_only=True)
class Member:
    """A namespace on the segment, and the addresses that its eth0 has."""

    netns: Netns
    port: str
    ip4: str
    ip6: str
    mac: str

    @property
    def addresses(self) -> tuple[str, str]:
        return (self.ip4, self.ip6)


@dataclass(frozen=True, kw_only=True)
class At:
    """What an announcement needs to know of an address."""

    ip: str
    mac: str
    ifname: str = "eth0"


class Segment:
    """A node with a bridge, in a namespace of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made: list[Netns] = []
        self.node = self._create("node")
        with self.node.ipr() as ipr:
            ipr.link("add", ifname=BRIDGE, kind="bridge", address="02:77:00:00:00:01")
            index = ipr.link_lookup(ifname=BRIDGE)[0]
            self.node.set_sysctl(f"net/ipv6/conf/{BRIDGE}/accept_dad", "0")
            ipr.link("set", index=index, state="up")
            ipr.addr("add", index=index, address=NODE4, prefixlen=24)
            ipr.addr("add", index=index, address=NODE6, prefixlen=64)

    def _create(self, name: str) -> Netns:
        netns = Netns.create(self._path / name)
        self._made.append(netns)
        with netns.ipr() as ipr:
            ipr.link("set", index=1, state="up")
        return netns

    def add(self, name: str, number: int, *, mac: int = 0, plugged: bool = True) -> Member:
        """A namespace whose eth0 has 10.77.0.NUMBER and fd77::NUMBER; mac: another number, for its MAC."""
        netns = self._create(name)
        address = f"02:77:00:00:00:{mac or number:02x}"
        with netns.ipr() as ipr, self.node.ipr() as node:
            peer = {"ifname": name, "net_ns_fd": self.node.fileno()}
            ipr.link("add", ifname="eth0", kind="veth", address=address, peer=peer)
            netns.set_sysctl("net/ipv6/conf/eth0/accept_dad", "0")
            index = ipr.link_lookup(ifname="eth0")[0]
            port = node.link_lookup(ifname=name)[0]
            if plugged:
                node.link("set", index=port, master=node.link_lookup(ifname=BRIDGE)[0])
            node.link("set", index=port, state="up")
            ipr.link("set", index=index, state="up")
            ipr.addr("add", index=index, address=f"10.77.0.{number}", prefixlen=24)
            ipr.addr("add", index=index, address=f"fd77::{number:x}", prefixlen=64)
            until_up(ipr, index)
            until_up(node, port)
        return Member(netns=netns, port=name, ip4=f"10.77.0.{number}", ip6=f"fd77::{number:x}", mac=address)

    def plug(self, member: Member) -> None:
        """Put the member's port into the bridge."""
        with self.node.ipr() as node:
            bridge = node.link_lookup(ifname=BRIDGE)[0]
            node.link("set", index=node.link_lookup(ifname=member.port)[0], master=bridge)

    def unplug(self, member: Member) -> None:
        """Take the member's port out of the bridge."""
        with self.node.ipr() as node:
            node.link("set", index=node.link_lookup(ifname=member.port)[0], master=0)

    def port_of(self, mac: str) -> str | None:
        """The port at which the bridge has learned a MAC."""
        with self.node.ipr() as node:
            for entry in node.fdb("dump"):
                if entry.get("lladdr") == mac and entry.get("master"):
                    return str(next(iter(node.get_links(entry["ifindex"]))).get("ifname"))
        return None

    def close(self) -> None:
        """Remove everything; the node first, so that its ends of the veths go at once."""
        for netns in self._made:
            netns.remove()


@contextmanager
def segment(path: Path) -> Generator[Segment]:
    """A segment that is gone afterwards."""
    path.mkdir(parents=True, exist_ok=True)
    made = Segment(path)
    try:
        yield made
    finally:
        made.close()


def neighbour(netns: Netns, ip: str) -> str | None:
    """The MAC that a namespace's cache has for an address."""
    with netns.ipr() as ipr:
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        for entry in ipr.get_neighbours(family=family):
            if entry.get("dst") == ip and entry.get("lladdr"):
                return str(entry.get("lladdr"))
    return None


def in_netns(netns: Netns, kind: socket.SocketKind, *, ipv6: bool = False) -> socket.socket:
    """A socket of a namespace."""
    with netns.inside():
        return socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, kind)


def until(what: Callable[[], bool], *, timeout_s: float = 20.0) -> float:
    """Wait until something is so; returns the seconds it took."""
    started = time.monotonic()
    while not what():
        if time.monotonic() - started > timeout_s:
            raise AssertionError("it did not come to be in time")
        time.sleep(0.001)
    return time.monotonic() - started


class Sniffer:
    """Every frame that reaches a member from one MAC."""

    def __init__(self, member: Member, mac: str) -> None:
        with member.netns.inside():
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._socket.bind(("eth0", 3))
        self._socket.setblocking(False)
        self._mac = bytes.fromhex(mac.replace(":", ""))

    def frames(self) -> list[bytes]:
        """What came since the last call."""
        found: list[bytes] = []
        while True:
            try:
                frame = self._socket.recv(4096)
            except BlockingIOError:
                return found
            if frame[6:12] == self._mac:
                found.append(frame)

    def __enter__(self) -> Sniffer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def is_neighbour_talk(frame: bytes) -> bool:
    """Is it ARP, or the IPv6 look for a neighbour?"""
    if frame[12:14] == b"\x08\x06":
        return True
    return frame[12:14] == b"\x86\xdd" and frame[20] == socket.IPPROTO_ICMPV6 and frame[54] in (135, 136)


def barrier(asker: Member, asked: Member) -> None:
    """Return when a member has worked off what was sent to it: it answers in order, and this it answers."""
    found = claim.probe(asker.netns, "eth0", [asked.ip4], interval_s=1.0)
    assert [conflict.mac for conflict in found] == [asked.mac]
