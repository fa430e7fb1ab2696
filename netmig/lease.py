"""Who an address belongs to while nobody runs with it.

CNI's host-local keeps its leases as files: `DATA_DIR/NETWORK/IP` holds the container's id and the interface,
and every change is made under a lock on the file `lock` beside them. A lease that torpor writes there is as
good as host-local's own: its ADD passes the address by, its DEL frees it.

A new sandbox gets a reserved address without a moment in which somebody else could: `hand_over` the lease to
the new sandbox's id, call ADD with `with_static_ipam(...)`, DEL later with the network's own configuration.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import time
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from netmig.errors import NetworkError

DEFAULT_DATA_DIR = Path("/var/lib/cni/networks")
RESERVED_PREFIX = "torpor-"
"""Ids that begin so belong to no container: their address waits for one that sleeps or moves."""

_IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_NETWORK_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.\-]*")


class AddressTaken(NetworkError):
    """The address is leased to somebody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whom an address is leased to: a container (its sandbox, in a pod) and the interface in it."""

    container_id: str
    ifname: str = "eth0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """An address and its owner. age_s: how long ago the lease was written, seconds."""

    ip: str
    owner: Owner
    age_s: float


class Reserver(Protocol):
    """A store of leases. Every method is safe against others who use the same store at the same time."""

    def reserve(self, ip: str, owner: Owner) -> None:
        """Lease an address; again for the same owner does no harm.

        Raises AddressTaken if another owner has it, NetworkError if this store cannot give it.
        """
        ...

    def release(self, ip: str, owner: Owner) -> bool:
        """Give an address back; False, and nothing is changed, if this owner does not have it."""
        ...

    def hand_over(self, ip: str, old: Owner, new: Owner) -> None:
        """Let `new` have what `old` has, with no moment between. Again does no harm. Raises AddressTaken."""
        ...

    def owner(self, ip: str) -> Owner | None:
        """Who has an address; None if nobody."""
        ...

    def stale(self, alive_ids: Collection[str]) -> tuple[Lease, ...]:
        """Leases of containers that are not alive, reservations of torpor's excepted."""
        ...


class HostLocal:
    """The leases of one network of CNI's host-local plugin on this node."""

    def __init__(
        self, network: str, data_dir: Path = DEFAULT_DATA_DIR, ranges: Sequence[_Range] = ()
    ) -> None:
        """network: the name in CNI's configuration. ranges: what the plugin may give; () if not known."""
        if not _NETWORK_NAME.fullmatch(network):
            raise NetworkError(
                f"could not use network '{network}': CNI allows letters, digits and _.- in a name; correct it"
            )
        self.path = data_dir / network
        self._ranges = tuple(ranges)

    @classmethod
    def of(cls, conf: Mapping[str, Any]) -> HostLocal:
        """The store of a network, from its CNI configuration (one plugin's, or a list's).

        Raises NetworkError if its addresses are not host-local's.
        """
        for plugin in conf.get("plugins", [conf]):
            ipam: dict[str, Any] = plugin.get("ipam") or {}
            if ipam.get("type") == "host-local":
                break
        else:
            raise NetworkError(
                f"could not use network '{conf.get('name')}': host-local does not give its addresses; "
                "see `torpor net pin` for other plugins"
            )
        return cls(str(conf["name"]), Path(ipam.get("dataDir") or DEFAULT_DATA_DIR), tuple(_ranges(ipam)))

    def check(self, ip: str, *owners: Owner) -> None:
        """Raises AddressTaken if somebody else has an address, NetworkError if it is in no range."""
        address = self._ours(ip)
        has = self._read(address)
        if has is not None and has not in owners:
            raise _taken(address, has)

    def reserve(self, ip: str, owner: Owner) -> None:
        """See Reserver. Raises NetworkError also for an address outside of the network's ranges."""
        address = self._ours(ip)
        with self._locked():
            has = self._read(address)
            if has is None:
                self._write(address, owner)
            elif has != owner:
                raise _taken(address, has)

    def _ours(self, ip: str) -> _IPAddress:
        address = ipaddress.ip_address(ip)
        if self._ranges and not any(address in allowed for allowed in self._ranges):
            raise NetworkError(
                f"could not reserve {address}: network '{self.path.name}' of this node has no such address; "
                f"its ranges are {', '.join(map(str, self._ranges))}"
            )
        return address

    def release(self, ip: str, owner: Owner) -> bool:
        """See Reserver."""
        address = ipaddress.ip_address(ip)
        if self._read(address) is None:
            return False  # and no store is made where there is none
        with self._locked():
            if self._read(address) != owner:
                return False
            self._file(address).unlink()
            return True

    def hand_over(self, ip: str, old: Owner, new: Owner) -> None:
        """See Reserver."""
        address = ipaddress.ip_address(ip)
        with self._locked():
            has = self._read(address)
            if has is None:
                raise NetworkError(f"could not hand address {address} over: nobody has it; reserve it first")
            if has not in (old, new):
                raise _taken(address, has)
            self._write(address, new)

    def owner(self, ip: str) -> Owner | None:
        """See Reserver."""
        return self._read(ipaddress.ip_address(ip))

    def leases(self) -> tuple[Lease, ...]:
        """Every lease of the network, sorted by address."""
        now = time.time()
        found: list[tuple[_IPAddress, Lease]] = []
        for path in self.path.iterdir() if self.path.is_dir() else ():
            address = _address(path.name)
            has = self._read(address) if address is not None else None
            if address is None or has is None:
                continue
            with suppress(FileNotFoundError):
                age_s = max(0.0, now - path.stat().st_mtime)
                found.append((address, Lease(ip=str(address), owner=has, age_s=age_s)))
        return tuple(lease for _, lease in sorted(found, key=lambda item: (item[0].version, int(item[0]))))

    def stale(self, alive_ids: Collection[str]) -> tuple[Lease, ...]:
        """See Reserver."""
        return tuple(
            lease
            for lease in self.leases()
            if lease.owner.container_id not in alive_ids
            and not lease.owner.container_id.startswith(RESERVED_PREFIX)
        )

    def _file(self, address: _IPAddress) -> Path:
        return self.path / str(address)

    @contextmanager
    def _locked(self) -> Generator[None]:
        """host-local's own lock on the store; it waits for those who have it."""
        self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _read(self, address: _IPAddress) -> Owner | None:
        try:
            # Bytes: reading as text would turn the \r\n into one character.
            text = self._file(address).read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return None
        container_id, _, ifname = text.strip().partition("\r\n")
        return Owner(container_id=container_id.strip(), ifname=ifname.strip())

    def _write(self, address: _IPAddress, owner: Owner) -> None:
        """Complete, on disk, and in place by one rename: host-local reads without knowing of us."""
        # Not an address, so that host-local, should we be killed here, takes it for no lease. Whoever has the
        # lock has this name.
        new = self.path / f"{RESERVED_PREFIX}lease.new"
        with new.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(f"{owner.container_id}\r\n{owner.ifname}".encode())
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._file(address))
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class Static:
    """Addresses that somebody wrote down by hand (CNI's `static`): without a store nothing can be taken.

    Whether an address is free is then only what `netmig.claim.probe` says.
    """

    def reserve(self, ip: str, owner: Owner) -> None:
        """See Reserver."""

    def release(self, ip: str, owner: Owner) -> bool:
        """See Reserver."""
        return True

    def hand_over(self, ip: str, old: Owner, new: Owner) -> None:
        """See Reserver."""

    def owner(self, ip: str) -> Owner | None:
        """See Reserver."""
        return None

    def stale(self, alive_ids: Collection[str]) -> tuple[Lease, ...]:
        """See Reserver."""
        return ()


def with_static_ipam(
    conf: Mapping[str, Any], addresses: Iterable[str], gateways: Iterable[str] = ()
) -> dict[str, Any]:
    """A CNI configuration that gives exactly these addresses, for one ADD; DEL needs the original.

    conf: one plugin's, or a list's. addresses: with prefix lengths, "10.88.0.10/24". gateways: at most one of
    each family. The routes and the name servers of the original stay.
    """
    gateway_of = {ipaddress.ip_address(text).version: text for text in gateways}
    fixed: list[dict[str, str]] = []
    for text in addresses:
        entry = {"address": text}
        if gateway := gateway_of.get(ipaddress.ip_interface(text).version):
            entry["gateway"] = gateway
        fixed.append(entry)

    def changed(plugin: Mapping[str, Any]) -> dict[str, Any]:
        ipam = plugin.get("ipam")
        if not ipam:
            return dict(plugin)
        kept = {key: ipam[key] for key in ("routes", "dns") if key in ipam}
        return {**plugin, "ipam": {"type": "static", "addresses": fixed, **kept}}

    if "plugins" in conf:
        return {**conf, "plugins": [changed(plugin) for plugin in conf["plugins"]]}
    return changed(conf)


@dataclass(frozen=True, slots=True)
class _Range:
    first: _IPAddress
    last: _IPAddress

    def __contains__(self, address: _IPAddress) -> bool:
        return address.version == self.first.version and int(self.first) <= int(address) <= int(self.last)

    def __str__(self) -> str:
        return f"{self.first} to {self.last}"


def _ranges(ipam: Mapping[str, Any]) -> Generator[_Range]:
    """The ranges of host-local's configuration, which begin and end with their subnet if it says no more."""
    sets: list[list[Mapping[str, Any]]] = list(ipam.get("ranges") or [])
    if ipam.get("subnet"):
        sets.append([ipam])
    for entry in (entry for group in sets for entry in group):
        subnet = ipaddress.ip_network(entry["subnet"], strict=False)
        # The network's own address is never given, nor IPv4's broadcast address.
        last = subnet[-2] if subnet.version == 4 and subnet.num_addresses > 2 else subnet[-1]
        start, end = entry.get("rangeStart"), entry.get("rangeEnd")
        yield _Range(
            ipaddress.ip_address(start) if start else subnet[1] if subnet.num_addresses > 1 else subnet[0],
            ipaddress.ip_address(end) if end else last,
        )


def _address(name: str) -> _IPAddress | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _taken(address: _IPAddress, owner: Owner) -> AddressTaken:
    return AddressTaken(
        f"could not lease address {address}: container '{owner.container_id}' ({owner.ifname}) has it; "
        "delete that container, or see `torpor net leases`"
    )
