"""No connection tracking of what passes a node one way only: the home of a pod that is away.

What others send to the pod comes by its home, and what it answers goes straight to them. To connection
tracking half of a connection is invalid, and firewalls drop that, kube-proxy's rules among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from contextlib import suppress
from socket import AF_INET, AF_INET6

from netmig import conntrack, messages, nft, rtnl
from netmig.errors import NetworkError, NftError
from netmig.identity import Address
from netmig.ns import Netns

_MAIN = 254  # RT_TABLE_MAIN
_BEFORE_TRACKING = -300


def untrack(host: Netns, table: str, addresses: Iterable[Address], bridges: Set[str | None]) -> None:
    """Track no connection of which a node sees only what is for these addresses. Again does no harm.

    Those are of others than this node's: they come in where it has a gateway. Who is on this node has both
    ways by here, and may be translated. bridges: with such neighbours. A node without nftables is left as it
    is. Raises OSError.
    """
    rules = ""
    for one in addresses:
        if outward := _outward(host, one.version) - bridges:
            word, names = "ip6" if one.version == 6 else "ip", ", ".join(f'"{each}"' for each in outward)
            rules += f"  {word} daddr {one.ip} iifname {{ {names} }} notrack\n"
    chain = f"type filter hook prerouting priority {_BEFORE_TRACKING}\n{rules}"
    with suppress(NetworkError):  # of a table that is there, too
        nft.run(host, f"create table inet {table}\ntable inet {table} {{\n chain in {{\n  {chain} }}\n}}\n")
        forget(host, addresses, bridges)


def forget(host: Netns, addresses: Iterable[Address], bridges: Set[str | None] = frozenset()) -> None:
    """Lose track of what others and these addresses go on saying to each other elsewhere.

    Else it would go on where it left off when the pod is back. bridges: as in `untrack`. Raises NetworkError.
    """
    ours = {one.ip for one in addresses}
    entries = conntrack.untranslated(host, ours)
    outward = {version: _outward(host, version) - bridges for version in (4, 6)} if entries else {}
    names, gone = host.names(), list[conntrack.Entry]()
    with host.ipr() as node:
        for entry in entries:
            for other in {entry.original.src, entry.original.dst} - ours:
                if names.get(rtnl.way(node, other)) in outward[6 if ":" in other else 4]:
                    gone.append(entry)
    conntrack.forget(host, tuple(gone))


def track(host: Netns, table: str) -> None:
    """Track them again, at once: a table takes the kernel ten times as long to remove."""
    with suppress(NftError):  # it need not be there
        nft.run(host, f"insert rule inet {table} in accept\n")


def tidy(host: Netns, table: str) -> None:
    """Remove what `track` has left, or `untrack`. Idempotent; nobody waits for it."""
    with suppress(NftError):
        nft.run(host, f"add table inet {table}\ndelete table inet {table}\n")


def _outward(host: Netns, version: int) -> set[str | None]:
    """The interfaces by which a node reaches a gateway."""
    names = host.names()
    found: set[str | None] = set()
    with host.ipr() as node:
        for message in rtnl.routes(node, AF_INET6 if version == 6 else AF_INET, _MAIN):
            route = messages.route_from(message, names)
            if route is None:
                continue
            if route.attributes.keys() & {"RTA_GATEWAY", "RTA_VIA"}:
                found.add(str(route.attributes["RTA_OIF"]))
            found.update(str(hop["oif"]) for hop in route.attributes.get("RTA_MULTIPATH", ()))
    return found
