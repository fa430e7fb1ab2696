"""Which of some addresses does any network namespace of this machine have?"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from pathlib import Path

from netmig import rtnl
from netmig.errors import NetworkError
from netmig.ns import Netns

_PINNED = Path("/run/netns")


def in_use(addresses: Iterable[str]) -> dict[str, Path]:
    """The addresses that are set in a namespace of some process, or in one pinned below /run/netns.

    Returns address to a path of the namespace. One that cannot be looked into, since it went, is left out.
    """
    wanted = {str(ipaddress.ip_address(address)) for address in addresses}
    found: dict[str, Path] = {}
    for netns in _namespaces() if wanted else ():
        with netns:
            for address in wanted & _addresses(netns):
                found.setdefault(address, netns.path)
    return found


def _namespaces() -> Iterator[Netns]:
    """Every namespace once."""
    seen: set[int] = set()
    for path in [*Path("/proc").glob("[0-9]*/ns/net"), *_PINNED.glob("*")]:
        try:
            netns = Netns.open(path)
        except NetworkError:
            continue  # the process, or the pin, went meanwhile
        if netns.inode in seen:
            netns.close()
        else:
            seen.add(netns.inode)
            yield netns


def _addresses(netns: Netns) -> set[str]:
    try:
        with netns.ipr() as ipr:
            listed = rtnl.addresses(ipr)
    except NetworkError:
        return set()  # no namespace: a pin that was cut off half way is a plain file
    return {str(one.attributes.get("IFA_LOCAL") or one.attributes["IFA_ADDRESS"]) for one in listed}
