"""Read a pod's network identity from its namespace. It changes nothing, and takes 25 to 45 ms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import Any

from netmig import messages, nft, queues, rtnl, sysctls
from netmig.errors import NetworkError, NftError
from netmig.identity import LOCK_TABLES, PROTOCOL_AWAY, HostEnd, Identity, Link
from netmig.ns import Netns
from netmig.rtnl import Message

FAMILIES = (AF_INET, AF_INET6)
IFF_UP = 0x1
_IFF_SET = IFF_UP | 0x80 | 0x100 | 0x200 | 0x1000  # no ARP, promiscuous, all multicast, multicast
_LOOPBACK = 772
_FALLBACKS = frozenset(
    {"tunl0", "sit0", "ip6tnl0", "gre0", "gretap0", "erspan0", "ip6gre0", "ip_vti0", "ip6_vti0", "teql0"}
)
_LEGACY_TABLES = (
    Path("/proc/thread-self/net/ip_tables_names"),
    Path("/proc/thread-self/net/ip6_tables_names"),
)
# Options of a bridge port, and what a new port has.
_PORT = {
    "IFLA_BRPORT_PRIORITY": 32,
    "IFLA_BRPORT_MODE": 0,
    "IFLA_BRPORT_GUARD": 0,
    "IFLA_BRPORT_PROTECT": 0,
    "IFLA_BRPORT_FAST_LEAVE": 0,
    "IFLA_BRPORT_LEARNING": 1,
    "IFLA_BRPORT_UNICAST_FLOOD": 1,
    "IFLA_BRPORT_MCAST_FLOOD": 1,
    "IFLA_BRPORT_BCAST_FLOOD": 1,
    "IFLA_BRPORT_MCAST_TO_UCAST": 0,
    "IFLA_BRPORT_ISOLATED": 0,
    "IFLA_BRPORT_NEIGH_SUPPRESS": 0,
    "IFLA_BRPORT_VLAN_TUNNEL": 0,
    "IFLA_BRPORT_LOCKED": 0,
}


def capture(netns: Netns, host: Netns | None) -> Identity:
    """The identity of a namespace.

    host: where the other ends of its veths are; None leaves them out.
    Raises NetworkError. What a document cannot hold becomes a warning in it.
    """
    warnings: list[str] = []
    try:
        with netns.ipr() as ipr:
            listed = {one.header["index"]: one for one in rtnl.links(ipr) if not _comes_by_itself(one)}
            names = {index: str(one.attributes["IFLA_IFNAME"]) for index, one in listed.items()}
            ends = _host_ends(listed, host, rtnl.namespace_number(ipr, host.fileno()) if host else None)
            links = tuple(
                _link(netns, one, names, ends.get(index), warnings) for index, one in sorted(listed.items())
            )
            addresses = tuple(messages.address_from(one, names) for one in rtnl.addresses(ipr))
            ways = [one for family in FAMILIES for one in rtnl.routes(ipr, family)]
            routes = [one for one in ways if one.header["proto"] != PROTOCOL_AWAY]
            rules = [one for family in FAMILIES for one in rtnl.rules(ipr, family)]
            known = [one for family in FAMILIES for one in rtnl.neighbours(ipr, family)]
        identity = Identity(
            links=links,
            addresses=addresses,
            routes=tuple(route for one in routes if (route := messages.route_from(one, names))),
            rules=tuple(messages.rule_from(one) for one in rules),
            neighbours=tuple(near for one in known if (near := messages.neighbour_from(one, names))),
            sysctls=sysctls.different(netns),
            nftables=_firewall(netns, warnings),
        )
    except OSError as error:
        raise NetworkError(
            f"could not read the identity of network namespace '{netns.path}': {error.strerror or error}; "
            "check that the namespace and its node are there"
        ) from error
    return _with_warnings(identity, warnings)


def is_lock(entry: Mapping[str, Any]) -> bool:
    """Is an object of nftables part of somebody's lock on the namespace?"""
    ((kind, what),) = entry.items()
    table = what.get("name") if kind == "table" else what.get("table")
    return str(table).startswith(LOCK_TABLES)


def link_kind(message: Message) -> str:
    """veth, bridge and so on; "loopback"; "device" for hardware."""
    if message.header["ifi_type"] == _LOOPBACK:
        return "loopback"
    return str(_nested(message, "IFLA_LINKINFO").get("IFLA_INFO_KIND", "device"))


def filters_by_vlan(bridge: Message) -> bool:
    """Does a bridge look at VLANs?"""
    return bool(_option(bridge, "IFLA_BR_VLAN_FILTERING"))


def new_ports_wait_s(bridge: Message) -> float:
    """For how long a bridge that looks for loops (STP) forwards nothing of a new port."""
    runs = _option(bridge, "IFLA_BR_STP_STATE")
    return 2 * _option(bridge, "IFLA_BR_FORWARD_DELAY") / 100 if runs else 0  # listening, then learning


def _option(bridge: Message, name: str) -> int:
    data = _nested(bridge, "IFLA_LINKINFO").get("IFLA_INFO_DATA", {})
    return int(dict(data.get("attrs", [])).get(name, 0))


def _comes_by_itself(message: Message) -> bool:
    """Modules for tunnels put a device into every namespace; unless it is up, nobody has use for it."""
    return message.attributes["IFLA_IFNAME"] in _FALLBACKS and not message.header["flags"] & IFF_UP


def _link(
    netns: Netns, message: Message, names: Mapping[int, str], host: HostEnd | None, warnings: list[str]
) -> Link:
    got, index = message.attributes, int(message.header["index"])
    found = queues.capture(netns, index)
    name, kind = names[index], link_kind(message)
    if queues.has_filters(netns, index, found):
        warnings.append(f"filters of traffic control on {name} are not carried")
    if host is not None and any(queue.parent == queues.INGRESS for queue in host.queues):
        warnings.append(f"filters at the node's end of {name} are not carried")
    if kind not in {"veth", "loopback"}:
        warnings.append(f"{name} is of kind {kind}, which cannot be made anew elsewhere")
    others = got.get("IFLA_PROP_LIST", {}).get("attrs", [])
    return Link(
        name=name,
        index=index,
        kind=kind,
        mac=got.get("IFLA_ADDRESS") if kind != "loopback" else None,
        mtu=got["IFLA_MTU"],
        queue_length=got.get("IFLA_TXQLEN", 0),
        flags=message.header["flags"] & _IFF_SET,
        group=got.get("IFLA_GROUP", 0),
        alias=got.get("IFLA_IFALIAS"),
        other_names=tuple(value for key, value in others if key == "IFLA_ALT_IFNAME"),
        master=names.get(got.get("IFLA_MASTER", 0)),
        host=host,
        queues=found,
    )


def _host_ends(listed: Mapping[int, Message], host: Netns | None, number: int | None) -> dict[int, HostEnd]:
    """The other ends that are on the node, by the interface's own number.

    number: by which the pod's namespace knows the node's; None if it does not, and then no end is there.
    """
    if host is None or number is None:
        return {}
    far = {
        index: int(one.attributes["IFLA_LINK"])
        for index, one in listed.items()
        if link_kind(one) == "veth" and one.attributes.get("IFLA_LINK_NETNSID") == number
    }
    with host.ipr() as ipr:
        return {index: _host_end(host, ipr, number) for index, number in far.items()}


def _host_end(host: Netns, ipr: Any, index: int) -> HostEnd:
    (message,) = rtnl.links(ipr, index)
    got = message.attributes
    bridge, bridge_mtu, port, by_vlan = None, None, dict[str, int](), False
    if "IFLA_MASTER" in got:
        (master,) = rtnl.links(ipr, got["IFLA_MASTER"])
        bridge, bridge_mtu = str(master.attributes["IFLA_IFNAME"]), int(master.attributes["IFLA_MTU"])
        by_vlan = filters_by_vlan(master)
        data = dict(_nested(message, "IFLA_LINKINFO").get("IFLA_INFO_SLAVE_DATA", {}).get("attrs", []))
        port = {name: data[name] for name, new in _PORT.items() if data.get(name, new) != new}
    return HostEnd(
        name=got["IFLA_IFNAME"],
        mac=got["IFLA_ADDRESS"],
        mtu=got["IFLA_MTU"],
        queue_length=got.get("IFLA_TXQLEN", 0),
        alias=got.get("IFLA_IFALIAS"),
        bridge=bridge,
        bridge_mtu=bridge_mtu,
        port=port,
        by_vlan=by_vlan,
        queues=queues.capture(host, index),
    )


def _firewall(netns: Netns, warnings: list[str]) -> tuple[dict[str, Any], ...]:
    with netns.inside():
        legacy = [name for path in _LEGACY_TABLES if path.exists() for name in path.read_text().split()]
    if legacy:
        warnings.append("firewall rules of the old iptables are not carried; use its nftables variant")
    try:
        listed = nft.run(netns, "list ruleset")
    except NftError as error:
        warnings.append(f"firewall rules, if there are any, are not carried: {error}")
        return ()
    plain = [
        {kind: {key: value for key, value in what.items() if key != "handle"}}
        for entry in listed
        if not is_lock(entry)
        for kind, what in entry.items()
    ]
    if '"xt":' in json.dumps(plain):
        warnings.append(
            "firewall rules with iptables extensions are not carried: nftables can list but not load them"
        )
        tables = {_table(entry) for entry in plain if '"xt":' in json.dumps(entry)}
        plain = [entry for entry in plain if _table(entry) not in tables]
    return tuple(plain)


def _table(entry: Mapping[str, Any]) -> tuple[Any, Any]:
    ((kind, what),) = entry.items()
    return what.get("family"), what.get("name") if kind == "table" else what.get("table")


def _nested(message: Message, name: str) -> dict[str, Any]:
    return dict(message.attributes.get(name, {}).get("attrs", []))


def _with_warnings(identity: Identity, warnings: list[str]) -> Identity:
    ours = {link.name for link in identity.links if link.kind == "veth"}
    if ours and not any(one.interface in ours for one in identity.addresses):
        warnings.append("no interface has an address; gVisor, for one, takes them away when it starts")
    for route in identity.routes:
        if "RTA_NH_ID" in route.attributes:
            warnings.append(f"the route to {route.destination} by a nexthop object is not carried")
        if "RTA_ENCAP" in route.attributes:
            warnings.append(
                f"the route to {route.destination} has an encapsulation, which may not be carried"
            )
    return replace(identity, warnings=tuple(warnings))
