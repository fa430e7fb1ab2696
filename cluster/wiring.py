"""The network of a container that moves: its namespace is made beforehand, and plugged in at one moment.

Until the decision the source stays plugged, frozen and locked by the engine, and the target is mute: so there
is nothing to put back if the migration is called off. The kernel of the target must not hear the peers before
it: what it acknowledged would be lost with it. Mute is a firewall of its own, for ARP too, and the namespace
is in its bridge behind it: to open that takes no lock of the kernel's that others hold for long. Where the
kernel has no such firewall, the namespace is in no bridge until the decision.
"""

from __future__ import annotations

import contextlib
import ipaddress
from dataclasses import replace
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import Any

from netmig import conntrack, messages, mute, oneway, rtnl
from netmig.apply import MAIN, PROTOCOL, Applied, apply, attach, plug_routed
from netmig.capture import capture
from netmig.check import check
from netmig.check import leads as _leads
from netmig.claim import Announcer, probe
from netmig.errors import NetworkError
from netmig.identity import Identity, global_addresses
from netmig.ns import Netns
from netmig.shape import plug as _plug
from shim.errors import ShimError

_NODE = Path("/proc/thread-self/ns/net")


def node() -> Netns:
    """This node's own network namespace."""
    return Netns.open(_NODE)


def identity_of(path: Path) -> Identity:
    """What the namespace at a path is. Raises NetworkError."""
    with Netns.open(path) as netns, node() as host:
        return capture(netns, host)


def make(identity: Identity, path: Path, *, away: bool = False, home: bool = False) -> tuple[str, ...]:
    """Make a namespace with an identity, in no bridge; what it lacks, in sentences.

    away: its addresses are not of this node's pod network. home: they are, and this node sends on to it.
    Raises ShimError, NetworkError if it cannot be, or somebody else has an address; then it is not there.
    """
    with node() as host:
        if problems := check(identity, None, host, routed=away):
            raise ShimError("; ".join(str(problem) for problem in problems))
        if not (away or home):
            _refuse_taken(identity, host)
        netns = Netns.create(path)
        try:
            muted = mute.mute(netns)
            # What its neighbours' MAC addresses are is another matter on another segment.
            near = not (away or home)
            applied = apply(identity, netns, host, adopt=False, neighbours=near, routed=away)
            if muted and not away:
                _put_in(identity, host)
        except BaseException:
            netns.remove()
            raise
        netns.close()
        return tuple(applied.warnings)


def _put_in(identity: Identity, host: Netns) -> None:
    with host.ipr() as ipr:
        for link in identity.links:
            if link.host is not None and link.host.bridge is not None:
                _each(ipr, link.host.name, link.host.bridge, link.host.port)


def check_pod(identity: Identity, path: Path) -> None:
    """Can a pod that a network plugin has set up be given an identity, which the source has still?

    Raises ShimError, NetworkError.
    """
    with Netns.open(path) as netns, node() as host:
        if problems := check(identity, netns, host, adopt=True):
            raise ShimError("; ".join(str(problem) for problem in problems))


def _refuse_taken(identity: Identity, host: Netns) -> None:
    """Raises ShimError if anybody but the source answers for one of the addresses."""
    macs = {link.mac for link in identity.links if link.mac}
    behind = {link.name: link.host.bridge for link in identity.links if link.host}
    for bridge in sorted({name for name in behind.values() if name}):
        ips = [one.ip for one in global_addresses(identity) if behind.get(one.ifname) == bridge]
        if taken := probe(host, bridge, ips, own_macs=macs):
            raise ShimError("; ".join(f"{conflict} on '{bridge}'" for conflict in taken))


def leads(identity: Identity) -> bool:
    """Whether this node sees, and translates, what a container sends, once it is in a bridge here.

    Raises NetworkError.
    """
    with node() as host:
        return _leads(identity, host)


def translations(identity: Identity) -> tuple[conntrack.Translations, tuple[str, ...]]:
    """What this node translates for a container, and what of that stays behind, a sentence each."""
    try:
        with node() as host:
            return conntrack.capture(host, (one.ip for one in global_addresses(identity)))
    except NetworkError:  # a kernel without connection tracking translates nothing
        return (), ()


def translate(identity: Identity, entries: conntrack.Translations) -> tuple[str, ...]:
    """Let this node go on with what the old one translated; what it cannot take over, a sentence each."""
    # To take one over may end others with its ports: by a peer's word only those of its own container.
    ours = {str(ipaddress.ip_address(one.ip)) for one in global_addresses(identity)}
    its_own = tuple(one for one in entries if one.original.src in ours and one.reply.dst in ours)
    warnings: tuple[str, ...] = ()
    if n_others := len(entries) - len(its_own):
        warnings = (
            f"the old node named connections that are not the container's ({n_others}): those are left as "
            "they are",
        )
    if not its_own:
        return warnings
    try:
        with node() as host:
            return warnings + conntrack.restore(host, its_own)
    except NetworkError as error:
        return (*warnings, f"connections that the old node translated will be reset: {error}")


class Plug:
    """A namespace that is about to be plugged in. Opening and closing take 10 ms and more: do that while it
    runs, on one of the nodes.
    """

    def __init__(self, identity: Identity, path: Path, *, away: bool = False) -> None:
        """path: of the namespace. away: as in `make`. Raises NetworkError."""
        self._identity = identity
        self._netns = Netns.open(path)
        self._muted = mute.is_muted(self._netns)
        self._applied: Applied | None = None
        if away:
            with node() as host:
                self._applied = attach(self._netns, host)
        self._announcer = Announcer(self._netns, global_addresses(identity))

    def lead_in(self) -> None:
        """Route to one that is away. Not at the decision only: nobody runs, and whoever is routed in there
        hears nothing. Idempotent. Raises NetworkError.
        """
        if self._applied is not None:
            with node() as host:
                plug_routed(self._applied, host, global_addresses(self._identity))

    def put_in(self) -> None:
        """Let it hear and be heard, and tell everybody. Raises NetworkError."""
        if self._muted:
            mute.unmute(self._netns)
        elif self._applied is None:
            with node() as host:
                _put_in(self._identity, host)
        self._announcer.send()

    def close(self) -> None:
        """Done, or called off; again does no harm."""
        self._announcer.close()
        self._netns.close()


def tidy(path: Path) -> None:
    """Remove what made a namespace mute, which it is no more, and tell everybody once more.

    Idempotent; nobody waits for it.
    """
    with contextlib.suppress(NetworkError), Netns.open(path) as netns:
        mute.tidy(netns)
        # RFC 5227 announces twice, since the first may be lost. What it still has: it has run for a while.
        with Announcer(netns, global_addresses(capture(netns, None))) as announcer:
            announcer.send()


def unplug(identity: Identity) -> None:
    """Take the host ends out of their bridges, as far as they are there. Raises NetworkError."""
    with node() as host, host.ipr() as ipr:
        for link in identity.links:
            if link.host is not None and rtnl.link_named(ipr, link.host.name) is not None:
                _each(ipr, link.host.name, None, {})


def unroute(identity: Identity) -> None:
    """Route to a container on this node no more, which is not its home, and forget what it said to others.

    Idempotent. Raises NetworkError.
    """
    ours = {one.ip for one in global_addresses(identity)}
    try:
        with node() as host, host.ipr() as ipr:
            names = host.names()
            indexes = {name: index for index, name in names.items()}
            for family in (AF_INET, AF_INET6):
                for one in rtnl.routes(ipr, family, MAIN):
                    route = messages.route_from(one, names)
                    if route is None or route.protocol != PROTOCOL:
                        continue
                    if route.destination.partition("/")[0] in ours:
                        rtnl.change(ipr, "route", messages.route_to(route, indexes), "delete")
    except OSError as error:
        raise NetworkError(f"could not remove a route: {error.strerror}; look at `ip route`") from error
    with contextlib.suppress(NetworkError), node() as host:
        oneway.forget(host, global_addresses(identity))


def bridged(identity: Identity, home: Identity) -> Identity:
    """The identity of a container that is away, with the bridges that it had at home."""
    bridges = {link.name: link.host.bridge for link in home.links if link.host}
    links = tuple(
        replace(link, host=replace(link.host, bridge=bridges.get(link.name))) if link.host else link
        for link in identity.links
    )
    return replace(identity, links=links)


def _each(ipr: Any, end: str, bridge: str | None, port: dict[str, int]) -> None:
    try:
        _plug(ipr, end, bridge, port)
    except OSError as error:
        raise NetworkError(
            f"could not plug '{end}' into '{bridge}': {error.strerror}; look at both"
        ) from error


def remove(identity: Identity, path: Path) -> None:
    """Remove a namespace and the host ends of its interfaces. Idempotent. Raises NetworkError."""
    ends = {link.host.name for link in identity.links if link.host is not None}
    if not path.exists():
        return
    with node() as host, host.ipr() as ipr:
        for one in rtnl.links(ipr):
            if one.attributes["IFLA_IFNAME"] in ends:
                rtnl.link(ipr, "del", index=one.header["index"])
    Netns(path, -1).remove()
