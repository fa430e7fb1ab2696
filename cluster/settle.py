"""Bringing a migration to its end after a death, a cut link, or a decision of an operator.

The verdict of a departure is the decision of the whole migration. Without one (nobody asked the target to
prepare) or with `abort` the source runs on; with `commit` the target runs. With `hold` the target is asked:
it may have been told by an operator to run. Every step may be repeated.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

from cluster import away, cargo, wiring
from cluster.arrival import Arriving, translations_of
from cluster.channel import Lost, Refused
from cluster.guest import arriving_of
from cluster.here import Here
from cluster.messages import Abort, Answer, Commit, Forget, Gone, Message, Question, Standing
from cluster.records import (
    LEFT,
    OVER,
    PROBLEM,
    STANDING,
    STAYS,
    VERDICT,
    VIA,
    WISH,
    Arrival,
    Departure,
    Record,
    Wish,
    all_of,
)
from cluster.transport import connect
from engines import registry
from engines.api import EngineError
from netmig import conntrack
from netmig import identity as identities
from netmig.errors import NetworkError
from shim import state
from shim.errors import ShimError
from shim.images import layout
from shim.images.layout import Reference
from shim.images.manifest import parse_manifest

_ALIVE = ("running", "paused", "created")
_BEGUN = ("", "reserved", "preparing")
Failures = (ShimError, EngineError, NetworkError, OSError)
"""What may stand against an end; the next try may do better."""


def tell(here: Here, peer: str, *messages: Message) -> Standing | None:
    """Say something to a node on a connection of its own; how it stands after the last, None if out of reach.

    Raises Refused.
    """
    standing: Standing | None = None
    with contextlib.suppress(Lost):
        channel = connect(here.config, peer)
        try:
            for message in messages:
                standing = channel.ask(message, Answer).standing
        finally:
            channel.close()
    return standing


# --- the source ----------------------------------------------------------------------------------------


def departure(here: Here, record: Record) -> bool:
    """Bring a departure to its end; False if that takes the target, which is out of reach.

    The caller holds the record's lock. Raises ShimError, EngineError, NetworkError, OSError.
    """
    plan = record.plan(Departure)
    verdict = record.read(VERDICT)
    if verdict == "hold":
        verdict = _decide(here, record, plan)
        if not verdict:
            return False
        record.write(VERDICT, verdict)
        here.audit("migrate", container=plan.container_id, migration=plan.migration, verdict=verdict)
    if verdict == "commit":
        return _ended(here, record, plan)
    if not record.read(STAYS):  # once: after that it may be leaving for a third node
        resume(here, plan)
        record.write(STAYS, "yes")
    heard = tell(here, plan.peer, Abort(migration=plan.migration, final=True)) is not None
    if not verdict or heard:  # else the target may hold a container that waits for our word
        cargo.unmerge(record.path / cargo.LOWER)
        record.remove()
    return not verdict or heard


def _decide(here: Here, record: Record, plan: Departure) -> str:
    """The verdict that the target's answer or an operator leads to; "" if there is neither."""
    standing: Standing | None = None
    trouble: ShimError | None = None
    try:
        standing = tell(here, plan.peer, Question(migration=plan.migration))
    except ShimError as error:  # it does not let us ask, or we do not know it any more, or not believe it
        trouble = error
    wish = record.read(WISH)
    if trouble is not None and not wish:
        raise trouble
    if standing is None:
        return {"source": "abort", "target": "commit"}.get(wish, "")
    if standing in ("reserved", "preparing"):
        return ""  # somebody is at work there, or has yet to notice that the link was cut
    if standing == "running":
        return "commit"
    alive = here.status(plan.engine, plan.root, plan.container_id) in _ALIVE
    if standing == "prepared" and (wish == "target" or not alive):
        return "commit"
    if standing == "prepared":
        # Only once it is gone there: until then somebody may let it run.
        standing = tell(here, plan.peer, Abort(migration=plan.migration, final=False))
    return {"unknown": "abort", "running": "commit"}.get(standing or "", "")


def resume(here: Here, plan: Departure) -> None:
    """Let the engine do what the verdict says, if a call of its was cut short. Raises EngineError."""
    settings = here.settings(plan.engine, plan.root, plan.directory)
    registry.create(plan.engine, settings).undo(plan.container_id)


def lead_away(here: Here, record: Record, plan: Departure) -> away.Absence | None:
    """It is decided: what comes for a container that leaves its home goes on to the other node.

    None if this is not its home, or has no way of its own to send on. May be repeated. Raises NetworkError,
    ShimError, OSError.
    """
    if plan.returning or not plan.routed:
        return None
    via = tuple(record.read(VIA).split())
    absent = away.Absent(
        migration=plan.migration,
        owner=plan.owner,
        identity=plan.identity,
        peer=plan.peer,
        via=via,
        container_id=plan.container_id,
    )
    return away.Absence.begin(here, absent)


def forget_translations(record: Record) -> None:
    """It is decided: this node translates none of the container's connections, as the other one does it now.

    Idempotent. Raises OSError.
    """
    if entries := translations_of(record):
        with contextlib.suppress(NetworkError), wiring.node() as host:
            conntrack.forget(host, entries)


def switch(here: Here, record: Record, plan: Departure) -> None:
    """It is decided: the container has no network here any more. May be repeated.

    Raises NetworkError, ShimError, OSError.
    """
    came = _came(here, plan)
    if came is not None:
        came.write(LEFT, "yes")  # while it is there: or its home would be told that it has ended
    identity = identities.decode(plan.identity)
    wiring.unplug(identity)
    forget_translations(record)
    if plan.returning:
        wiring.unroute(identity)
    elif absence := lead_away(here, record, plan):
        absence.send_on()


def _came(here: Here, plan: Departure) -> Record | None:
    """The arrival of a container that leaves, if it had come from another node."""
    home = Path(plan.bundle).parent
    came = Record(here.config.arrivals, home.name) if home.parent == here.config.arrivals else None
    return came if came is not None and came.exists() else None


def _ended(here: Here, record: Record, plan: Departure) -> bool:
    if record.read(OVER) == "lost":  # what has its names by now may be what was made of the image
        raise ShimError(_rescued(record, plan))
    if not record.read(OVER):
        switch(here, record, plan)
        resume(here, plan)
        try:
            standing = tell(here, plan.peer, Commit(migration=plan.migration))
        except Refused as error:
            if error.lost:
                _rescue(here, record)
                # Its address is free, for what the image becomes.
                if (sent_on := Record(here.config.away, record.migration)).exists():
                    away.Absence(here, sent_on).gone()
                elif _came(here, plan) is None:
                    away.give_back(here, identities.decode(plan.identity), plan.owner)
                record.write(OVER, "lost", durable=True)
                raise ShimError(_rescued(record, plan)) from error
            raise ShimError(
                f"could not hear from node '{plan.peer}' that container '{plan.container_id}' runs there: "
                f"{error}; put that right there, where the container is, and start it nowhere else"
            ) from error
        if standing != "running":
            return False
        record.write(OVER, "yes")
    # Each once: its names are free then, and may be those of a container that has nothing to do with it.
    if record.read(OVER) == "yes" and not plan.guest:  # whose caller sees that it has ended
        here.delete(plan.engine, plan.root, plan.container_id)
        directory = Path(plan.directory)
        if directory.exists():
            with state.locked(directory, wait_s=5.0, create=True):
                state.remove(directory)
        record.write(OVER, "deleted", durable=True)
    if record.read(OVER) == "deleted":
        # Before the other node is told that it is over: it may send the container back at once.
        if (came := _came(here, plan)) is not None:
            arriving_of(here, came).disconnect()
        else:
            identity = identities.decode(plan.identity)
            wiring.remove(identity, Path(plan.netns))
            away.give_back(here, identity, plan.owner)
        record.write(OVER, "cleared", durable=True)
    return _forgotten(here, record, plan)


def _forgotten(here: Here, record: Record, plan: Departure) -> bool:
    if tell(here, plan.peer, Forget(migration=plan.migration)) is None:
        return False
    # Not before: until then the files with which it had come here may be the only ones on a disk.
    if (came := _came(here, plan)) is not None:
        with came.locked(wait=True) as ours:  # the agent clears up after a container that is gone, too
            if ours and came.exists():
                arriving_of(here, came).clear_up()
    here.audit(
        "migrate", container=plan.container_id, migration=plan.migration, verdict=f"runs on {plan.peer}"
    )
    record.remove()
    return True


def _rescue(here: Here, record: Record) -> None:
    """The target has lost what it had prepared: the image is all there is, and becomes one of this store."""
    store, path = here.node.store, record.path / "image"
    if not store.has(_name(record)):
        with store.staging() as staged:
            for entry in path.iterdir():
                shutil.move(entry, staged / entry.name)
            data = (staged / layout.MANIFEST).read_bytes()
            store.commit(staged, _name(record), manifest=parse_manifest(data))


def _rescued(record: Record, plan: Departure) -> str:
    return (
        f"node '{plan.peer}' has lost container '{plan.container_id}', which runs nowhere: restore it from "
        f"image '{_name(record)}' of this node, then remove '{record.path}'"
    )


def _name(record: Record) -> Reference:
    return Reference(namespace="", name=f"migration-{record.migration}")


# --- the target ----------------------------------------------------------------------------------------


def arrival(here: Here, record: Record) -> None:
    """Bring an arrival on, as far as that needs nobody else. The caller holds the record's lock.

    Raises ShimError, EngineError, NetworkError, OSError.
    """
    with contextlib.closing(arriving_of(here, record)) as arriving:
        _bring_on(arriving, record)


def _bring_on(arriving: Arriving, record: Record) -> None:
    standing, wish = arriving.standing, record.read(WISH)
    if standing == "committed" or (standing == "prepared" and wish == "target"):
        arriving.commit()
    elif standing in _BEGUN:
        arriving.undo()
    elif standing == "settled" and record.read(LEFT):
        return  # its departure brings that to its end
    elif standing == "settled" and arriving.plan.away and arriving.is_over():
        # Its home has the leases, and still sends on to it.
        if tell(arriving.here, arriving.plan.peer, Gone(migration=record.migration)) is not None:
            arriving.leave()
    else:
        arriving.bring_on()


# --- all of them ---------------------------------------------------------------------------------------


def told(error: Exception) -> str:
    """What stands against something, in a sentence that names the file if it is about one."""
    if isinstance(error, (ShimError, EngineError, NetworkError)):
        return str(error)
    if not isinstance(error, OSError) or not error.strerror:
        return f"could not go on: {type(error).__name__}: {error}; report it"
    remedy = {errno.ENOSPC: "free some space", errno.EDQUOT: "free some space", errno.EROFS: "remount it"}
    where = f"'{error.filename}'" if error.filename else "its state"
    return f"could not use {where}: {error.strerror}; {remedy.get(error.errno or 0, 'put that right')}"


def unfinished(here: Here, troubles: list[str] | None = None) -> Iterator[Record]:
    """Migrations that nobody is at work on and that may have something to be done.

    troubles: is given a sentence about each that cannot be looked at; the others are none the worse for it.
    """
    for parent in (here.config.departures, here.config.arrivals):
        records: list[Record] = []
        with _noted(troubles):
            records += all_of(parent)
        for record in records:
            free = False
            with _noted(troubles), record.locked() as ours:
                free = ours and record.exists()
                if ours and not free:
                    record.remove()  # killed before it had begun
            if free:
                yield record


@contextlib.contextmanager
def _noted(troubles: list[str] | None) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if troubles is not None:
            troubles.append(told(error))


def settle_begun(here: Here) -> None:
    """Undo what began to arrive and was never prepared: nobody need be asked, and the same may come again."""
    for record in unfinished(here):
        if record.path.parent == here.config.arrivals and record.read(STANDING) in _BEGUN:
            with contextlib.suppress(Exception), record.locked() as ours:  # `settle_all` tells what is wrong
                if ours and record.exists():
                    arrival(here, record)


def settle_all(here: Here) -> list[str]:
    """Bring every migration on as far as it goes; what stood against it, in sentences."""
    problems: list[str] = []
    for record in unfinished(here):
        # What cannot even be looked at is told by whoever asks what is unfinished.
        with contextlib.suppress(OSError), record.locked() as ours:
            if not ours or not record.exists():
                continue
            try:
                if record.path.parent == here.config.departures:
                    departure(here, record)
                else:
                    arrival(here, record)
            except Exception as error:  # whatever is wrong with one, the others are brought to their end
                if record.exists() and record.read(PROBLEM) != (problem := " ".join(told(error).split())):
                    problems.append(f"migration {record.migration}: {problem}")
                    record.write(PROBLEM, problem)
    return problems


def resolve(here: Here, migration: str, wish: Wish) -> str:
    """Decide what is in doubt, on whichever node this is; what came of it, in words. Raises ShimError."""
    leaving = Record(here.config.departures, migration)
    if leaving.exists():
        if leaving.read(VERDICT) != "hold":
            raise ShimError(f"could not resolve migration {migration}: it is not in doubt here")
        leaving.write(WISH, wish)
        with leaving.locked() as ours:
            if not ours:
                return f"the migration at work will follow: {wish}"
            try:
                departure(here, leaving)
            except Failures as error:
                if leaving.read(VERDICT) == "hold":
                    raise
                return f"decided for the {wish}; what is left of it is tried again: {told(error)}"
        return f"decided for the {wish}"
    coming = Record(here.config.arrivals, migration)
    if not coming.exists():
        raise ShimError(f"could not resolve migration {migration}: this node knows none of this name")
    with coming.locked(wait=True):
        if coming.read(STANDING) != "prepared":
            raise ShimError(f"could not resolve migration {migration}: it is not in doubt here")
        plan = coming.plan(Arrival)
        coming.write(WISH, wish)
        arrival(here, coming)
    here.audit("migrate", migration=migration, verdict=f"resolved: {wish}")
    if wish == "target":
        return f"decided for the target: '{plan.container_id}' runs here"
    # It was promised to the source, which may have decided by now.
    return f"noted: node '{plan.peer}' hears it when it asks, unless it has decided already"
