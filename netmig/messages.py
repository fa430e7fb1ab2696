"""Records of an identity to and from messages of rtnetlink.

Interfaces have names on the one side and numbers on the other. What the kernel sets by itself (states, ages)
is left out on the way in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from socket import AF_INET, AF_INET6
from typing import Any

from netmig.identity import NTF_PROXY, NUD_PERMANENT, NUD_STALE, LinkAddress, Neighbour, Route, Rule
from netmig.rtnl import Message

TABLE_LOCAL = 255
PROTOCOL_KERNEL = 2

_FOREVER = 0xFFFFFFFF
_IFA_NODAD = 0x02
_IFA_PERMANENT = 0x80
# Secondary, tentative, failed, optimistic, deprecated and stable privacy are the kernel's to say.
_IFA_SET = 0x10 | 0x80 | 0x100 | 0x200 | 0x400
_RTM_CLONED = 0x200
_RTM_SET = 0x2 | 0x4  # pervasive, on link; the others are states of the interface
_FIB_RULE_SET = 0x1 | 0x2  # permanent, inverted
_NTF_SET = NTF_PROXY | 0x80  # proxy, router
_NUD_LEARNED = 0x02 | 0x04 | 0x08 | 0x10


def address_from(message: Message, names: Mapping[int, str]) -> LinkAddress:
    """An address as the document has it."""
    got, header = message.attributes, message.header
    ip, far = got.get("IFA_LOCAL") or got["IFA_ADDRESS"], got.get("IFA_ADDRESS")
    flags = int(got.get("IFA_FLAGS", header["flags"]))
    times = got.get("IFA_CACHEINFO", {})
    name = names[header["index"]]
    label = got.get("IFA_LABEL")
    return LinkAddress(
        interface=name,
        ip=ip,
        prefix=header["prefixlen"],
        scope=header["scope"],
        peer=far if far != ip else None,
        broadcast=got.get("IFA_BROADCAST"),
        label=label if label != name else None,
        flags=flags & _IFA_SET & ~_IFA_PERMANENT,
        lifetime=None if flags & _IFA_PERMANENT else (times["ifa_preferred"], times["ifa_valid"]),
        metric=got.get("IFA_RT_PRIORITY"),
        protocol=got.get("IFA_PROTO", 0),
    )


def address_to(one: LinkAddress, index: int) -> Message:
    """The message that adds an address, usable at once: whoever adds it has looked for a conflict before."""
    family = family_of(one.ip)
    flags = one.flags | (_IFA_NODAD if family == AF_INET6 else 0)
    attributes: dict[str, Any] = {"IFA_LOCAL": one.ip, "IFA_ADDRESS": one.peer or one.ip, "IFA_FLAGS": flags}
    if family == AF_INET6 and one.peer is None:
        del attributes["IFA_LOCAL"]
    if one.broadcast is not None:
        attributes["IFA_BROADCAST"] = one.broadcast
    if family == AF_INET:
        attributes["IFA_LABEL"] = one.label or one.interface
    if one.metric is not None:
        attributes["IFA_RT_PRIORITY"] = one.metric
    if one.protocol:
        attributes["IFA_PROTO"] = one.protocol
    preferred, valid = one.lifetime or (_FOREVER, _FOREVER)
    attributes["IFA_CACHEINFO"] = {"ifa_preferred": preferred, "ifa_valid": valid, "cstamp": 0, "tstamp": 0}
    header = {
        "family": family,
        "prefixlen": one.prefix,
        "flags": flags & 0xFF,
        "scope": one.scope,
        "index": index,
    }
    return Message(header=header, attributes=attributes)


def route_from(message: Message, names: Mapping[int, str]) -> Route | None:
    """A route as the document has it; None for what the kernel makes of addresses, and for caches."""
    got, header = dict(message.attributes), message.header
    table = int(got.pop("RTA_TABLE", header["table"]))
    if header["flags"] & _RTM_CLONED or table == TABLE_LOCAL or header["proto"] == PROTOCOL_KERNEL:
        return None
    everything = "::" if header["family"] == AF_INET6 else "0.0.0.0"  # noqa: S104 - the default route
    source = got.pop("RTA_SRC", None)
    destination = got.pop("RTA_DST", everything)
    for name in ("RTA_CACHEINFO", "RTA_UNSPEC", "UNKNOWN"):
        got.pop(name, None)
    if "RTA_MULTIPATH" in got or "RTA_GATEWAY" in got or "RTA_OIF" in got:
        got.pop("RTA_NH_ID", None)  # a nexthop object; the kernel spells out what it stands for beside it
    return Route(
        destination=f"{destination}/{header['dst_len']}",
        table=table,
        protocol=header["proto"],
        scope=header["scope"],
        kind=header["type"],
        tos=header["tos"],
        flags=header["flags"] & _RTM_SET,
        source=f"{source}/{header['src_len']}" if source is not None else None,
        attributes=_route_interfaces(got, lambda number: names.get(number, number)),
    )


def route_to(one: Route, indexes: Mapping[str, int]) -> Message:
    """The message that adds or deletes a route."""
    network = ipaddress.ip_network(one.destination)
    attributes = _route_interfaces(one.attributes, lambda name: indexes.get(name, name))
    source_length = 0
    if network.prefixlen:
        attributes["RTA_DST"] = str(network.network_address)
    if one.source is not None:
        source, _, length = one.source.partition("/")
        attributes["RTA_SRC"], source_length = source, int(length)
    attributes["RTA_TABLE"] = one.table
    header = {
        "family": family_of(str(network.network_address)),
        "dst_len": network.prefixlen,
        "src_len": source_length,
        "tos": one.tos,
        "table": one.table if one.table < 256 else 0,
        "proto": one.protocol,
        "scope": one.scope,
        "type": one.kind,
        "flags": one.flags,
    }
    return Message(header=header, attributes=attributes)


def rule_from(message: Message) -> Rule:
    """A routing rule as the document has it."""
    got, header = dict(message.attributes), message.header
    source, destination = got.pop("FRA_SRC", None), got.pop("FRA_DST", None)
    got.pop("UNKNOWN", None)
    return Rule(
        family=header["family"],
        table=int(got.pop("FRA_TABLE", header["table"])),
        action=header["action"],
        priority=int(got.pop("FRA_PRIORITY", 0)),
        source=f"{source}/{header['src_len']}" if source is not None else None,
        destination=f"{destination}/{header['dst_len']}" if destination is not None else None,
        tos=header["tos"],
        flags=header["flags"] & _FIB_RULE_SET,
        attributes=got,
    )


def rule_to(one: Rule) -> Message:
    """The message that adds or deletes a routing rule."""
    attributes: dict[str, Any] = dict(one.attributes)
    lengths = {"src_len": 0, "dst_len": 0}
    for name, length, value in (("FRA_SRC", "src_len", one.source), ("FRA_DST", "dst_len", one.destination)):
        if value is not None:
            attributes[name], _, bits = value.partition("/")
            lengths[length] = int(bits)
    attributes["FRA_TABLE"], attributes["FRA_PRIORITY"] = one.table, one.priority
    table = one.table if one.table < 256 else 0
    header = {"family": one.family, "tos": one.tos, "table": table, "action": one.action, "flags": one.flags}
    return Message(header={**header, **lengths}, attributes=attributes)


def neighbour_from(message: Message, names: Mapping[int, str]) -> Neighbour | None:
    """A neighbour as the document has it; None for multicast and for those that did not answer."""
    got, header = message.attributes, message.header
    state, proxy = header["state"], header["flags"] & NTF_PROXY
    learned = state & _NUD_LEARNED and got.get("NDA_LLADDR")
    if not got.get("NDA_DST") or not (proxy or state & NUD_PERMANENT or learned):
        return None
    return Neighbour(
        interface=names[header["ifindex"]],
        ip=got["NDA_DST"],
        mac=got.get("NDA_LLADDR"),
        state=NUD_PERMANENT if proxy or state & NUD_PERMANENT else NUD_STALE,
        flags=header["flags"] & _NTF_SET,
    )


def neighbour_to(one: Neighbour, index: int) -> Message:
    """The message that adds or deletes a neighbour."""
    attributes: dict[str, Any] = {"NDA_DST": one.ip}
    if one.mac is not None:
        attributes["NDA_LLADDR"] = one.mac
    header = {"family": family_of(one.ip), "ifindex": index, "state": one.state, "flags": one.flags}
    return Message(header=header, attributes=attributes)


def family_of(ip: str) -> int:
    """AF_INET or AF_INET6."""
    return AF_INET6 if ":" in ip else AF_INET


def _route_interfaces(attributes: Mapping[str, Any], other: Callable[[Any], Any]) -> dict[str, Any]:
    changed = dict(attributes)
    for name in ("RTA_OIF", "RTA_IIF"):
        if name in changed:
            changed[name] = other(changed[name])
    if "RTA_MULTIPATH" in changed:
        hops: list[dict[str, Any]] = changed["RTA_MULTIPATH"]
        changed["RTA_MULTIPATH"] = [{**hop, "oif": other(hop["oif"])} for hop in hops]
    return changed
