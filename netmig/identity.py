"""The network identity of a pod as a document: typed, versioned, independent of the tools that read it.

Words and numbers are the kernel's: scopes, states, flags and the names of attributes are those of rtnetlink.
Interfaces go by name, since their numbers differ from namespace to namespace. Nothing here loads pyroute2.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import msgspec

from netmig.errors import NetworkError

SCHEMA = 1
SCOPE_GLOBAL = 0
SCOPE_LINK = 253
NTF_PROXY = 0x08
NUD_STALE = 0x04
NUD_PERMANENT = 0x80
LOCK_TABLES = ("CRIU-", "torpor-hold-")
"""Tables whose names begin so are somebody's lock on the namespace, never the pod's own rules."""

PROTOCOL_AWAY = 201
"""Of a pod's routes (RTPROT_*) that torpor makes for as long as the pod is away, never the pod's own."""

_INTERFACE = re.compile(r"[^\s/:]{1,15}")
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")


@dataclass(frozen=True, kw_only=True)
class Queue:
    """A queueing discipline or one of its classes, as the kernel's own attributes (number, base64)."""

    what: Literal["qdisc", "class"]
    kind: str
    handle: int
    parent: int
    info: int
    attributes: tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True)
class HostEnd:
    """The other end of a veth, on the node.

    port: options of the bridge port that a new one has not, by the kernel's names (IFLA_BRPORT_...).
    bridge_mtu: what the bridge carries; less than the pod's own where another port narrows it.
    by_vlan: the bridge filters by VLAN, which a port forgets when it leaves its bridge.
    """

    name: str
    mac: str
    mtu: int
    queue_length: int
    alias: str | None = None
    bridge: str | None = None
    bridge_mtu: int | None = None
    port: dict[str, int] = field(default_factory=dict[str, int])
    by_vlan: bool = False
    queues: tuple[Queue, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Link:
    """An interface.

    flags: of IFF_*, those that somebody sets (up, promiscuous, all-multicast, no ARP, multicast).
    host: None if there is no other end, or it was not looked for.
    """

    name: str
    index: int
    kind: str
    mac: str | None
    mtu: int
    queue_length: int
    flags: int
    group: int = 0
    alias: str | None = None
    other_names: tuple[str, ...] = ()
    master: str | None = None
    host: HostEnd | None = None
    queues: tuple[Queue, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LinkAddress:
    """An address of an interface.

    flags: of IFA_F_*, those that somebody sets (no prefix route, home address, managed temporaries, ...).
    lifetime: seconds that it is (preferred, valid) for; None for ever.
    protocol: who made it (IFAPROT_*); 0 if nobody said.
    """

    interface: str
    ip: str
    prefix: int
    scope: int
    peer: str | None = None
    broadcast: str | None = None
    label: str | None = None
    flags: int = 0
    lifetime: tuple[int, int] | None = None
    metric: int | None = None
    protocol: int = 0


@dataclass(frozen=True, kw_only=True)
class Route:
    """A route that somebody made (the kernel's own follow from the addresses).

    destination: with its prefix length; 0.0.0.0/0 and ::/0 are the default.
    kind: RTN_*: 1 unicast, 6 blackhole, 7 unreachable, ...
    attributes: everything else (RTA_*), interfaces by name.
    """

    destination: str
    table: int
    protocol: int
    scope: int
    kind: int
    tos: int = 0
    flags: int = 0
    source: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A routing rule, those that every namespace starts with included: a pod may have removed them.

    attributes: everything else (FRA_*).
    """

    family: int
    table: int
    action: int
    priority: int
    source: str | None = None
    destination: str | None = None
    tos: int = 0
    flags: int = 0
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """A permanent neighbour, a proxy, or one that was learned (NUD_STALE: a warm cache of one segment)."""

    interface: str
    ip: str
    mac: str | None
    state: int
    flags: int = 0


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Everything by which a pod's network namespace is told from a fresh one.

    sysctls: what differs from a fresh namespace of that kernel, by name (net/ipv4/...).
    nftables: libnftables' JSON objects, without locks.
    warnings: what the namespace has and this document has not, a sentence each.
    """

    schema: int = SCHEMA
    links: tuple[Link, ...] = ()
    addresses: tuple[LinkAddress, ...] = ()
    routes: tuple[Route, ...] = ()
    rules: tuple[Rule, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    sysctls: dict[str, str] = field(default_factory=dict[str, str])
    nftables: tuple[dict[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Address:
    """An address that others know the pod by, and the MAC that it is at."""

    ip: str
    prefix: int
    ifname: str
    mac: str

    @property
    def version(self) -> int:
        """4 or 6."""
        return ipaddress.ip_address(self.ip).version


def encode(identity: Identity) -> bytes:
    """Deterministic JSON: sorted keys, ASCII, one final newline."""
    plain = msgspec.to_builtins(identity)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def decode(data: bytes) -> Identity:
    """Read a document, strictly. Raises NetworkError."""
    try:
        plain = json.loads(data)
        found: object = cast("dict[str, Any]", plain).get("schema") if isinstance(plain, dict) else None
        if isinstance(found, bool) or found != SCHEMA:
            raise NetworkError(
                f"could not read a network identity: its schema is {found!r} and {SCHEMA} is known here; "
                "use the torpor that wrote it"
            )
        identity = msgspec.convert(plain, Identity, strict=True)
        _check_values(identity)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise NetworkError(
            f"could not read a network identity: {error}; make the checkpoint again"
        ) from error
    return identity


def global_addresses(identity: Identity) -> tuple[Address, ...]:
    """The addresses that others reach the pod at: global ones of its interfaces, loopback left out."""
    macs = {link.name: link.mac for link in identity.links if link.kind != "loopback"}
    return tuple(
        Address(ip=one.ip, prefix=one.prefix, ifname=one.interface, mac=macs[one.interface] or "")
        for one in identity.addresses
        if one.scope == SCOPE_GLOBAL and one.interface in macs
    )


def _check_values(identity: Identity) -> None:
    """Names and addresses reach the kernel and paths of /proc: only plain ones may. Raises ValueError."""
    names = [link.name for link in identity.links]
    if len(set(names)) != len(names):
        raise ValueError(f"two interfaces of one name among {sorted(names)}")
    for link in identity.links:
        ends = [(link.name, link.mac)] + ([(link.host.name, link.host.mac)] if link.host else [])
        for name, mac in ends:
            if not _INTERFACE.fullmatch(name) or name in {".", ".."}:
                raise ValueError(f"{name!r} is no name of an interface")
            if mac is not None and not _MAC.fullmatch(mac):
                raise ValueError(f"{mac!r} is no MAC address")
    for one in identity.addresses:
        address = ipaddress.ip_interface(f"{one.ip}/{one.prefix}")
        for other in filter(None, (one.peer, one.broadcast)):
            if ipaddress.ip_address(other).version != address.version:
                raise ValueError(f"{other} is not of the family of {one.ip}")
    for neighbour in identity.neighbours:
        ipaddress.ip_address(neighbour.ip)
    for route in identity.routes:
        ipaddress.ip_network(route.destination)
    used = {one.interface for one in (*identity.addresses, *identity.neighbours)}
    if missing := used - set(names):
        raise ValueError(f"there is no interface {sorted(missing)}")
    for name in identity.sysctls:
        if not name.startswith("net/") or ".." in name.split("/"):
            raise ValueError(f"sysctl {name!r} is not below net/")


def diff(a: Identity, b: Identity) -> list[str]:
    """What differs between two namespaces as the pod sees them, a line each; empty if nothing does.

    Not compared: host ends, learned neighbours, the seconds left of a lifetime, counters, warnings.
    """
    lines: list[str] = []
    _walk(_comparable(a), _comparable(b), "", lines)
    return lines


_RUNNING = frozenset({"packets", "bytes", "used", "expires", "handle"})


def _still(value: Any) -> Any:
    """A rule without what traffic and time change in it."""
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value)
        return {key: _still(inner) for key, inner in pairs.items() if key not in _RUNNING}
    if isinstance(value, list | tuple):
        return [_still(inner) for inner in cast("list[Any]", value)]
    return value


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _comparable(identity: Identity) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(identity)
    links = {link["name"]: {k: v for k, v in link.items() if k != "host"} for link in plain["links"]}
    for one in plain["addresses"]:
        one["lifetime"] = one["lifetime"] is not None
    return {
        "links": links,
        "addresses": {f"{one['ip']} on {one['interface']}": one for one in plain["addresses"]},
        "routes": sorted(plain["routes"], key=_key),
        "rules": sorted(plain["rules"], key=_key),
        "neighbours": sorted(
            (one for one in plain["neighbours"] if one["state"] != NUD_STALE or one["flags"] & NTF_PROXY),
            key=_key,
        ),
        "sysctls": plain["sysctls"],
        "nftables": [_still(one) for one in plain["nftables"]],
    }


def _walk(a: Any, b: Any, where: str, lines: list[str]) -> None:
    if isinstance(a, dict) and isinstance(b, dict):
        left, right = cast("dict[str, Any]", a), cast("dict[str, Any]", b)
        for key in sorted(left.keys() | right.keys()):
            if key not in left:
                lines.append(f"{where}{key}: only after: {_key(right[key])}")
            elif key not in right:
                lines.append(f"{where}{key}: only before: {_key(left[key])}")
            else:
                _walk(left[key], right[key], f"{where}{key}.", lines)
    elif isinstance(a, list) and isinstance(b, list):
        before, after = [_key(x) for x in cast("list[Any]", a)], [_key(x) for x in cast("list[Any]", b)]
        lines += [f"{where[:-1]}: only before: {one}" for one in before if one not in after]
        lines += [f"{where[:-1]}: only after: {one}" for one in after if one not in before]
        if sorted(before) == sorted(after) and before != after:
            lines.append(f"{where[:-1]}: another order")
    elif a != b:
        lines.append(f"{where[:-1]}: {_key(a)} became {_key(b)}")


def rebind(
    identity: Identity, addresses: Mapping[str, str], macs: Mapping[str, str] | None = None
) -> Identity:
    """The identity of a clone: other addresses, wherever the old ones stand, and other MACs.

    addresses: old to new, each of the same family. macs: by the interface's name; made up where not given.
    Learned neighbours are left out, link-local IPv6 addresses follow from the new MACs, and host ends get
    names of their own. Raises NetworkError.
    """
    _check_rebinding(identity, addresses)
    given = macs or {}
    links = tuple(
        replace(link, mac=given.get(link.name) or _made_up_mac()) if link.kind == "veth" else link
        for link in identity.links
    )
    moved = {link.name: link.mac for link in links if link.kind == "veth" and link.mac is not None}
    locals_ = {
        one.ip
        for one in identity.addresses
        if one.interface in moved and one.scope == SCOPE_LINK and ":" in one.ip and one.ip not in addresses
    }
    others = [_readdressed(one, addresses) for one in identity.addresses if one.ip not in locals_]
    own = [
        LinkAddress(interface=name, ip=link_local(mac), prefix=64, scope=SCOPE_LINK)
        for name, mac in moved.items()
        if any(one.interface == name and one.ip in locals_ for one in identity.addresses)
    ]
    return with_fresh_ends(
        replace(
            identity,
            links=links,
            addresses=(*others, *own),
            routes=tuple(_rerouted(route, addresses) for route in identity.routes),
            rules=tuple(
                replace(
                    rule,
                    source=_prefix(rule.source, addresses),
                    destination=_prefix(rule.destination, addresses),
                )
                for rule in identity.rules
            ),
            neighbours=tuple(
                replace(one, ip=addresses.get(one.ip, one.ip))
                for one in identity.neighbours
                if one.state != NUD_STALE
            ),
            nftables=tuple(_substituted(one, addresses) for one in identity.nftables),
        )
    )


def without_links(identity: Identity, names: Set[str]) -> Identity:
    """The identity without some interfaces, and without what is on them or leads over them."""

    def stays(route: Route) -> bool:
        hops: list[dict[str, Any]] = route.attributes.get("RTA_MULTIPATH", [])
        return names.isdisjoint({route.attributes.get("RTA_OIF"), *(hop["oif"] for hop in hops)})

    return replace(
        identity,
        links=tuple(link for link in identity.links if link.name not in names),
        addresses=tuple(one for one in identity.addresses if one.interface not in names),
        routes=tuple(filter(stays, identity.routes)),
        neighbours=tuple(one for one in identity.neighbours if one.interface not in names),
        sysctls={
            name: value for name, value in identity.sysctls.items() if names.isdisjoint(name.split("/"))
        },
    )


def with_fresh_ends(identity: Identity) -> Identity:
    """The same identity beside the one that it is of: host ends have names and MACs that nobody has."""
    links = tuple(
        replace(link, host=replace(link.host, name=f"veth{os.urandom(4).hex()}", mac=_made_up_mac()))
        if link.host is not None
        else link
        for link in identity.links
    )
    return replace(identity, links=links)


def link_local(mac: str) -> str:
    """The IPv6 address that the kernel makes of a MAC (RFC 4291, appendix A)."""
    octets = bytes.fromhex(mac.replace(":", ""))
    number = bytes([octets[0] ^ 2]) + octets[1:3] + b"\xff\xfe" + octets[3:]
    return str(ipaddress.IPv6Address(b"\xfe\x80" + bytes(6) + number))


def _check_rebinding(identity: Identity, addresses: Mapping[str, str]) -> None:
    ours = {one.ip for one in identity.addresses}
    left = ours - addresses.keys()
    for old, new in addresses.items():
        cause = None
        if old not in ours:
            cause = "the pod does not have it"
        elif ipaddress.ip_address(old).version != ipaddress.ip_address(new).version:
            cause = f"{new} is of the other family"
        elif new in left or list(addresses.values()).count(new) > 1:
            cause = f"{new} would be there twice"
        if cause is not None:
            raise NetworkError(f"could not replace address '{old}': {cause}; check the new addresses")


def _readdressed(one: LinkAddress, addresses: Mapping[str, str]) -> LinkAddress:
    new = addresses.get(one.ip)
    if new is None:
        return one
    network = ipaddress.ip_network(f"{one.ip}/{one.prefix}", strict=False)
    broadcast = one.broadcast
    if broadcast == str(network.broadcast_address):
        broadcast = str(ipaddress.ip_network(f"{new}/{one.prefix}", strict=False).broadcast_address)
    return replace(one, ip=new, broadcast=broadcast)


def _rerouted(route: Route, addresses: Mapping[str, str]) -> Route:
    attributes = dict(route.attributes)
    if "RTA_PREFSRC" in attributes:
        preferred = str(attributes["RTA_PREFSRC"])
        attributes["RTA_PREFSRC"] = addresses.get(preferred, preferred)
    return replace(route, source=_prefix(route.source, addresses), attributes=attributes)


def _prefix(text: str | None, addresses: Mapping[str, str]) -> str | None:
    """An address with its length; a whole network stays."""
    if text is None:
        return None
    ip, _, length = text.partition("/")
    return f"{addresses[ip]}/{length}" if ip in addresses and int(length) in {32, 128} else text


def _substituted(value: Any, addresses: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return addresses.get(value, value)
    if isinstance(value, list | tuple):
        return [_substituted(inner, addresses) for inner in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {k: _substituted(inner, addresses) for k, inner in cast("dict[str, Any]", value).items()}
    return value


def _made_up_mac() -> str:
    """A unicast one that no manufacturer has."""
    octets = os.urandom(6)
    return ":".join(f"{octet:02x}" for octet in (octets[0] & 0xFC | 0x02, *octets[1:]))
