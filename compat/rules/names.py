"""Names that only one may have in a network namespace: ports, abstract unix sockets; and its interfaces."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compat.rules.case import Case, finding, given, part, rule
from engines.api import AbstractNeed, Finding, SocketNeed
from engines.namespaces import inside

_IP_FREEBIND = 15
_KINDS: Mapping[str, str] = {"tcp": "SOCK_STREAM", "udp": "SOCK_DGRAM"}
_UNIX_KINDS: Mapping[str, str] = {
    "stream": "SOCK_STREAM",
    "datagram": "SOCK_DGRAM",
    "seqpacket": "SOCK_SEQPACKET",
}


def _bound(need: SocketNeed) -> bool:
    """Whether a restore binds a socket to a port of its own (that of a connection is its neighbour's too)."""
    return need.port > 0 and need.protocol in {"tcp", "udp"} and not need.connected


@rule(
    *("place.ports", "place.names", "place.interface"),
    about="here",
    source="measured: Address already in use, with two clones in a namespace; Can't set 1:25: No such device",
)
def names(case: Case) -> Iterator[Finding]:
    """A port, or the abstract name of a unix socket, that somebody else has in the network namespace that the
    new container joins cannot be bound again, and an interface that a socket is bound to must be there. End
    the other one, or give the container another network namespace. (Each is bound for a moment.)
    """
    needs = case.needs
    sockets = [need for need in needs.sockets if _bound(need)]
    links = sorted({need.interface for need in needs.sockets if need.interface})
    kind = given(case.new, "network")
    if not (sockets or links or needs.abstract) or kind == "own" or case.has_kernel:
        return
    path = namespace_path(case.new, "network") if kind == "joined" else None
    found: list[Finding] = []

    def look() -> None:
        found.extend(_ports(sockets))
        found.extend(_abstract(needs.abstract))
        found.extend(_links(links))

    try:
        inside("net", Path(path), look) if path else look()
    except FileNotFoundError:
        return  # spec.namespaces says so
    except OSError as error:
        yield finding(
            "place.ports",
            "unknown",
            f"the network namespace {path} cannot be looked into: {error.strerror}",
            "look whether it is there",
        )
        return
    yield from found


def _ports(sockets: Sequence[SocketNeed]) -> Iterator[Finding]:
    for need in sockets:
        if _taken(need):
            yield finding(
                "place.ports",
                "refuse",
                f"{need.protocol} port {need.port} ({need.address}) is taken in the new container's network "
                "namespace",
                "end what has it there, or give the container another network namespace",
            )


def _taken(need: SocketNeed) -> bool:
    """Whether the kernel refuses the port, asked as CRIU asks: with SO_REUSEADDR and SO_REUSEPORT."""
    import socket

    family = socket.AF_INET6 if need.family == "inet6" else socket.AF_INET
    try:
        with socket.socket(family, getattr(socket, _KINDS[need.protocol])) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if need.family == "inet6":
                trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(need.v6only))
            if need.freebind:
                trial.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
            if need.interface:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, need.interface.encode())
            trial.bind((need.address, need.port))
    except OSError as error:
        # That the address or the interface is not there others say.
        return error.errno == errno.EADDRINUSE
    return False


def _abstract(needs: Sequence[AbstractNeed]) -> Iterator[Finding]:
    import socket

    for need in needs:
        name = bytes.fromhex(need.name)
        try:
            with socket.socket(socket.AF_UNIX, getattr(socket, _UNIX_KINDS[need.kind])) as trial:
                trial.bind(b"\0" + name)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                yield finding(
                    "place.names",
                    "refuse",
                    f"the abstract unix socket '{name.decode(errors='replace')}' is taken in the new "
                    "container's network namespace",
                    "end what has it there, or give the container another network namespace",
                )


def _links(names: Sequence[str]) -> Iterator[Finding]:
    import socket

    for name in names:
        try:
            socket.if_nametoindex(name)
        except OSError:
            yield finding(
                "place.interface",
                "refuse",
                f"a socket of the image is bound to the network interface '{name}', which the new "
                "container's network namespace does not have",
                "give it an interface of this name",
            )


def namespace_path(spec: Mapping[str, Any], kind: str) -> str:
    """Of the namespace of a kind that a spec joins."""
    entries: list[Mapping[str, Any]] = part(spec, "linux").get("namespaces") or []
    return next(str(entry["path"]) for entry in entries if entry.get("type") == kind)
