"""What becomes of a container's addresses and connections when it wakes up: `keep`, `keep-closed` or `new`.

Nothing here loads pyroute2; what changes a namespace is in `adoption`.

Whether a network namespace has an address is tried by binding to it, which is what a restore will do: that
counts addresses that are not yet usable, and routes that make an address local, as the kernel does. Where
IPv4 was never used, or ip_nonlocal_bind is set, the kernel lets everything be bound: there a route is asked
for.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import struct
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engines.api import CheckpointEngine, Finding, Needs, SocketNeed
from netmig.errors import NetworkError
from shim import bundle, identity
from shim.annotations import Network
from shim.config import Config
from shim.errors import AdmissionRefused, ShimError
from shim.state import NETWORK

if TYPE_CHECKING:
    from netmig.identity import Address, Identity

Tcp = Literal["keep", "close"]

RULE = "network.address"
_N_NAMED = 4
_SIOCGIFMTU, _SIOCGIFHWADDR = 0x8921, 0x8927
_NOBODYS = "240.0.0.1"  # reserved (RFC 1112, section 4)


def check_engine(engine: CheckpointEngine, mode: Network | None, *, what: str) -> None:
    """Raises AdmissionRefused if something of the network is to be kept, and the engine can keep nothing."""
    able = engine.capabilities & {"tcp-established", "external-netns"}
    if mode in {"keep", "keep-closed"} and not able:
        raise AdmissionRefused(
            f"could not restore image '{what}' with network: {mode}: engine {engine.name} can keep neither "
            "connections nor addresses; use network: new"
        )


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a restore does about the network.

    netns_path: the namespace that the new container joins, None if that is the host's or made for it.
    addresses: of the image's identity, if they are to be kept. adopt: the identity that the namespace is to
    be given; None if it has the addresses already, or is to have its own. guarded: peers of its connections
    may be kept waiting on this node.
    """

    mode: Network
    tcp: Tcp
    netns_path: Path | None = None
    addresses: tuple[Address, ...] = ()
    adopt: Identity | None = None
    guarded: bool = False
    findings: tuple[Finding, ...] = ()

    @property
    def coming(self) -> tuple[str, ...]:
        """Addresses that the namespace will be given, and that others may not have."""
        return tuple(one.ip for one in self.adopt.addresses) if self.adopt else ()


def plan(
    network: Network | None,
    needs: Needs,
    spec: bundle.Spec,
    directory: Path,
    *,
    leave_running: bool,
    what: str,
    promised: bool = False,
    kept: bool | None = None,
) -> Plan:
    """Decide what becomes of addresses and connections.

    network: what was asked for. directory: the image's. what: the image in words. promised: its container
    still has its addresses elsewhere. kept: whether its checkpoint kept its connections waiting, None if that
    is not known. Raises AdmissionRefused, ImageCorrupt, ShimError.
    """
    tcp = tcp_mode(network, leave_running=leave_running, what=what)
    place = namespace(spec)
    path = place if isinstance(place, Path) and not identity.is_ours(place) else None
    chosen = Plan(
        mode=network or "new",
        tcp=tcp,
        netns_path=path,
        guarded=not leave_running and bool(needs.lock_table) and bool(peers_of(needs)),
        findings=(_ENDED,) if tcp == "keep" and kept is False and peers_of(needs) else (),
    )
    if chosen.mode == "new" or path is None:
        return chosen
    found = identity.read(directory)
    if found is None:
        return replace(chosen, findings=(*chosen.findings, _UNKNOWN))
    from netmig.identity import global_addresses

    addresses = global_addresses(found)
    if absent([one.ip for one in addresses], path):
        return replace(chosen, addresses=addresses, adopt=found)
    if promised:
        return replace(chosen, addresses=addresses, findings=(_HAS_THEM,))
    narrower = _narrower(found, path) if tcp == "keep" else ()
    return replace(chosen, addresses=addresses, findings=(*chosen.findings, *narrower))


_ENDED = Finding(
    rule="network.ended",
    severity="warn",
    message="the image was taken without --keep-tcp, so that its peers were told that its connections have "
    "ended: the program gets back connections that nobody is at the other end of",
    remedy="checkpoint with --stop --keep-tcp, or use network: keep-closed",
)


_UNKNOWN = Finding(
    rule="network.identity",
    severity="unknown",
    message="the image does not say which addresses its container had",
    remedy="checkpoint again with this version of torpor",
)


_HAS_THEM = Finding(
    rule=RULE,
    severity="refuse",
    message="the pod has the addresses that the container still uses on the node that it comes from",
    remedy="let the network plugin give the pod others: it gets these when it is decided",
)


def peers_of(needs: Needs) -> tuple[str, ...]:
    """The addresses at the other end of an image's TCP connections, its own loopback left out."""
    remotes = {str(plain(need.remote)) for need in needs.sockets if need.protocol == "tcp" and need.remote}
    return tuple(sorted(ip for ip in remotes if not plain(ip).is_loopback))


def _narrower(found: Identity, netns_path: Path) -> tuple[Finding, ...]:
    """A refusal for an interface that carries less than the one of the same name did."""
    with _inside(netns_path):
        now = {link.name: mtu_of(link.name) for link in found.links if link.kind != "loopback"}
    return tuple(
        Finding(
            rule="network.mtu",
            severity="refuse",
            message=f"interface {link.name} carries {mtu} bytes and carried {link.mtu} when the container "
            "fell asleep: its connections would stall",
            remedy="raise the MTU, or use network: keep-closed",
        )
        for link in found.links
        if (mtu := now.get(link.name)) and mtu < link.mtu
    )


def judge(needs: Needs, spec: bundle.Spec, *, tcp: Tcp, coming: Collection[str] = ()) -> tuple[Finding, ...]:
    """A refusal for each address that a socket of the image is bound to and the new container will not have.

    coming: addresses that it will be given. Sockets on the wildcard address do not care, nor do connections
    that are closed by the restore. Raises ShimError if the namespace that the spec names cannot be entered.
    """
    bound = {ip: used for ip, used in bound_sockets(needs, tcp=tcp).items() if ip not in coming}
    if not bound:
        return ()
    place = namespace(spec)
    if place == "own":
        if spec.get("hooks"):
            return ()  # they may give it addresses, once it is there
        missing = {address for address in bound if not _is_everywhere(plain(address))}
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
    """Address to the sockets that a restore binds to it, of IPv4 also by way of an IPv6 socket."""
    found: dict[str, list[SocketNeed]] = {}
    for need in needs.sockets:
        free = need.freebind or plain(need.address).is_unspecified
        if not free and not (need.connected and tcp == "close"):
            found.setdefault(str(plain(need.address)), []).append(need)
    return found


def plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address, the IPv4 one where a socket of IPv6 is bound to that."""
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found


def _is_everywhere(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether a namespace that has nothing but its loopback device can bind to an address."""
    return address.is_loopback or address.is_multicast or str(address) == "255.255.255.255"


def _missing(address: str, sockets: Sequence[SocketNeed], where: str) -> Finding:
    named = list(dict.fromkeys(f"{s.protocol} port {s.port} ({s.state})" for s in sockets))
    more = f" and {len(named) - _N_NAMED} more" if len(named) > _N_NAMED else ""
    return Finding(
        rule=RULE,
        severity="refuse",
        message=f"sockets are bound to {address}, which the {where} does not have: "
        f"{', '.join(named[:_N_NAMED])}{more}",
        remedy="give the new container that address, use network: keep-closed, or let the program have its "
        "sockets on all addresses (0.0.0.0 or ::), and no connected UDP socket, at its checkpoint",
    )


def clear(config: Config, directory: Path, search_path: str) -> None:
    """Undo what killed restores did to namespaces, as far as engines do not. Raises NotUndone."""
    network_path = config.state_path / NETWORK
    if network_path.is_dir():
        from shim import adoption  # seldom

        adoption.clear(network_path, directory, search_path)


# --- asking a namespace --------------------------------------------------------------------------------


def absent(addresses: Iterable[str], netns_path: Path | None) -> tuple[str, ...]:
    """The addresses that a network namespace does not have; None is the caller's own.

    Raises ShimError if the namespace cannot be entered.
    """
    with _inside(netns_path):
        return tuple(address for address in addresses if not _has(address))


@contextlib.contextmanager
def _inside(netns_path: Path | None) -> Generator[None]:
    if netns_path is None:
        yield
        return
    from netmig.ns import Netns

    try:
        with Netns.open(netns_path) as netns, netns.inside():
            yield
    except NetworkError as error:
        raise ShimError(str(error)) from error


def mtu_of(interface: str) -> int:
    """Bytes that an interface of this thread's namespace carries; 0 if there is none of the name."""
    answer = _ask(_SIOCGIFMTU, interface)
    return struct.unpack_from("i", answer, 16)[0] if answer else 0


def mac_of(interface: str) -> str:
    """The MAC of an interface of this thread's namespace; "" if there is none of the name."""
    answer = _ask(_SIOCGIFHWADDR, interface)
    return answer[18:24].hex(":") if answer else ""


def _ask(what: int, interface: str) -> bytes:
    import fcntl
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        try:
            return fcntl.ioctl(control, what, struct.pack("16s24x", interface.encode()))
        except OSError:
            return b""


def _has(address: str) -> bool:
    if not _takes(address):
        return False
    if ":" in address or _is_everywhere(plain(address)) or not _takes(_NOBODYS):
        return True
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial, contextlib.suppress(OSError):
        trial.connect((address, 9))  # nothing is sent; one talks to oneself from the same address
        return str(trial.getsockname()[0]) == address
    return False


def _takes(address: str) -> bool:
    """Whether a socket can be bound to an address."""
    import socket  # clones of what listens everywhere ask nothing

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    scopes = [0]
    if ipaddress.ip_address(address).is_link_local and family == socket.AF_INET6:
        scopes = [index for index, _ in socket.if_nameindex()]
    for scope in scopes:
        where = (address, 0) if family == socket.AF_INET else (address, 0, 0, scope)
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as trial:
                trial.bind(where)
        except OSError as error:
            if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV, errno.EINVAL}:
                raise
        else:
            return True
    return False
