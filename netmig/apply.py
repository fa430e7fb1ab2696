"""Give a namespace a pod's identity, connect it, and take all of that back.

The costly part, `apply`, is done while the old pod still runs: afterwards the namespace is complete, and its
host ends are up and in no bridge. `plug` is one request for each. Every step is in the journal before it is
taken.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import Any

from netmig import messages, rtnl
from netmig.capture import capture
from netmig.check import Problem as Problem
from netmig.check import Refused, problems_of
from netmig.check import check as check
from netmig.errors import NetworkError
from netmig.identity import (
    NTF_PROXY,
    NUD_PERMANENT,
    NUD_STALE,
    PROTOCOL_AWAY,
    Address,
    Identity,
    Neighbour,
    Route,
    diff,
)
from netmig.journal import Created, Journal, Plugged, Proxied, Routed, Set, Shaped
from netmig.ns import Netns
from netmig.places import place_of
from netmig.shape import Pairs, index_of, pair_by_name, pair_by_number, shape
from netmig.undo import undo_steps

PROTOCOL = 188
"""Of the routes that torpor makes on a node (RTPROT_*)."""

MAIN = 254
"""The table of those routes (RT_TABLE_MAIN)."""

_LINK = 253


@dataclass(frozen=True, kw_only=True)
class End:
    """A host end: the pod's interface that it belongs to, and the bridge that it is meant for."""

    interface: str
    name: str
    index: int
    bridge: str | None
    port: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A namespace with an identity, and its ends on the node.

    warnings: what this node could not take over, a sentence each.
    """

    netns: Netns
    ends: tuple[End, ...]
    journal: Journal
    warnings: tuple[str, ...] = ()

    def undo(self) -> None:
        """Take back everything in the journal, the last step first. Raises NetworkError."""
        undo_steps(self.journal)


def create(path: Path, journal: Journal) -> Netns:
    """Make a namespace, pinned at a path, that an undo removes. Raises NetworkError."""
    if path.exists():
        raise NetworkError(f"could not create network namespace '{path}': it is there; choose another path")
    journal.record(Created(path=str(path)))
    return Netns.create(path)


def apply(
    identity: Identity,
    netns: Netns,
    host: Netns,
    *,
    adopt: bool,
    neighbours: bool = True,
    routed: bool = False,
    journal: Journal | None = None,
) -> Applied:
    """Make a namespace be the identity; its host ends are up and in no bridge afterwards.

    adopt: a network plugin has set the namespace up: its interfaces are renamed and readdressed, and their
    host ends stay what they are. Otherwise the namespace must be empty, and veths are made.
    neighbours: learned ones, too; only right where the pod stays on its segment.
    routed: the host ends are meant for no bridge (see `plug_routed`).
    Done again, it changes nothing. Raises Refused before anything is touched, else NetworkError, undone.
    """
    now = capture(netns, host)
    if problems := problems_of(identity, now, host, adopt=adopt, routed=routed):
        raise Refused(problems, netns)
    journal = Journal() if journal is None else journal
    pairs = pair_by_name(identity, now)
    if len(now.links) > 1 and not diff(identity, now):
        return Applied(netns=netns, ends=_ends(netns, host, identity, pairs), journal=journal)
    steps = len(journal.steps)
    journal.record(Shaped(netns=place_of(netns), host=place_of(host), before=now))
    try:
        warnings = shape(netns, host, identity, now, pairs, learned=neighbours)
        ends = _ends(netns, host, identity, pairs)
    except BaseException as error:
        undo_steps(journal, keep=steps)
        if isinstance(error, OSError):
            raise _failed(netns, error) from error
        raise
    return Applied(netns=netns, ends=ends, journal=journal, warnings=tuple(warnings))


def attach(netns: Netns, host: Netns, journal: Journal | None = None) -> Applied:
    """The same for a pod that runs, so that it can be unplugged and plugged again. Raises NetworkError."""
    now = capture(netns, host)
    for link in now.links:
        if link.host is not None and link.host.by_vlan:
            raise NetworkError(
                f"could not prepare to unplug network namespace '{netns.path}': bridge '{link.host.bridge}' "
                "filters by VLAN, which a port forgets; use a bridge without"
            )
    journal = Journal() if journal is None else journal
    return Applied(netns=netns, ends=_ends(netns, host, now, pair_by_number(now, now)), journal=journal)


def plug(applied: Applied, host: Netns) -> None:
    """Put the host ends into their bridges: from now on others reach the pod. Raises NetworkError."""
    _switch(applied, host, {end.name: end.bridge for end in applied.ends})


def unplug(applied: Applied, host: Netns) -> None:
    """Take the host ends out of their bridges: nobody reaches the pod. Raises NetworkError."""
    _switch(applied, host, dict.fromkeys((end.name for end in applied.ends), None))


def plug_routed(applied: Applied, host: Netns, addresses: Iterable[Address]) -> None:
    """Let the node route to the pod, and answer for its gateways and neighbours at the host ends.

    addresses: those of the pod that others use (`identity.global_addresses`). Raises NetworkError.
    """
    wanted = tuple(addresses)
    steps = len(applied.journal.steps)
    try:
        with host.ipr() as node:
            for end in applied.ends:
                ours = [one for one in wanted if one.ifname == end.interface]
                answer_for_all(host, end.name, applied.journal, {one.version for one in ours})
                gateways = _gateways(applied.netns, end.interface)
                for gateway in gateways:
                    _proxy(node, host, end.name, gateway, applied.journal)
                _lead_out(applied.netns, end.interface, gateways, ours, applied.journal)
                for one in ours:
                    scope = _LINK if one.version == 4 else 0
                    route = _route(one.ip, {"RTA_OIF": end.name}, scope=scope)
                    _replace(node, host, route, {end.name: end.index}, applied.journal)
                    _introduce(node, end, one)
    except BaseException as error:
        undo_steps(applied.journal, keep=steps)
        if isinstance(error, OSError):
            raise _failed(host, error) from error
        raise


def detour(
    host: Netns,
    addresses: Iterable[Address],
    via: str,
    *,
    bridge: str | None = None,
    journal: Journal | None = None,
) -> Journal:
    """On the node that a pod has left: send on what still arrives for it.

    via: the new node's address, of the family of the addresses. bridge: of the old pod, whose neighbours are
    to find the node at its address; announce it there afterwards.
    Returns the journal. Raises NetworkError.
    """
    journal = Journal() if journal is None else journal
    steps = len(journal.steps)
    wanted = tuple(addresses)
    gateway = str(ipaddress.ip_address(via))  # as the kernel writes it
    for one in wanted:
        if one.version != ipaddress.ip_address(via).version:
            raise NetworkError(
                f"could not route address '{one.ip}' by way of {via}: it is of the other family; "
                "name an address of the new node for each family"
            )
    try:
        with host.ipr() as node:
            if bridge is not None:
                answer_for_all(host, bridge, journal, {one.version for one in wanted})
            for one in wanted:
                if bridge is not None and one.version == 6:
                    _proxy(node, host, bridge, one.ip, journal)
                _replace(node, host, _route(one.ip, {"RTA_GATEWAY": gateway}), {}, journal)
    except BaseException as error:
        undo_steps(journal, keep=steps)
        if isinstance(error, OSError):
            raise _failed(host, error) from error
        raise
    return journal


def answer_for_all(host: Netns, interface: str, journal: Journal, versions: set[int]) -> None:
    """Let a node answer on an interface for whatever it has a route to, without the usual delay, and forward
    what comes in there: of IPv4 a new interface does that only where the node's defaults say so, too.

    versions: 4, 6. Raises NetworkError.
    """
    wanted: dict[str, str] = {}
    if 4 in versions:
        wanted[f"net/ipv4/conf/{interface}/forwarding"] = "1"
        wanted[f"net/ipv4/conf/{interface}/proxy_arp"] = "1"
        wanted[f"net/ipv4/neigh/{interface}/proxy_delay"] = "0"
        wanted[f"net/ipv4/conf/{interface}/rp_filter"] = "0"
    if 6 in versions:
        wanted[f"net/ipv6/conf/{interface}/proxy_ndp"] = "1"
        wanted[f"net/ipv6/neigh/{interface}/proxy_delay"] = "0"
    for name, value in wanted.items():
        before = host.sysctl(name)
        if before != value:
            journal.record(Set(host=place_of(host), name=name, before=before))
            host.set_sysctl(name, value)


def _switch(applied: Applied, host: Netns, bridges: dict[str, str | None]) -> None:
    steps = len(applied.journal.steps)
    try:
        with host.ipr() as node:
            indexes = {name: index_of(node, name) for name in {*bridges.values()} if name is not None}
            names = {index: name for name, index in indexes.items()}
            for end in applied.ends:
                (message,) = rtnl.links(node, end.index)
                master = message.attributes.get("IFLA_MASTER", 0)
                bridge = bridges[end.name]
                if master == (indexes[bridge] if bridge is not None else 0):
                    continue
                before = names.get(master) or _name(node, master)
                applied.journal.record(
                    Plugged(host=place_of(host), end=end.name, index=end.index, before=before, port=end.port)
                )
                rtnl.link(node, "set", index=end.index, master=indexes[bridge] if bridge is not None else 0)
                if bridge is not None and end.port:
                    rtnl.port(node, end.index, end.port)
    except BaseException as error:
        undo_steps(applied.journal, keep=steps)
        if isinstance(error, OSError):
            raise _failed(host, error) from error
        raise


def _name(node: Any, index: int) -> str | None:
    return str(rtnl.links(node, index)[0].attributes["IFLA_IFNAME"]) if index else None


def _ends(netns: Netns, host: Netns, identity: Identity, pairs: Pairs) -> tuple[End, ...]:
    """An adopted interface's end stays as the plugin made it; a new one's is as at the old node."""
    wanted = {link.name: link for link in identity.links}
    ends: list[End] = []
    with netns.ipr() as ipr, host.ipr() as node:
        for one in rtnl.links(ipr):
            name = str(one.attributes["IFLA_IFNAME"])
            link = pairs.get(name) or wanted.get(name)
            if link is None or link.kind != "veth" or link.host is None:
                continue
            index = int(one.attributes["IFLA_LINK"])
            end = str(rtnl.links(node, index)[0].attributes["IFLA_IFNAME"])
            ends.append(
                End(interface=name, name=end, index=index, bridge=link.host.bridge, port=link.host.port)
            )
    return tuple(ends)


def _proxy(node: Any, host: Netns, interface: str, ip: str, journal: Journal) -> None:
    """Of IPv6 the kernel answers for single addresses only."""
    index = index_of(node, interface)
    names = {index: interface}
    for message in rtnl.neighbours(node, AF_INET6):
        header = message.header
        if header["ifindex"] == index and header["flags"] & NTF_PROXY and message.attributes["NDA_DST"] == ip:
            return
    journal.record(Proxied(host=place_of(host), interface=interface, ip=ip))
    one = Neighbour(interface=names[index], ip=ip, mac=None, state=NUD_PERMANENT, flags=NTF_PROXY)
    rtnl.change(node, "neighbour", messages.neighbour_to(one, index), "replace")


def _introduce(node: Any, end: End, address: Address) -> None:
    """Tell the node the pod's MAC, as if learned; it goes with the host end, and needs no undo.

    A host end that was made a moment ago probes for its own IPv6 address for a second or two, and asks for no
    neighbour until then: what others send to a pod that says nothing first would wait.
    """
    if address.mac:
        known = Neighbour(interface=end.name, ip=address.ip, mac=address.mac, state=NUD_STALE, flags=0)
        rtnl.change(node, "neighbour", messages.neighbour_to(known, end.index), "replace")


def _lead_out(
    netns: Netns, interface: str, gateways: list[str], addresses: Iterable[Address], journal: Journal
) -> None:
    """Let a pod send by its gateway what it would ask its old IPv6 neighbours for, who are not here.

    The kernel's own routes to them stay, behind these. The gateway has one as well: else it would be behind
    itself, and the kernel would take no more routes by it.
    """
    nets = {ipaddress.ip_network(f"{one.ip}/{one.prefix}", strict=False) for one in addresses}
    near = sorted(str(net) for net in nets if net.version == 6 and net.prefixlen < net.max_prefixlen)
    if not (gateways and near):
        return
    ways: dict[str, dict[str, Any]] = {f"{one}/128": {} for one in gateways}
    ways |= {net: {"RTA_GATEWAY": gateways[0]} for net in near}
    with netns.ipr() as ipr:
        indexes = {interface: index_of(ipr, interface)}
        for destination, way in ways.items():
            attributes = {"RTA_OIF": interface, "RTA_PRIORITY": 1, **way}
            route = Route(
                destination=destination,
                table=MAIN,
                protocol=PROTOCOL_AWAY,
                scope=0,
                kind=1,
                attributes=attributes,
            )
            _replace(ipr, netns, route, indexes, journal)


def _gateways(netns: Netns, interface: str) -> list[str]:
    """IPv6 gateways of the pod, for which the node answers."""
    names = netns.names()
    with netns.ipr() as ipr:
        found = [messages.route_from(one, names) for one in rtnl.routes(ipr, AF_INET6)]
    ours = [one.attributes for one in found if one is not None and one.attributes.get("RTA_OIF") == interface]
    return sorted({str(attributes["RTA_GATEWAY"]) for attributes in ours if "RTA_GATEWAY" in attributes})


def _route(ip: str, attributes: dict[str, Any], scope: int = 0) -> Route:
    length = 128 if ":" in ip else 32
    return Route(
        destination=f"{ip}/{length}",
        table=MAIN,
        protocol=PROTOCOL,
        scope=scope,
        kind=1,
        attributes=attributes,
    )


def _replace(node: Any, host: Netns, route: Route, indexes: dict[str, int], journal: Journal) -> None:
    """Set a namespace's only route to an address; one that is there is in the journal of whoever made it."""
    names = host.names()
    family = AF_INET6 if ":" in route.destination else AF_INET
    listed = [messages.route_from(one, names) for one in rtnl.routes(node, family, MAIN)]
    before = tuple(one for one in listed if one is not None and one.destination == route.destination)
    if not any(_is(one, route) for one in before):
        journal.record(Routed(host=place_of(host), route=route, before=before))
    rtnl.change(node, "route", messages.route_to(route, indexes), "replace")


def _is(listed: Route, route: Route) -> bool:
    """Whether a route that the kernel lists, with what it adds by itself, is one of ours."""
    same = (listed.protocol, listed.kind, listed.tos) == (route.protocol, route.kind, route.tos)
    return same and route.attributes.items() <= listed.attributes.items()


def _failed(netns: Netns, error: OSError) -> NetworkError:
    return NetworkError(
        f"could not change network namespace '{netns.path}': {error.strerror or error}; it is as it was"
    )
