"""Giving a new pod the addresses of the container that wakes up in it, where its network plugin did not.

The plugin's interface is renamed and readdressed. While that is done and until the container is there,
nothing goes into the namespace or out of it; and if anything fails, the plugin's own addresses are back
before anybody hears of it. Kubernetes goes on showing the plugin's address: prefer a plugin that gives the
old one.
"""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from engines.api import Finding
from netmig import hold
from netmig.errors import NetworkError
from netmig.identity import Identity, global_addresses
from netmig.lease import HostLocal, Owner
from netmig.mute import mute, tidy, unmute
from netmig.ns import Netns
from netmig.places import open_place
from netmig.recover import hold_directory, journal_path, recover
from shim import leases
from shim.errors import AdmissionRefused, NotUndone
from shim.identity import HOST, use_nft

if TYPE_CHECKING:
    from netmig.journal import Journal, Leased

_RULE = "network.adopted"


def owner_of(directory: Path) -> str:
    """The name of a container in journals and records of holds. directory: torpor's state of it."""
    return f"{directory.name}.{zlib.crc32(directory.parent.name.encode()):08x}"


def let_go(network_path: Path, directory: Path, search_path: str) -> None:
    """It is decided for the container in a mute namespace: let that hear and be heard, and tell everybody.

    Again does no harm. Arguments as of `clear`. Raises NetworkError.
    """
    from netmig.capture import capture
    from netmig.claim import Announcer

    use_nft(search_path)
    _forget(journal_path(network_path, owner_of(directory)))
    for netns, table in _mute_ones(network_path, directory):
        with netns, Netns.open(HOST) as host:
            # CRIU's lock is gone by now, and ours was beside it.
            hold.unlock(netns, table)
            with Announcer(netns, global_addresses(capture(netns, host))) as announcer:
                unmute(netns)
                announcer.send()
            tidy(netns)
            hold.unlock(netns, table, records=hold_directory(network_path))


def _call_off(network_path: Path, directory: Path) -> None:
    """It is decided against the container, which is gone: give the namespace its own addresses back.

    Again does no harm. Raises NetworkError.
    """
    path = journal_path(network_path, owner_of(directory))
    left = _mute_ones(network_path, directory)
    if not left:
        return
    if path.exists():
        from netmig.undo import undo_left

        undo_left(path)
    for netns, table in left:
        with netns:
            tidy(netns)
            hold.unlock(netns, table, records=hold_directory(network_path))


def _forget(path: Path) -> None:
    from netmig.journal import Journal

    journal = Journal.load(path) if path.exists() else None
    if journal is not None:
        journal.forget()


def _mute_ones(network_path: Path, directory: Path) -> list[tuple[Netns, str]]:
    """The namespaces that a container holds until it is decided, opened, each with the table's name."""
    found: list[tuple[Netns, str]] = []
    for path in hold_directory(network_path).glob("*.json"):
        record = hold.read_record(path)
        if isinstance(record, hold.Held) and record.until == "decision":
            netns = open_place(record.place) if record.owner == owner_of(directory) else None
            if netns is not None:
                found.append((netns, record.table))
    return found


def clear(network_path: Path, directory: Path, search_path: str) -> None:
    """Take back what killed calls left of adoptions, this container's and others'.

    network_path: where journals and records lie. directory: torpor's state of the container. search_path:
    where the program nft is. Raises NotUndone if something of this container's would not go away.
    """
    left = (*network_path.glob("journal/*"), *hold_directory(network_path).glob("*"))
    if not left:
        return
    use_nft(search_path)
    try:
        _call_off(network_path, directory)
    except NetworkError as error:
        raise NotUndone(
            f"could not take back the network of container '{directory.name}': {error}; see `torpor net "
            "recover`"
        ) from error
    owner = owner_of(directory)
    failed = [one.detail for one in recover(network_path) if one.owner == owner and one.outcome == "failed"]
    if failed:
        raise NotUndone(
            f"could not take back the network of container '{directory.name}': {'; '.join(failed)}; "
            "see `torpor net recover`"
        )


class Adoption:
    """A namespace that becomes the identity in an image; a context manager, which undoes it on an error.

    Entering looks whether it can be done and reserves the addresses; `take` does it. `open` is for the moment
    when the tasks are there and the engine is about to open the network, `done` for when it is through.
    table: CRIU's, which it removes at its right moment; "" if it is not known. Ours holds the namespace
    beside it, until `open`: a restore that fails takes CRIU's away before the addresses are.
    peers: addresses at the other end of connections that go on. digest: of the image, for which the addresses
    may have been reserved. mute: the addresses are in use elsewhere until somebody decides (`let_go`,
    `clear`): until then the namespace is mute, and all can be undone.
    """

    def __init__(
        self,
        identity: Identity,
        netns_path: Path,
        *,
        network_path: Path,
        directory: Path,
        search_path: str,
        table: str,
        peers: tuple[str, ...],
        digest: str,
        what: str,
        mute: bool = False,
    ) -> None:
        self._identity = identity
        self._digest = digest
        self._path = netns_path
        self._network_path = network_path
        self._owner = owner_of(directory)
        self._search_path = search_path
        self._ours = hold.table_name(self._owner)
        self._theirs = table
        self._peers = peers
        self._what = what
        self._mute = mute
        self._stack = contextlib.ExitStack()
        self._held: list[str] = []
        self._journal: Journal | None = None
        self._findings: tuple[Finding, ...] = ()

    def __enter__(self) -> Self:
        """Raises AdmissionRefused; nothing is touched then. Also NotUndone."""
        use_nft(self._search_path)
        try:
            self._netns = self._stack.enter_context(Netns.open(self._path))
            self._host = self._stack.enter_context(Netns.open(HOST))
            self._check()
            self._lease(self._begin())
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            if isinstance(error, NetworkError):
                raise self._refused(str(error)) from error
            raise
        return self

    def foresee(self) -> tuple[Finding, ...]:
        """Only look whether it can be done, and tell what speaks for and against; nothing is touched."""
        use_nft(self._search_path)
        try:
            with Netns.open(self._path) as self._netns, Netns.open(HOST) as self._host:
                self._check()
                for address in global_addresses(self._identity):
                    if (leased := leases.plugins_of(self._path).get(address.ifname)) is not None:
                        asleep = Owner(container_id=leases.owner_id(self._digest), ifname=address.ifname)
                        leased[0].check(address.ip, leased[1], asleep)
        except NetworkError as error:
            return (Finding(rule=_RULE, severity="refuse", message=str(error), remedy="or use network: new"),)
        return self._findings

    def _check(self) -> None:
        from netmig.apply import check
        from netmig.capture import capture
        from netmig.claim import probe

        now = capture(self._netns, self._host)
        problems = check(self._identity, self._netns, self._host, adopt=True, peers=self._peers, now=now)
        if problems:
            raise NetworkError("; ".join(map(str, problems)))
        had = {one.ip for one in global_addresses(now)}
        wanted = [one.ip for one in global_addresses(self._identity) if one.ip not in had]
        links = (*now.links, *self._identity.links) if self._mute else now.links
        macs = [link.mac for link in links if link.mac]
        bridges = sorted({link.host.bridge for link in now.links if link.host and link.host.bridge})
        taken = [conflict for bridge in bridges for conflict in probe(self._host, bridge, wanted, macs)]
        if taken:
            raise NetworkError(
                f"{'; '.join(map(str, taken))}; remove the pod that has it, the one that sleeps included"
            )
        self._findings = (
            Finding(
                rule=_RULE,
                severity="warn",
                message=f"the network plugin gave the pod {_listed(had)}, and it now has {_listed(wanted)}, "
                "which the container had when it fell asleep: the pod's address in Kubernetes and its "
                "Services lead to the former",
                remedy="let the plugin give the address (torpor net pin)",
            ),
        )

    def _begin(self) -> Journal:
        from netmig.journal import Journal

        path = journal_path(self._network_path, self._owner)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        journal = Journal(path)
        self._journal = journal
        self._stack.callback(journal.close)
        return journal

    def _lease(self, journal: Journal) -> None:
        """So that the plugin gives the addresses to nobody else; it frees them with the pod's own."""
        plugins = leases.plugins_of(self._path)
        missing: list[str] = []
        for address in global_addresses(self._identity):
            if address.ifname not in plugins:
                missing.append(address.ip)
                continue
            store, owner = plugins[address.ifname]
            asleep = Owner(container_id=leases.owner_id(self._digest), ifname=address.ifname)
            had = store.owner(address.ip)
            if had == owner:
                continue
            journal.record(_leased(store, address.ip, owner, asleep if had == asleep else None))
            if had == asleep:
                store.hand_over(address.ip, asleep, owner)
            else:
                store.reserve(address.ip, owner)
        if missing:
            self._findings += (
                Finding(
                    rule=_RULE,
                    severity="warn",
                    message=f"nobody keeps {_listed(missing)} for the pod: the network plugin, whose leases "
                    "are not those of host-local, may give it to another one",
                    remedy="let the plugin give the address (torpor net pin)",
                ),
            )

    def take(self) -> tuple[Finding, ...]:
        """Make the namespace be the identity, and tell its segment; what people should know of it.

        Raises AdmissionRefused.
        """
        from netmig.apply import apply, plug
        from netmig.claim import Announcer

        try:
            for table in filter(None, (self._ours, self._theirs)):
                records = hold_directory(self._network_path)
                until: hold.Until = "decision" if self._mute and table == self._ours else "call"
                hold.lock(self._netns, table, records=records, until=until, owner=self._owner)
                self._held.append(table)
            if self._mute and not mute(self._netns):
                raise NetworkError(f"network namespace '{self._path}' cannot be made mute on this kernel")
            applied = apply(self._identity, self._netns, self._host, adopt=True, journal=self._journal)
            plug(applied, self._host)
            if not self._mute:
                with Announcer(self._netns, global_addresses(self._identity)) as announcer:
                    announcer.send()
            return self._findings + tuple(
                Finding(rule=_RULE, severity="warn", message=one) for one in applied.warnings
            )
        except NetworkError as error:
            raise self._refused(str(error)) from error

    def open(self) -> None:
        """The tasks are there, and only the engine's lock is between them and the world. Raises ShimError."""
        try:
            if not self._mute:
                self._unlock(self._ours)
        except NetworkError as error:
            raise self._refused(str(error)) from error

    def done(self) -> None:
        """The container is there: nothing is to be undone any more. Raises ShimError."""
        try:
            if self._mute:  # the rest is for whoever hears the decision
                self._unlock(*(table for table in self._held if table != self._ours))
                return
            self._unlock(*self._held)
            if self._journal is not None:
                self._journal.forget()
        except NetworkError as error:
            raise self._refused(str(error)) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                if self._journal is not None:
                    from netmig.undo import undo_steps

                    undo_steps(self._journal)
                self._unlock(*self._held)
                if self._mute:
                    tidy(self._netns)
        except NetworkError as worse:
            raise NotUndone(f"{error}; and {worse}") from error
        finally:
            self._stack.close()

    def _unlock(self, *tables: str) -> None:
        for table in tables:  # one may be gone: CRIU removes its own
            hold.unlock(self._netns, table, records=hold_directory(self._network_path))
            self._held.remove(table)

    def _refused(self, cause: str) -> AdmissionRefused:
        return AdmissionRefused(
            f"could not restore image '{self._what}' with its network: {cause}; or use network: new"
        )


def _leased(store: HostLocal, ip: str, owner: Owner, before: Owner | None) -> Leased:
    from netmig.journal import Leased

    return Leased(
        network=store.path.name,
        data_dir=str(store.path.parent),
        ip=ip,
        owner=owner.container_id,
        ifname=owner.ifname,
        before=before.container_id if before else None,
    )


def _listed(addresses: list[str] | set[str]) -> str:
    return ", ".join(sorted(addresses)) or "no address"
