"""The target's side of one connection: answers what the source asks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path

from cluster import wiring
from cluster.arrival import BASE_TAR, Arriving
from cluster.away import Absence
from cluster.channel import Channel, Lost, Refused
from cluster.guest import Guest, arriving_of
from cluster.here import Here
from cluster.messages import (
    PROTOCOL,
    Abort,
    Answer,
    Busy,
    Commit,
    Expect,
    Forget,
    Gone,
    Hello,
    Parent,
    Prepare,
    Question,
    Refusal,
    Reserve,
    Said,
    Send,
    Standing,
)
from cluster.records import IMAGE, STANDING, WISH, Arrival, Record
from cluster.settle import Failures, told
from shim.errors import ShimError
from shim.images.layout import CHECKPOINT, MANIFEST, PARENT
from shim.images.manifest import digest_of

_HELLO_BYTES = 1 << 12
_N_PARENTS = 4  # more than a source makes: a peer does not choose how deep directories are here
_STANDINGS: dict[str, Standing] = {
    "": "unknown",
    "reserved": "reserved",
    "preparing": "preparing",
    "prepared": "prepared",
    "committed": "running",
    "running": "running",
    "settled": "running",
}


def serve(here: Here, channel: Channel, *, trusted: bool, known: Callable[[], None] | None = None) -> None:
    """Answer until the source hangs up.

    trusted: the channel proves no name, but only root can have opened it. known: called once it is one that
    may send containers here. Raises Lost if it ends badly.
    """
    with contextlib.ExitStack() as stack:
        session = _Session(here, channel, stack)
        try:
            session.greet(trusted=trusted)
            if known is not None:
                known()
            while True:
                session.answer(channel.receive(patient=True))
        finally:
            session.end()


class _Session:
    def __init__(self, here: Here, channel: Channel, stack: contextlib.ExitStack) -> None:
        self.here = here
        self.channel = channel
        self.peer = channel.peer
        self._stack = stack  # what the image is staged in
        self._staged: Path | None = None
        self._n_parents = 0
        self._memory_bytes = 0
        self._arriving: Arriving | None = None
        self._held = contextlib.ExitStack()  # the lock, until the container is prepared
        self._failure = ""

    def greet(self, *, trusted: bool) -> None:
        """Who is it, and may they? Raises Lost."""
        said = self.channel.receive(max_bytes=_HELLO_BYTES)
        cause = ""
        if not isinstance(said, Hello) or said.protocol != PROTOCOL:
            cause = f"it speaks another protocol than {PROTOCOL}; install the same torpor on both"
        else:
            self.peer = said.node if trusted else self.peer
            if said.node != self.peer:
                cause = f"'{said.node}' has a certificate for '{self.peer}'; correct its agent.toml"
            elif self.peer == self.here.config.node:
                cause = f"'{self.peer}' is this node itself; name another one, or give each a name of its own"
            elif self.peer not in self.here.config.peers or not self.here.config.peers[self.peer].may_push:
                cause = f"'{self.peer}' may not send containers here; list it in agent.toml with may_push"
        if cause:
            self.here.audit("migrate", peer=self.peer, verdict=f"refused: {cause}")
            self.channel.send(Refusal(cause=cause))
            raise Lost(cause)
        self.channel.send(Answer(standing="unknown"))

    def answer(self, said: Said) -> None:
        """One question. Raises Lost."""
        if isinstance(said, Send):
            self._receive(said)
            return
        try:
            if isinstance(said, Expect):  # for long: it must notice that the source has hung up
                answer = self._expect()
            else:
                with self.channel.busy():
                    answer = self._do(said)
        except Refused as error:
            self.channel.send(Refusal(cause=str(error), lost=error.lost))
        except Failures as error:
            cause = told(error)
            self.here.audit("migrate", peer=self.peer, verdict=f"refused: {cause}")
            self.channel.send(Refusal(cause=cause))
        else:
            self.channel.send(answer)

    def _do(self, said: Said) -> Answer:
        match said:
            case Reserve():
                return self._reserve(said)
            case Parent():
                return self._parent()
            case Prepare():
                return self._prepare(said)
            case Commit():
                with self._record(said.migration) as record:
                    known = self._known(record)
                    times_ms = known.commit()
                    return Answer(standing="running", times_ms=times_ms, warnings=known.warnings)
            case Abort():
                with self._record(said.migration) as record:
                    return Answer(standing=self._abort(record, said))
            case Question():
                if self._failure:  # nobody has been frozen for it yet
                    raise ShimError(self._failure)
                return Answer(standing=self._standing(said.migration))
            case Gone():
                return self._gone(Record(self.here.config.away, said.migration))
            case Forget():
                with self._record(said.migration) as record:
                    if record.exists():
                        self._known(record).settle()
                return Answer(standing="running")
            case _:
                raise Lost(f"could not understand node '{self.peer}': it says {type(said).__name__}")

    def _gone(self, record: Record) -> Answer:
        """A container of this node has ended where it was."""
        if record.exists():
            absence = Absence(self.here, record)
            if absence.plan.peer != self.peer:
                raise Refused(
                    f"the container of migration {record.migration} is not away on '{self.peer}'; see "
                    "`torpor migrate --list` on both nodes"
                )
            absence.gone()
        return Answer(standing="unknown")

    def end(self) -> None:
        """The source has hung up: what is not prepared goes."""
        arriving = self._arriving
        if arriving is not None and arriving.standing in ("reserved", "preparing"):
            arriving.undo()
        if arriving is not None:
            arriving.close()
        self._held.close()

    # --- one migration ---------------------------------------------------------------------------------

    def _reserve(self, said: Reserve) -> Answer:
        record = Record(self.here.config.arrivals, said.migration)
        if self._arriving is not None or record.exists():
            raise ShimError(f"migration {said.migration} is known here already; begin another")
        self._held.enter_context(record.begun())
        try:
            kind = Guest if said.guest else Arriving
            self._arriving, warnings = kind.reserve(self.here, record, self.peer, said)
            self._memory_bytes = said.memory_bytes
        except BaseException:
            self._held.close()
            raise
        leads = wiring.leads(self._arriving.identity)
        if said.trial:
            self._arriving.undo()
            self._forget()
        self.here.audit(
            "migrate",
            peer=self.peer,
            container=said.container_id,
            migration=said.migration,
            verdict="reserved",
        )
        return Answer(standing="reserved", warnings=warnings, via=self.here.config.via, leads=leads)

    def _expect(self) -> Answer:
        if not isinstance(self._arriving, Guest):
            raise ShimError("nobody was announced; install the same torpor on both")
        try:
            self._arriving.expect(lambda: self.channel.send(Busy()))
        except Failures:
            self._arriving.undo()
            self._forget()
            raise
        return Answer(standing="reserved")

    def _receive(self, said: Send) -> None:
        """A file. What stands against it is told when there is a question to answer."""
        path: Path | None = None
        if not self._failure:
            try:
                path = self._place(said)
            except Failures as error:
                self._failure = told(error)
        try:
            self.channel.receive_file(path, said.size_bytes, offset=said.offset)
            if said.place == "base" and self._arriving is not None and not self._failure:
                self._arriving.mount()
        except Lost:
            raise
        except Failures as error:
            self._failure = self._failure or told(error)

    def _place(self, said: Send) -> Path:
        if self._arriving is None:
            raise ShimError(f"file {said.name[:80]!r} belongs to nothing")
        if said.place == "base":
            return self._arriving.record.path / BASE_TAR
        parts = said.name.split("/")
        wrong = len(parts) > 2 or any(part in ("", ".", "..") for part in parts)
        if wrong or PARENT in parts:  # what is a parent is for `_parent` to say
            raise ShimError(f"file {said.name[:80]!r} is none of an image")
        if self._staged is None:
            self._staged = self._stack.enter_context(self.here.node.store.staging())
        path = self._staged.joinpath(*parts)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        return path

    def _parent(self) -> Answer:
        """Keep what has come as the parent of what comes, if there is room for a whole image beside it."""
        if self._arriving is None or self._staged is None:
            raise ShimError(self._failure or "nothing was sent that could be a parent")
        checkpoint_path = self._staged / CHECKPOINT
        try:
            if self._failure or self._n_parents >= _N_PARENTS:
                raise ShimError(self._failure or f"there are {self._n_parents} before it")
            self._arriving.check_space(self._memory_bytes)
            above_path = checkpoint_path.with_name(PARENT)
            checkpoint_path.rename(above_path)
            checkpoint_path.mkdir(mode=0o700)
            above_path.rename(checkpoint_path / PARENT)
        except Failures:
            for path in checkpoint_path.iterdir():
                if path.name != PARENT:
                    path.unlink()
            self._failure = ""
            raise
        self._n_parents += 1
        return Answer(standing="reserved")

    def _prepare(self, said: Prepare) -> Answer:
        arriving, staged = self._arriving, self._staged
        if arriving is None:
            raise ShimError("nothing was announced that could be restored; install the same torpor on both")
        try:
            if self._failure or staged is None:
                raise ShimError(
                    self._failure
                    or "nothing was sent that could be restored; install the same torpor on both"
                )
            arriving.mount()
            arriving.record.write(STANDING, "preparing")
            arriving.record.write(IMAGE, digest_of((staged / MANIFEST).read_bytes()))
            self.here.node.store.commit(staged, arriving.reference)
            self._stack.close()  # it is an image of the store now, which others may use
            arriving.note(said.translations)
            times_ms = arriving.prepare()
        except BaseException:
            arriving.undo()
            self._forget()
            raise
        self._held.close()
        return Answer(standing="prepared", times_ms=times_ms)

    def _forget(self) -> None:
        self._arriving, self._failure = None, ""
        self._held.close()

    def _standing(self, migration: str) -> Standing:
        """How it stands; what a dead process has left half-done is as good as unknown, and goes."""
        record = Record(self.here.config.arrivals, migration)
        if not record.exists():
            return "unknown"
        # The agent looks at its records every now and then. An operator's wish must be heard all the same.
        with record.locked(wait=record.read(STANDING) == "prepared") as ours:
            standing = record.read(STANDING)
            half = standing in ("", "reserved", "preparing")
            if standing == "prepared":  # it asks, so it has not decided: an operator's wish can be followed
                half = record.read(WISH) == "source" or not self._known(record).is_here()
            if ours and half:
                self._known(record).undo()
                return "unknown"
        return _STANDINGS[record.read(STANDING)]

    def _abort(self, record: Record, said: Abort) -> Standing:
        if not record.exists():
            return "unknown"
        standing = _STANDINGS[record.read(STANDING)]
        if record.read(STANDING) == "settled" or (standing == "running" and not said.final):
            return "running"
        self._known(record).undo()
        return "unknown"

    @contextlib.contextmanager
    def _record(self, migration: str) -> Generator[Record]:
        record = Record(self.here.config.arrivals, migration)
        if (
            self._arriving is not None
            and self._arriving.record.migration == migration
            and self._locked_by_us()
        ):
            yield record
            return
        with record.locked(wait=True):
            yield record

    def _locked_by_us(self) -> bool:
        return self._arriving is not None and self._arriving.standing in ("reserved", "preparing")

    def _known(self, record: Record) -> Arriving:
        if not record.exists():
            raise Refused(f"migration {record.migration} is not known here", lost=True)
        if self._arriving is not None and self._arriving.record.migration == record.migration:
            return self._arriving
        if record.plan(Arrival).peer != self.peer:
            raise Refused(f"migration {record.migration} is not between '{self.peer}' and this node")
        return arriving_of(self.here, record)
