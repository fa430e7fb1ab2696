"""Can a namespace on this node become an identity? Asked before anything is touched, on either side."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from netmig import claim, rtnl
from netmig.capture import IFF_UP, capture, filters_by_vlan, link_kind, new_ports_wait_s
from netmig.errors import NetworkError
from netmig.identity import Identity, Link, diff, global_addresses
from netmig.ns import Netns
from netmig.rtnl import Message
from netmig.shape import pair_by_name

Code = Literal["bridge", "forwarding", "interface", "ipv6", "kind", "mtu", "name", "route"]

_UNICAST = 1


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why it cannot, and what to do, in one sentence."""

    code: Code
    sentence: str

    def __str__(self) -> str:
        return self.sentence


class Refused(NetworkError):
    """The namespace cannot become the identity; nothing was touched."""

    def __init__(self, problems: Collection[Problem], netns: Netns) -> None:
        """problems: at least one."""
        self.problems = tuple(problems)
        super().__init__(
            f"could not give network namespace '{netns.path}' a pod's identity: "
            + "; ".join(str(problem) for problem in problems)
        )


def check(
    identity: Identity,
    netns: Netns | None,
    host: Netns,
    *,
    adopt: bool = False,
    routed: bool = False,
    peers: Iterable[str] = (),
    now: Identity | None = None,
) -> list[Problem]:
    """What keeps a namespace from becoming the identity of a pod; empty if nothing does.

    netns: None if it is still to be made. host: the node that its veths lead to.
    adopt: the namespace has been set up by a network plugin, whose interfaces are taken over.
    routed: the host ends go into no bridge, the node routes to them.
    peers: addresses at the other end of established connections, each of which must have a way.
    now: what the namespace is, for a caller that has looked.
    Asks the segment for gateways that are not the node's own: 15 ms, 0.3 s for one that is silent.
    Raises NetworkError if it cannot look.
    """
    if now is None:
        now = capture(netns, host) if netns is not None else Identity()
    found = problems_of(identity, now, host, adopt=adopt, routed=routed)
    with host.ipr() as node:
        for peer in peers:
            if not _has_way(identity, peer) or (routed and not rtnl.has_route(node, peer)):
                found.append(_no_route(f"there is no route to {peer}, which the pod is connected to"))
        own = _own(node)
        if routed:
            # The kernel answers for an IPv4 address only if it would know where to send a packet for it.
            found += [
                _no_route(
                    f"this node has no route to the pod's gateway {gateway}, so it cannot answer for it"
                )
                for gateway in sorted({*chain.from_iterable(_gateways(identity).values())} - own)
                if ":" not in gateway and not rtnl.has_route(node, gateway)
            ]
    if not found and not routed:
        found += _silent_gateways(identity, pair_by_name(identity, now) if adopt else {}, host, own)
    return found


def leads(identity: Identity, host: Netns) -> bool:
    """Whether what a pod sends far away passes a node's firewall, once the pod is in a bridge there.

    So it does where the node is each of its gateways, or has its firewall see what a bridge forwards
    (br_netfilter). Raises NetworkError.
    """
    words = {"ip6tables" if one.version == 6 else "iptables" for one in global_addresses(identity)}
    with suppress(NetworkError):  # the module need not be there
        if words and all(host.sysctl(f"net/bridge/bridge-nf-call-{word}") == "1" for word in words):
            return True
    gateways = set(chain.from_iterable(_gateways(identity).values()))
    with host.ipr() as node:
        return bool(gateways) and gateways <= _own(node)


def _own(node: Any) -> set[str]:
    addresses = [one.attributes for one in rtnl.addresses(node)]
    return {str(one.get("IFA_LOCAL") or one["IFA_ADDRESS"]) for one in addresses}


def problems_of(
    identity: Identity, now: Identity, host: Netns, *, adopt: bool, routed: bool
) -> list[Problem]:
    """The same for a namespace that was looked at already, without gateways and peers."""
    with host.ipr() as node:
        links = {str(one.attributes["IFLA_IFNAME"]): one for one in rtnl.links(node)}
    found = _ipv6(identity, now, host)
    if routed:
        found += _forwarding(identity, host)
    if len(now.links) > 1 and not diff(identity, now):
        return found
    pairs = pair_by_name(identity, now) if adopt else {}
    present = [link for link in now.links if link.kind != "loopback" and link not in pairs.values()]
    names = ", ".join(f"'{link.name}'" for link in present)
    if present and adopt:
        found.append(
            Problem(
                code="interface",
                sentence=f"the namespace has {names} and the pod has not; give it the pod's networks only",
            )
        )
    elif present:
        found.append(
            Problem(
                code="name",
                sentence=f"the namespace has {names} already; adopt that, or give an empty namespace",
            )
        )
    for link in identity.links:
        if link.kind == "loopback":
            continue
        have = pairs.get(link.name)
        ours = _adopted(link, have, routed) if have is not None else _made(link, links)
        bridge = _bridge_of(link, have)
        if bridge is not None and not routed:
            # A bridge is no wider than its ports: once is enough.
            told = {problem.code for problem in ours}
            ours += [one for one in _bridge(bridge, link, links) if one.code not in told]
        found += ours
    return found


def _adopted(link: Link, have: Link, routed: bool) -> list[Problem]:
    if have.kind != link.kind:
        sentence = (
            f"interface '{have.name}' is of kind {have.kind} here and {link.kind} at the pod; "
            "use the same network plugin"
        )
        return [Problem(code="kind", sentence=sentence)]
    found: list[Problem] = []
    if have.mtu < link.mtu:
        found.append(_mtu(f"interface '{have.name}'", have.mtu, link))
    if have.kind == "veth" and have.host is None:
        sentence = f"the other end of '{have.name}' is not on this node; name the node's own namespace"
        found.append(Problem(code="interface", sentence=sentence))
    elif have.host is not None and have.host.bridge is None and not routed:
        sentence = f"the other end of '{have.name}' is in no bridge; let the node route to the pod instead"
        found.append(Problem(code="bridge", sentence=sentence))
    return found


def _made(link: Link, links: Mapping[str, Message]) -> list[Problem]:
    if link.kind != "veth":
        sentence = (
            f"interface '{link.name}' is of kind {link.kind}, which cannot be made here; "
            "let the network plugin make it, and adopt it"
        )
        return [Problem(code="kind", sentence=sentence)]
    if link.host is None:
        sentence = (
            f"it is not known what interface '{link.name}' was connected to; "
            "capture the identity with the node's namespace at hand"
        )
        return [Problem(code="interface", sentence=sentence)]
    if link.host.name in links:
        sentence = f"this node has an interface '{link.host.name}' already; give the new one another name"
        return [Problem(code="name", sentence=sentence)]
    return []


def _bridge(name: str, link: Link, links: Mapping[str, Message]) -> list[Problem]:
    bridge = links.get(name)
    if bridge is None:
        sentence = (
            f"bridge '{name}' is not on this node; create it, or name the one that is on the pod's network"
        )
        return [Problem(code="bridge", sentence=sentence)]
    if link_kind(bridge) != "bridge":
        sentence = f"'{name}' is no bridge on this node; name the one that is on the pod's network"
        return [Problem(code="bridge", sentence=sentence)]
    if filters_by_vlan(bridge):
        sentence = (
            f"bridge '{name}' filters by VLAN, which a port forgets when it leaves and this version does not "
            "put back; use a bridge without, or let the node route to the pod"
        )
        return [Problem(code="bridge", sentence=sentence)]
    if wait_s := new_ports_wait_s(bridge):
        sentence = (
            f"bridge '{name}' runs STP, and forwards nothing of a new port for {wait_s:g} s, in which nobody "
            f"would reach the pod; turn that off (ip link set {name} type bridge stp_state 0), or let the "
            "node route to the pod"
        )
        return [Problem(code="bridge", sentence=sentence)]
    if not bridge.header["flags"] & IFF_UP:
        return [Problem(code="bridge", sentence=f"bridge '{name}' is down; set it up")]
    # What leads out of the node must carry it too: a bridge drops what is too long for a port, silently.
    index = bridge.header["index"]
    ports = {
        port: one
        for port, one in links.items()
        if one.attributes.get("IFLA_MASTER") == index and link_kind(one) != "veth"
    }
    source = link.host.bridge_mtu if link.host is not None else None
    needed = link.mtu if source is None else min(link.mtu, source)
    return [
        _mtu(what, one.attributes["IFLA_MTU"], link)
        for what, one in [
            (f"bridge '{name}'", bridge),
            *((f"port '{port}' of bridge '{name}'", one) for port, one in sorted(ports.items())),
        ]
        if one.attributes["IFLA_MTU"] < needed
    ][:1]


def _mtu(what: str, size: int, link: Link) -> Problem:
    return Problem(
        code="mtu",
        sentence=(
            f"{what} carries {size} bytes here and the pod's '{link.name}' {link.mtu}: its connections would "
            "stall; raise the MTU"
        ),
    )


def _ipv6(identity: Identity, now: Identity, host: Netns) -> list[Problem]:
    where = "net/ipv6/conf/all/disable_ipv6"
    ours = [one.ip for one in global_addresses(identity) if one.version == 6]
    if not ours or where in identity.sysctls:
        return []
    try:
        off = host.sysctl(where) == "1" or now.sysctls.get(where) == "1"
    except NetworkError:
        off = True
    if not off:
        return []
    sentence = f"IPv6 is off here and the pod has {ours[0]}; turn it on (net.ipv6.conf.all.disable_ipv6=0)"
    return [Problem(code="ipv6", sentence=sentence)]


def _forwarding(identity: Identity, host: Netns) -> list[Problem]:
    families = {one.version for one in global_addresses(identity)}
    # Of IPv6 an interface answers for others only where it forwards itself, as a new one does by default.
    names = {4: ["net/ipv4/ip_forward"], 6: [f"net/ipv6/conf/{one}/forwarding" for one in ("all", "default")]}
    return [
        Problem(
            code="forwarding",
            sentence=f"this node does not forward packets to the pod; set {name.replace('/', '.')}=1",
        )
        for family in sorted(families)
        for name in [one for one in names[family] if _is_off(host, one)][:1]
    ]


def _is_off(host: Netns, name: str) -> bool:
    try:
        return host.sysctl(name) == "0"
    except NetworkError:
        return False  # no IPv6 at all, which is told otherwise


def _no_route(cause: str) -> Problem:
    return Problem(code="route", sentence=f"{cause}; choose a node on the pod's network")


def _has_way(identity: Identity, peer: str) -> bool:
    address = ipaddress.ip_address(peer)
    near = [
        ipaddress.ip_network(f"{one.peer or one.ip}/{one.prefix}", strict=False) for one in identity.addresses
    ]
    far = [ipaddress.ip_network(route.destination) for route in identity.routes if route.kind == _UNICAST]
    return any(address in network for network in (*near, *far))


def _bridge_of(link: Link, have: Link | None) -> str | None:
    end = have.host if have is not None else link.host
    return end.bridge if end is not None else None


def _silent_gateways(
    identity: Identity, pairs: Mapping[str, Link], host: Netns, own: Set[str]
) -> list[Problem]:
    """Those that are neither the node's own nor anybody else's on the segment."""
    behind: dict[str, set[str]] = {}
    gateways = _gateways(identity)
    for link in identity.links:
        bridge = _bridge_of(link, pairs.get(link.name))
        if bridge is not None and (foreign := gateways.get(link.name, set()) - own):
            behind.setdefault(bridge, set()).update(foreign)
    found: list[Problem] = []
    for bridge, foreign in sorted(behind.items()):
        answered = {one.ip for one in claim.probe(host, bridge, foreign)}
        found += [
            _no_route(f"nobody on bridge '{bridge}' answers for the pod's gateway {gateway}")
            for gateway in sorted(foreign - answered)
        ]
    return found


def _gateways(identity: Identity) -> dict[str, set[str]]:
    """The gateways that the pod uses, by the interface that they are behind."""
    found: dict[str, set[str]] = {}
    for route in identity.routes:
        hops: list[dict[str, Any]] = [
            {"oif": route.attributes.get("RTA_OIF"), "attrs": list(route.attributes.items())}
        ]
        hops += route.attributes.get("RTA_MULTIPATH", [])
        for hop in hops:
            if (gateway := dict(hop["attrs"]).get("RTA_GATEWAY")) is not None:
                found.setdefault(str(hop["oif"]), set()).add(str(gateway))
    return found
