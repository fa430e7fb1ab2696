"""agent.toml: who this node is among others, and which others may send it containers.

Who may push an image is root on this node, so the file must be root's own.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from netmig.lease import HostLocal, Reserver, Static
from shim.errors import UsageError

DEFAULT = Path("/etc/torpor/agent.toml")
VARIABLE = "TORPOR_AGENT"


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files in PEM: this node's certificate and key, and the authority that signed those of all nodes."""

    certificate: Path
    key: Path
    authority: Path


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another node. Its table's name is the DNS name in its certificate.

    address: "HOST:PORT" of its agent. command: a program whose standard streams are the channel instead, as
    `ssh root@NODE torpor agent --stdio`. may_push: whether it may send containers here.
    """

    address: str = ""
    command: tuple[str, ...] = ()
    may_push: bool = False


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file.

    node: this node's name. listen: "HOST:PORT" for peers, "" if they come over SSH or not at all. state: a
    directory on disk, root's alone. root: the runtime's --root of containers that arrive. cgroup: they live
    below it, "" for where they lived before. leases: the pods' network: its CNI configuration, whose
    ranges are then heeded, or the directory of host-local's store for it; "" if no addresses are leased here.
    via: where each node has a pod network of its own, this node's addresses by which others route to its
    pods, one of each family.
    """

    node: str
    state: Path = Path("/var/lib/torpor/agent")
    listen: str = ""
    root: str = "/run/runc"
    cgroup: str = ""
    leases: str = ""
    via: tuple[str, ...] = ()
    tls: Tls | None = None
    peers: Mapping[str, Peer] = {}

    @property
    def departures(self) -> Path:
        """A directory for each container that leaves."""
        return self.state / "departures"

    @property
    def arrivals(self) -> Path:
        """A directory for each container that arrives, or has arrived and lives here."""
        return self.state / "arrivals"

    @property
    def away(self) -> Path:
        """A directory for each container that has left its home, which this node is, on routed networks."""
        return self.state / "away"

    def peer(self, name: str) -> Peer:
        """A peer by its name. Raises UsageError."""
        if name not in self.peers:
            known = ", ".join(sorted(self.peers)) or "none"
            raise UsageError(f"could not find node '{name}': agent.toml knows {known}; add it there")
        return self.peers[name]

    def reserver(self) -> Reserver:
        """Where this node's addresses are leased. Raises UsageError, NetworkError."""
        path = Path(self.leases)
        if not self.leases:
            return Static()
        if not path.is_file():
            return HostLocal(path.name, path.parent)
        try:
            return HostLocal.of(json.loads(path.read_bytes()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"could not use {path}, `leases` of agent.toml: {error}; correct it") from None

    def check_leases(self) -> None:
        """Raises UsageError, NetworkError if what `leases` names would protect no address."""
        self.reserver()
        path = Path(self.leases)
        made = path.is_file() or any(path.glob("last_reserved_ip.*")) or (path / "lock").is_file()
        if self.leases and not made:
            raise UsageError(
                f"could not use {path}, `leases` of agent.toml: it is no directory that host-local has made; "
                "name the CNI configuration of the pods' network, or dataDir/NAME of that"
            )

    @property
    def unprotected(self) -> tuple[str, ...]:
        """A sentence if nobody keeps others from getting a container's addresses."""
        if self.leases:
            return ()
        return (
            f"agent.toml of node '{self.node}' names no `leases`: its network plugin may give the address to "
            "another pod",
        )


def split(address: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT"; a host with colons stands in brackets. Raises UsageError."""
    host, colon, port = address.rpartition(":")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise UsageError(f"could not use the address '{address}': write HOST:PORT, the port from 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def find(given: Path | None) -> Path:
    """The file that is meant: the one given, the one that TORPOR_AGENT names, or the system's."""
    return given or Path(os.environ.get(VARIABLE) or DEFAULT)


def load(path: Path) -> Config:
    """Read agent.toml; paths in it are absolute. Raises UsageError that names the file and the key."""
    try:
        status = path.stat()
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"could not read {path}: {error.strerror}; `torpor agent --help` shows what belongs in it"
        ) from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UsageError(
            f"could not use {path}: it decides who is root here, so it must be root's and nobody else's to "
            f"write; chown root {path} && chmod 600 {path}"
        )
    try:
        config = msgspec.convert(tomllib.loads(data.decode()), Config, strict=True, dec_hook=_path)
    except RecursionError:
        raise UsageError(f"could not read {path}: it is nested too deep; correct it") from None
    except (ValueError, msgspec.MsgspecError) as error:
        # Of a number that is too long, Python goes on with how a program would raise its limit.
        wrong = str(error).partition("; use sys.")[0]
        raise UsageError(f"could not read {path}: {wrong}; correct it") from None
    if not config.node.strip():
        raise UsageError(f"could not use {path}: `node` is empty; write the name in this node's certificate")
    for name in (config.node, *config.peers):
        if re.search(r"[/\s]", name):
            raise UsageError(
                f"could not use {path}: {name!r} is no name of a node; write the name in its certificate"
            )
    if config.node in config.peers:
        raise UsageError(
            f"could not use {path}: the peer '{config.node}' is this node itself; take its table out, or "
            "correct `node`"
        )
    # The agent would look for what it has begun below the directory that it happens to be started in.
    paths = (("root", config.root), ("leases", config.leases or "/"), ("cgroup", config.cgroup or "/"))
    for key, value in paths:
        if not value.startswith("/"):
            raise UsageError(f"could not use {path}: `{key}` = {value!r} is not an absolute path; correct it")
    if ".." in Path(config.cgroup).parts:
        raise UsageError(
            f"could not use {path}: `cgroup` = {config.cgroup!r} leads up by '..'; write where it ends"
        )
    for address in filter(None, (config.listen, *(peer.address for peer in config.peers.values()))):
        try:
            split(address)
        except UsageError as error:
            raise UsageError(f"could not use {path}: {error}") from None
    for name, peer in config.peers.items():
        if not name:
            raise UsageError(f"could not use {path}: a peer has no name; write [peers.NAME]")
        if bool(peer.address) == bool(peer.command):
            raise UsageError(f"could not use {path}: peer '{name}' needs an address or a command; give one")
        if peer.command and not peer.command[0]:
            raise UsageError(f"could not use {path}: the command of peer '{name}' names no program; name it")
    if config.tls and (
        capital := next((one for one in (config.node, *config.peers) if one != one.lower()), "")
    ):
        raise UsageError(
            f"could not use {path}: '{capital}' has capitals, which DNS names in certificates do not keep; "
            "write it small, on all nodes"
        )
    if re.search(r"[,:\\]", str(config.state)):
        raise UsageError(
            f"could not use {path}: `state` = '{config.state}' has a comma, a colon or a backslash, which "
            "the mount of a root file system does not take; name another directory"
        )
    for one in config.via:
        try:
            ipaddress.ip_address(one)
        except ValueError:
            raise UsageError(f"could not use {path}: {one!r} in `via` is no IP address; correct it") from None
    if len({":" in one for one in config.via}) < len(config.via):
        raise UsageError(f"could not use {path}: `via` has two addresses of one family; leave one of each")
    if (config.listen or any(peer.address for peer in config.peers.values())) and config.tls is None:
        raise UsageError(f"could not use {path}: addresses need certificates; add the table [tls]")
    return config


def _path(kind: type, value: object) -> object:
    """What msgspec asks about types it does not know; NotImplementedError is its word for "nor do I"."""
    if kind is Path and isinstance(value, str):
        if not value.startswith("/"):
            raise ValueError(f"{value!r} is not an absolute path")
        return Path(value)
    raise NotImplementedError
