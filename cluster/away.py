"""A container that has left the node whose pod network its addresses belong to, where networks are routed.

Its home keeps its leases, under a name of torpor's own as for one that sleeps, so that nobody takes them for
stale: no runtime and no namespace here knows it. It sends on what still comes for it, and answers for it to
its neighbours. It goes from home to another node and back, not on from there: only its home knows the way.

Each has a directory with a journal of its own. That a bridge answers for others serves all that are away: it
begins with the first of them and ends with the last, and has a journal beside theirs.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import msgspec

from cluster import wiring
from cluster.here import Here
from cluster.records import Record, all_of
from netmig import identity as identities
from netmig import oneway
from netmig.apply import answer_for_all, detour
from netmig.claim import announce_on
from netmig.errors import NetworkError
from netmig.identity import Address, Identity, global_addresses
from netmig.journal import Journal
from netmig.lease import RESERVED_PREFIX, Owner
from netmig.ns import Netns
from netmig.undo import undo_steps
from shim.errors import ShimError

_JOURNAL = "journal.jsonl"
_BRIDGES = "bridges.jsonl"  # beside the directories: how the bridges were before any container was away
_HOME = "home"  # written when it has come home, some time before its absence ends


class Absent(msgspec.Struct, frozen=True, kw_only=True):
    """What is away. owner: of its leases. peer: where. via: addresses of that node, by which others reach its
    pods. container_id: "" if it left when that was not noted.
    """

    migration: str
    owner: str
    identity: bytes
    peer: str
    via: tuple[str, ...]
    container_id: str = ""
    schema: int = 1


class Absence:
    """A container that is away from here, by the migration in which it left. All may be repeated, and one
    waits for another at work on the same container.
    """

    def __init__(self, here: Here, record: Record) -> None:
        self.here, self.record = here, record
        self.plan = record.plan(Absent)
        self.identity = identities.decode(self.plan.identity)
        self.keeper = f"{RESERVED_PREFIX}{record.migration}"  # whose its leases are meanwhile

    @classmethod
    def begin(cls, here: Here, absent: Absent) -> Absence:
        """It runs elsewhere now: route to it; `send_on` does the rest, which takes longer.

        Raises NetworkError, ShimError, OSError.
        """
        record = Record(here.config.away, absent.migration)
        with record.begun():
            if not record.exists():
                record.make(absent)
            absence = cls(here, record)
            absence._route(neighbours=False)
        return absence

    def send_on(self) -> None:
        """Route to it unless it has come home, tell its neighbours, and keep its leases.

        Raises NetworkError, UsageError, OSError.
        """
        with self.record.locked(wait=True) as ours:
            if ours:
                self._route(neighbours=True)
                self.keep()

    def keep(self) -> None:
        """Let its leases be those of a container that is away. Raises NetworkError, UsageError."""
        self._hand_over(self.plan.owner, self.keeper)

    def _hand_over(self, old: str, new: str) -> None:
        reserver = self.here.config.reserver()
        for one in global_addresses(self.identity):
            has = Owner(container_id=old, ifname=one.ifname)
            if reserver.owner(one.ip) == has:
                reserver.hand_over(one.ip, has, Owner(container_id=new, ifname=one.ifname))

    def _route(self, *, neighbours: bool) -> None:
        if self.record.read(_HOME):
            return
        journal = _opened(self.record.path / _JOURNAL)
        with contextlib.closing(journal), wiring.node() as host:
            for bridge, version, addresses in _groups(self.identity):
                near = bridge if neighbours else None
                via = next((one for one in self.plan.via if (":" in one) == (version == 6)), None)
                if via is not None:
                    if near is not None:
                        with _bridges(self.here) as path, contextlib.closing(_opened(path)) as of_all:
                            answer_for_all(host, near, of_all, {version})
                    detour(host, addresses, via, bridge=near, journal=journal)
                if near is not None:
                    announce_on(host, near, [one.ip for one in addresses])
            if neighbours:
                with _bridges(self.here):
                    _let_pass(self.here, host)

    def come_home(self) -> None:
        """Send nothing on any more. Raises NetworkError, OSError."""
        with self.record.locked(wait=True) as ours:
            if ours:
                self._stop()

    def _stop(self) -> None:
        self.record.write(_HOME, "yes")
        _undo(self.record.path / _JOURNAL)

    def end(self) -> None:
        """It is not away any more; its leases are its own again. Raises NetworkError, UsageError, OSError."""
        with self.record.locked(wait=True) as ours:
            if ours:
                self._stop()
                self._hand_over(self.keeper, self.plan.owner)
                self._remove()

    def gone(self) -> None:
        """It has ended where it was: its addresses are free. Raises NetworkError, UsageError, OSError."""
        with self.record.locked(wait=True) as ours:
            if ours:
                self._stop()
                for owner in (self.keeper, self.plan.owner):
                    self.here.give_back(self.identity, owner)
                self._remove()

    def _remove(self) -> None:
        with _bridges(self.here) as path:
            others = [one for one in all_of(self.here.config.away) if one.migration != self.record.migration]
            if not any(map(Record.exists, others)):
                _undo(path)
            with wiring.node() as host:
                near = {"lo", *(bridge for bridge, *_ in _groups(self.identity))}
                with contextlib.suppress(NetworkError):  # a kernel without connection tracking
                    oneway.forget(host, global_addresses(self.identity), near)
                _let_pass(self.here, host, but=self.record)
            self.record.remove()


@contextlib.contextmanager
def _bridges(here: Here) -> Generator[Path]:
    """The journal of what the bridges' settings were; nobody else changes them or lets pass in the body."""
    descriptor = os.open(here.config.away, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield here.config.away / _BRIDGES
    finally:
        os.close(descriptor)


def _opened(path: Path) -> Journal:
    journal = Journal.load(path) if path.exists() else Journal(path)
    if journal is None:
        raise NetworkError(
            f"could not use network journal '{path}': another process has it open; end that one"
        )
    return journal


def _undo(path: Path) -> None:
    if path.exists():
        with contextlib.closing(_opened(path)) as journal:
            undo_steps(journal)


def _let_pass(here: Here, host: Netns, but: Record | None = None) -> None:
    """Let the firewall be as all records but one want it. The caller holds the bridges."""
    ips: set[str] = set()
    for record in all_of(here.config.away):
        if record.exists() and (but is None or record.migration != but.migration):
            with contextlib.suppress(NetworkError, ShimError):  # a damaged one takes nothing from the others
                ips.update(one.ip for one in global_addresses(Absence(here, record).identity))
    oneway.let_pass(host, ips)


def keep_passing(here: Here) -> None:
    """Have the firewall again if somebody has flushed it. Raises OSError."""
    with _bridges(here), wiring.node() as host:
        if not oneway.is_let_pass(host):
            _let_pass(here, host)


def absences(here: Here) -> Iterator[Absence]:
    """All containers that are away from here. Raises ShimError."""
    for record in all_of(here.config.away):
        if record.exists():
            yield Absence(here, record)


def absence_of(here: Here, owner: str) -> Absence | None:
    """The absence of the container whose leases are an owner's; None if it is not away."""
    return next((one for one in absences(here) if one.plan.owner == owner), None)


def give_back(here: Here, identity: Identity, owner: str) -> None:
    """Release a container's addresses, unless it is only away. Raises NetworkError, ShimError."""
    if absence_of(here, owner) is None:
        here.give_back(identity, owner)


def no_way(via: tuple[str, ...]) -> str | None:
    """The first of what another node names that is no address to route by, None if all are."""
    for one in via:
        try:
            ipaddress.ip_address(one)
        except ValueError:
            return one
        if "%" in one:  # of an interface there, which is none here
            return one
    return None


def missing(identity: Identity, via: tuple[str, ...]) -> str:
    """The family of the pod's for which a node names no address; "" if there is none."""
    named = {6 if ":" in one else 4 for one in via}
    lacking = sorted({one.version for one in global_addresses(identity)} - named)
    return f"IPv{lacking[0]}" if lacking else ""


def check_way(here: Here, *, routed: bool) -> None:
    """Raises ShimError unless both nodes say the same of their pods' network."""
    if routed != bool(here.config.via):
        mine, theirs = ("has", "has not") if here.config.via else ("has not", "has")
        raise ShimError(
            f"its agent.toml {mine} `via` and the other one's {theirs}: either each node has a pod network "
            "of its own, to which others route, or none; name `via` on both, or on neither"
        )


def _groups(identity: Identity) -> Iterator[tuple[str | None, int, list[Address]]]:
    """The addresses by bridge and family."""
    bridges = {link.name: link.host.bridge if link.host else None for link in identity.links}
    groups: dict[tuple[str | None, int], list[Address]] = {}
    for one in global_addresses(identity):
        groups.setdefault((bridges.get(one.ifname), one.version), []).append(one)
    for (bridge, version), addresses in groups.items():
        yield bridge, version, addresses
