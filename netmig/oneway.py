"""What passes a node one way only, at the home of a pod that is away, and what is left of it.

What others send to the pod comes by its home, and what it answers may go straight to them. To connection
tracking half of a connection is invalid, and firewalls drop that, kube-proxy's rules among them. So what it
makes nothing of becomes untracked before anybody looks. Where both ways lead by the home, all of it stays
tracked, and may be translated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from contextlib import suppress
from socket import AF_INET, AF_INET6
from typing import Any

from netmig import conntrack, messages, nft, rtnl
from netmig.errors import NetworkError, NftError
from netmig.identity import Address
from netmig.ns import Netns

_MAIN = 254  # RT_TABLE_MAIN
_TABLE = "inet torpor-away"
_AFTER_TRACKING = -199


def let_pass(host: Netns, addresses: Collection[str]) -> None:
    """Let what is for or from these addresses, and no others, never be invalid. Again does no harm.

    A node without nftables is left as it is.
    """
    sets = rules = ""
    for word, version in (("ip", "4"), ("ip6", "6")):
        if some := sorted(one for one in addresses if (":" in one) == (version == "6")):
            sets += (
                f" set v{version} {{\n  type ipv{version}_addr\n  elements = {{ {', '.join(some)} }}\n }}\n"
            )
            # After tracking, this does nothing to what is tracked.
            rules += "".join(f"  {word} {end} @v{version} notrack\n" for end in ("saddr", "daddr"))
    text = f"add table {_TABLE}\ndelete table {_TABLE}\n"
    if addresses:
        chain = f"type filter hook prerouting priority {_AFTER_TRACKING}\n{rules}"
        text += f"table {_TABLE} {{\n{sets} chain in {{\n  {chain} }}\n}}\n"
    with suppress(NetworkError):
        nft.run(host, text)


def is_let_pass(host: Netns) -> bool:
    """Whether there is what `let_pass` makes: others flush a node's whole firewall."""
    with suppress(NftError):
        return bool(nft.run(host, f"list table {_TABLE}"))
    return False


def forget(host: Netns, addresses: Iterable[Address], near: Set[str | None] | None = None) -> None:
    """Lose track of what others and these addresses go on saying to each other elsewhere, or did.

    Else it would go on where it left off when it passes both ways again, and be invalid. near: the interfaces
    whose neighbours are none of those; None: all that lead to no gateway. Raises NetworkError.
    """
    ours = {one.ip for one in addresses}
    entries = conntrack.untranslated(host, ours)
    names, gone = host.names(), list[conntrack.Entry]()
    with host.ipr() as node:
        if entries and near is None:
            near = {*names.values()} - _outward(node, names)
        for entry in entries:
            for other in {entry.original.src, entry.original.dst} - ours:
                if names.get(rtnl.way(node, other)) not in (near or ()):
                    gone.append(entry)
    conntrack.forget(host, tuple(gone))


def _outward(node: Any, names: dict[int, str]) -> set[str]:
    """The interfaces by which a node reaches a gateway."""
    found: set[str] = set()
    for family in (AF_INET, AF_INET6):
        for message in rtnl.routes(node, family, _MAIN):
            route = messages.route_from(message, names)
            if route is None:
                continue
            if route.attributes.keys() & {"RTA_GATEWAY", "RTA_VIA"}:
                found.add(str(route.attributes["RTA_OIF"]))
            found.update(str(hop["oif"]) for hop in route.attributes.get("RTA_MULTIPATH", ()))
    return found
