"""What becomes of a container's addresses and connections when it wakes up: `keep`, `keep-closed` or `new`.

Whether a network namespace has an address is tried by binding to it, which is what a restore will do: that
counts addresses that are not yet usable, and routes that make an address local, as the kernel does.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from engines.api import Finding, Needs, SocketNeed
from netmig.errors import NetworkError
from netmig.ns import Netns
from shim import bundle
from shim.annotations import Network
from shim.errors import AdmissionRefused, ShimError

Tcp = Literal["keep", "close"]

RULE = "network.address"
_N_NAMED = 4
# States of a TCP socket that has no connection, which CRIU makes again whatever becomes of connections.
_UNCONNECTED = frozenset({"listen", "closed"})


def tcp_mode(network: Network | None, *, leave_running: bool, what: str) -> Tcp:
    """What becomes of connections. Raises AdmissionRefused where keeping them would wedge them silently."""
    if network != "keep":
        return "close"
    if leave_running:
        raise AdmissionRefused(
            f"could not restore image '{what}' with network: keep: its container was left running, so its "
            "peers have moved on and the connections would hang for ever; checkpoint with --stop, or use "
            "network: new"
        )
    return "keep"


def judge(needs: Needs, spec: bundle.Spec, *, tcp: Tcp) -> tuple[Finding, ...]:
    """A refusal for each address that a socket of the image is bound to and the new container will not have.

    Sockets on the wildcard address do not care, nor do connections that are closed by the restore. Raises
    ShimError if the network namespace that the spec names cannot be entered.
    """
    bound = bound_sockets(needs, tcp=tcp)
    if not bound:
        return ()
    place = namespace(spec)
    if place == "own":
        if spec.get("hooks"):
            return ()  # they may give it addresses, once it is there
        missing = {address for address in bound if not _plain(address).is_loopback}
    else:
        missing = set(absent(bound, place if isinstance(place, Path) else None))
    where = "host" if place == "host" else "new network namespace"
    return tuple(_missing(address, bound[address], where) for address in sorted(missing))


def namespace(spec: bundle.Spec) -> Path | Literal["own", "host"]:
    """The network namespace that a spec gives a container: one by path, one of its own, or the host's."""
    path = bundle.namespace_path(spec, "network")
    if path is not None:
        return path
    kinds = {entry.get("type") for entry in spec.get("linux", {}).get("namespaces") or ()}
    return "own" if "network" in kinds else "host"


def bound_sockets(needs: Needs, *, tcp: Tcp) -> dict[str, list[SocketNeed]]:
    """Address to the sockets that a restore binds to it."""
    found: dict[str, list[SocketNeed]] = {}
    for need in needs.sockets:
        connected = need.protocol == "tcp" and need.state not in _UNCONNECTED
        if not _plain(need.address).is_unspecified and not (connected and tcp == "close"):
            found.setdefault(need.address, []).append(need)
    return found


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address, the IPv4 one where a socket of IPv6 is bound to that."""
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found


def _missing(address: str, sockets: Sequence[SocketNeed], where: str) -> Finding:
    named = list(dict.fromkeys(f"{s.protocol} port {s.port} ({s.state})" for s in sockets))
    more = f" and {len(named) - _N_NAMED} more" if len(named) > _N_NAMED else ""
    return Finding(
        rule=RULE,
        severity="refuse",
        message=f"sockets are bound to {address}, which the {where} does not have: "
        f"{', '.join(named[:_N_NAMED])}{more}",
        remedy="give the new container that address, use network: keep-closed, or let the program listen on "
        "all addresses (0.0.0.0 or ::) before its checkpoint",
    )


# --- asking a namespace --------------------------------------------------------------------------------


def absent(addresses: Iterable[str], netns_path: Path | None) -> tuple[str, ...]:
    """The addresses that a socket cannot be bound to in a network namespace; None is the caller's own.

    Raises ShimError if the namespace cannot be entered.
    """
    if netns_path is None:
        return tuple(address for address in addresses if not _has(address))
    try:
        with Netns.open(netns_path) as netns, netns.inside():
            return tuple(address for address in addresses if not _has(address))
    except NetworkError as error:
        raise ShimError(str(error)) from error


def _has(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    scopes = [0]
    if ipaddress.ip_address(address).is_link_local and family == socket.AF_INET6:
        scopes = [index for index, _ in socket.if_nameindex()]
    return any(_binds(family, address, scope) for scope in scopes)


def _binds(family: socket.AddressFamily, address: str, scope: int) -> bool:
    where = (address, 0) if family == socket.AF_INET else (address, 0, 0, scope)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind(where)
    except OSError as error:
        if error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV, errno.EINVAL}:
            return False
        raise
    return True
