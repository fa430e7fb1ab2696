"""Make a namespace be an identity: what differs is changed, and what is the same is not touched.

The same function applies an identity and goes back to the one before it, so an undo needs no list of small
steps, and can itself be cut off and repeated. Host ends stay out of their bridges meanwhile: nobody is
reached, and nothing that the kernel says by itself gets out.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from netmig import messages, nft, queues, rtnl, sysctls
from netmig.capture import FAMILIES, IFF_UP, capture, is_lock
from netmig.errors import NetworkError
from netmig.identity import (
    NUD_STALE,
    SCOPE_LINK,
    HostEnd,
    Identity,
    Link,
    LinkAddress,
    Route,
    diff,
    without_links,
)
from netmig.ns import Netns

Pairs = dict[str, Link]
"""Names of the wanted interfaces, and the present ones that are to become them."""

_NONE = "1"  # addr_gen_mode: the kernel makes no link-local address of its own


def pair_by_name(wanted: Identity, now: Identity) -> Pairs:
    """An interface that has the name already; else the only veths without a counterpart, in their order."""
    present = {link.name: link for link in now.links}
    pairs = {link.name: present[link.name] for link in wanted.links if link.name in present}
    left = [link for link in now.links if link.name not in pairs and link.kind == "veth"]
    open_ = [link for link in wanted.links if link.name not in pairs and link.kind == "veth"]
    if len(left) == len(open_):
        pairs |= {want.name: have for want, have in zip(open_, left, strict=True)}
    return pairs


def pair_by_number(wanted: Identity, now: Identity) -> Pairs:
    """The same interfaces as before, whatever they are called now."""
    present = {link.index: link for link in now.links}
    return {link.name: present[link.index] for link in wanted.links if link.index in present}


def shape(
    netns: Netns, host: Netns, wanted: Identity, now: Identity, pairs: Pairs, learned: bool
) -> list[str]:
    """Make a namespace be `wanted`; its host ends are up and in no bridge when this returns.

    now: what it is. learned: install learned neighbours, too. Interfaces that are in no pair are removed;
    `check` has ruled those out but for the ones that this call made.
    Returns what this kernel cannot hold, a sentence each. Raises OSError and NetworkError.
    """
    work = _Work(netns, host, wanted, now, pairs)
    with netns.ipr() as ipr, host.ipr() as node:
        work.unplug(node)
        work.general_sysctls()
        work.links(ipr, node)
        work.link_sysctls(ipr)
        work.addresses(ipr)
        work.let_addresses_come(ipr)
        work.routes(ipr)
        work.rules(ipr)
        work.neighbours(ipr, learned)
    work.firewall()
    return work.warnings


def go_back(netns: Netns, host: Netns, before: Identity) -> None:
    """Make a namespace what it was, bridges included; interfaces that somebody removed since stay away.

    Raises OSError and NetworkError.
    """
    now = capture(netns, host)
    pairs = pair_by_number(before, now)
    before = without_links(before, {link.name for link in before.links} - pairs.keys())
    if len(pairs) != len(now.links) or diff(before, now):
        shape(netns, host, before, now, pairs, learned=True)
    with host.ipr() as node:
        for link in before.links:
            if link.host is not None and link.host.bridge is not None:
                plug(node, link.host.name, link.host.bridge, link.host.port)


def plug(node: Any, end: str, bridge: str | None, port: dict[str, int]) -> None:
    """Put a host end into a bridge, or into none. Raises OSError."""
    index = index_of(node, end)
    if bridge is None:
        rtnl.link(node, "set", index=index, master=0)
        return
    rtnl.link(node, "set", index=index, master=index_of(node, bridge))
    if port:
        rtnl.port(node, index, port)


def index_of(ipr: Any, name: str) -> int:
    """The number of an interface. Raises OSError if there is none of that name."""
    found = rtnl.link_named(ipr, name)
    if found is None:
        raise OSError(errno.ENODEV, f"there is no interface {name}")
    return int(found.header["index"])


def _is_of_a_link(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 5 and parts[2] in {"conf", "neigh"} and parts[3] not in {"all", "default"}


class _Work:
    def __init__(self, netns: Netns, host: Netns, wanted: Identity, now: Identity, pairs: Pairs) -> None:
        self.netns, self.host = netns, host
        self.wanted, self.now, self.pairs = wanted, now, pairs
        self.indexes: dict[str, int] = {}
        self.warnings: list[str] = []

    def unplug(self, node: Any) -> None:
        for link in self.pairs.values():
            if link.host is not None and link.host.bridge is not None:
                plug(node, link.host.name, None, {})

    def general_sysctls(self) -> None:
        names = {name for name in self.wanted.sysctls | self.now.sysctls if not _is_of_a_link(name)}
        # What holds for all interfaces at once is written before what a single one may say otherwise.
        for name in sorted(names, key=lambda name: ("/default/" in name, "/all/" in name, name)):
            self._set(name)

    def links(self, ipr: Any, node: Any) -> None:
        for link in self.now.links:
            if link not in self.pairs.values():
                rtnl.link(ipr, "del", index=link.index)
        self._rename(ipr)
        for link in self.wanted.links:
            have = self.pairs.get(link.name)
            index = have.index if have is not None else self._make(ipr, node, link)
            self.indexes[link.name] = index
            if index != link.index:
                self.warnings.append(f"{link.name} has number {index} here and had {link.index}")
            self._attributes(ipr, link, replace(have, name=link.name) if have else None, index)

    def _rename(self, ipr: Any) -> None:
        """By way of names that nobody has, since two interfaces may be about to swap theirs."""
        changing = [(have.index, name) for name, have in self.pairs.items() if have.name != name]
        for index, _ in changing:
            rtnl.link(ipr, "set", index=index, flags=0, change=IFF_UP)
            rtnl.link(ipr, "set", index=index, ifname=f"torpor{index}")
        for index, name in changing:
            rtnl.link(ipr, "set", index=index, ifname=name)

    def _make(self, ipr: Any, node: Any, link: Link) -> int:
        end = link.host
        if link.kind != "veth" or end is None:
            raise NetworkError(
                f"could not make interface '{link.name}' of kind {link.kind}: only a veth with an end on the "
                "node can be made; let the network plugin make it, and adopt it"
            )
        # A bridge that nobody gave a MAC takes the lowest of its ports' MACs, and gives it up with the port:
        # its other pods would not find their gateway for 40 s. The highest that a port can have is not taken.
        mac = end.mac if end.bridge is None else f"fe{end.mac[2:]}"
        taken = {one.header["index"] for one in rtnl.links(ipr)}
        number = {} if link.index in taken else {"index": link.index}
        rtnl.link(
            ipr,
            "add",
            kind="veth",
            ifname=link.name,
            address=link.mac,
            mtu=link.mtu,
            txqlen=link.queue_length,
            peer={
                "ifname": end.name,
                "address": mac,
                "mtu": max(end.mtu, self._mtu_of(node, end.bridge)),
                "txqlen": end.queue_length,
                "net_ns_fd": self.host.fileno(),
            },
            **number,
        )
        self._host_end(node, end)
        return index_of(ipr, link.name)

    def _mtu_of(self, node: Any, bridge: str | None) -> int:
        """A port that carries less than its bridge would make the whole bridge carry less."""
        found = rtnl.link_named(node, bridge) if bridge is not None else None
        return int(found.attributes["IFLA_MTU"]) if found is not None else 0

    def _host_end(self, node: Any, end: HostEnd) -> None:
        index = index_of(node, end.name)
        if end.alias is not None:
            rtnl.link(node, "set", index=index, ifalias=end.alias)
        with contextlib.suppress(NetworkError):  # a kernel without IPv6
            # Its own address may be the pod's gateway, and one on trial answers nobody for a second or two.
            self.host.set_sysctl(f"net/ipv6/conf/{end.name}/accept_dad", "0")
        rtnl.link(node, "set", index=index, flags=IFF_UP, change=IFF_UP)
        queues.replay(self.host, index, end.queues)

    def _attributes(self, ipr: Any, link: Link, have: Link | None, index: int) -> None:
        wanted: dict[str, Any] = {"mtu": link.mtu, "txqlen": link.queue_length, "group": link.group}
        wanted |= {"ifalias": link.alias or ""}
        if link.kind != "loopback":
            wanted["address"] = link.mac
        present: dict[str, Any] = {}
        if have is not None:
            present = {"mtu": have.mtu, "txqlen": have.queue_length, "group": have.group}
            present |= {"ifalias": have.alias or "", "address": have.mac}
        else:
            present = {
                "mtu": link.mtu,
                "txqlen": link.queue_length,
                "group": 0,
                "ifalias": "",
                "address": link.mac,
            }
        for name, value in wanted.items():
            if present[name] != value:
                rtnl.link(ipr, "set", index=index, **{name: value})
        others = have.other_names if have is not None else ()
        for name in others:
            if name not in link.other_names:
                rtnl.link(ipr, "property_del", index=index, altname=name)
        for name in link.other_names:
            if name not in others:
                rtnl.link(ipr, "property_add", index=index, altname=name)
        present_queues = have.queues if have is not None else ()
        if present_queues != link.queues:
            queues.clear(self.netns, index, present_queues)
            queues.replay(self.netns, index, link.queues)

    def link_sysctls(self, ipr: Any) -> None:
        """Those of single interfaces, and only then up with them: addresses come as the settings say."""
        was = {have.name: name for name, have in self.pairs.items()}
        names = {name for name in self.wanted.sysctls if _is_of_a_link(name)}
        for name in filter(_is_of_a_link, self.now.sysctls):
            parts = name.split("/")
            if parts[3] in was:
                names.add("/".join((*parts[:3], was[parts[3]], parts[4])))
        for name in sorted(names):
            if not name.endswith("/addr_gen_mode"):
                self._set(name)
        for link in self.wanted.links:
            if link.kind != "loopback":
                self._address_mode(link.name, _NONE)
            rtnl.link(ipr, "set", index=self.indexes[link.name], flags=link.flags, change=_FLAGS)

    def let_addresses_come(self, ipr: Any) -> None:
        """The kernel may make link-local addresses again, of which it makes one at once."""
        for link in self.wanted.links:
            if link.kind != "loopback":
                name = f"net/ipv6/conf/{link.name}/addr_gen_mode"
                self._address_mode(link.name, self._value(name) or "0")
        self.addresses(ipr)

    def _address_mode(self, interface: str, mode: str) -> None:
        with contextlib.suppress(NetworkError):  # a kernel without IPv6
            name = f"net/ipv6/conf/{interface}/addr_gen_mode"
            if self.netns.sysctl(name) != mode:
                self.netns.set_sysctl(name, mode)

    def addresses(self, ipr: Any) -> None:
        for link in self.wanted.links:
            for family in FAMILIES:
                self._addresses_of(ipr, link.name, family)

    def _addresses_of(self, ipr: Any, interface: str, family: int) -> None:
        index = self.indexes[interface]
        names = {number: name for name, number in self.indexes.items()}
        listed = [
            messages.address_from(one, names) for one in rtnl.addresses(ipr) if one.header["index"] == index
        ]
        present = [one for one in listed if messages.family_of(one.ip) == family]
        ours = [one for one in self.wanted.addresses if one.interface == interface]
        wanted = [one for one in ours if messages.family_of(one.ip) == family]
        if _timeless(present) == _timeless(wanted):
            return
        keep = family == FAMILIES[1]  # of IPv4 the first of a network is its primary: their order is kept
        for one in present:
            if not (keep and one in wanted):
                with contextlib.suppress(OSError):  # a secondary address may have gone with its primary
                    rtnl.change(ipr, "address", messages.address_to(one, index), "delete")
        # The kernel lists IPv6 addresses of a scope with the latest first.
        for one in reversed(wanted) if keep else wanted:
            if not (keep and one in present):
                self._add_address(ipr, one, index)

    def _add_address(self, ipr: Any, one: LinkAddress, index: int) -> None:
        six = ":" in one.ip
        try:
            rtnl.change(ipr, "address", messages.address_to(one, index), "replace" if six else "create")
        except OSError as error:
            if six and one.scope == SCOPE_LINK and error.errno in {errno.EACCES, errno.EOPNOTSUPP}:
                self.warnings.append(f"{one.ip} of {one.interface} is left out: IPv6 is off here")
                return
            raise OSError(error.errno, f"address {one.ip} on {one.interface}: {error.strerror}") from error

    def routes(self, ipr: Any) -> None:
        names = {number: name for name, number in self.indexes.items()}
        listed = [one for family in FAMILIES for one in rtnl.routes(ipr, family)]
        present = [route for one in listed if (route := messages.route_from(one, names)) is not None]
        for route in present:
            if route not in self.wanted.routes:
                rtnl.change(ipr, "route", messages.route_to(route, self.indexes), "delete")
        # Those on the link first: the kernel asks of each gateway that it can be reached.
        far = ("RTA_GATEWAY", "RTA_VIA", "RTA_MULTIPATH")
        for route in sorted(
            self.wanted.routes, key=lambda route: any(name in route.attributes for name in far)
        ):
            if route not in present:
                self._add_route(ipr, route)

    def _add_route(self, ipr: Any, route: Route) -> None:
        try:
            rtnl.change(ipr, "route", messages.route_to(route, self.indexes), "append")
        except FileExistsError:
            return
        except OSError as error:
            raise OSError(error.errno, f"route to {route.destination}: {error.strerror}") from error

    def rules(self, ipr: Any) -> None:
        present = [messages.rule_from(one) for family in FAMILIES for one in rtnl.rules(ipr, family)]
        for rule in self.wanted.rules:
            if rule not in present:
                rtnl.change(ipr, "rule", messages.rule_to(rule), "create")
        for rule in present:
            if rule not in self.wanted.rules:
                rtnl.change(ipr, "rule", messages.rule_to(rule), "delete")

    def neighbours(self, ipr: Any, learned: bool) -> None:
        names = {number: name for name, number in self.indexes.items()}
        listed = [one for family in FAMILIES for one in rtnl.neighbours(ipr, family)]
        present = [near for one in listed if (near := messages.neighbour_from(one, names)) is not None]
        for one in present:
            if one not in self.wanted.neighbours and one.state != NUD_STALE:
                message = messages.neighbour_to(one, self.indexes[one.interface])
                rtnl.change(ipr, "neighbour", message, "delete")
        for one in self.wanted.neighbours:
            if one not in present and (learned or one.state != NUD_STALE):
                message = messages.neighbour_to(one, self.indexes[one.interface])
                rtnl.change(ipr, "neighbour", message, "replace")

    def firewall(self) -> None:
        """All tables at once, in one transaction; locks are left alone."""
        if diff(Identity(nftables=self.wanted.nftables), Identity(nftables=self.now.nftables)):
            tables = [entry for entry in self.now.nftables if "table" in entry and not is_lock(entry)]
            commands = [{"delete": entry} for entry in tables]
            commands += [{"add": entry} for entry in self.wanted.nftables if not is_lock(entry)]
            nft.run(self.netns, {"nftables": commands})

    def _value(self, name: str) -> str | None:
        if name in self.wanted.sysctls:
            return self.wanted.sysctls[name]
        return sysctls.default(name, {**sysctls.baseline(), **self.wanted.sysctls})

    def _set(self, name: str) -> None:
        value = self._value(name)
        if value is None:
            return
        try:
            if self.netns.sysctl(name) != value:
                self.netns.set_sysctl(name, value)
        except NetworkError as error:
            self.warnings.append(str(error))


_FLAGS = 0x1 | 0x80 | 0x100 | 0x200 | 0x1000


def _timeless(addresses: Iterable[LinkAddress]) -> list[LinkAddress]:
    """Addresses without the seconds that they have left."""
    return [replace(one, lifetime=(0, 0) if one.lifetime else None) for one in addresses]
