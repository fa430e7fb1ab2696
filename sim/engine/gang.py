"""A training gang: works while all its machines live, takes checkpoints, fails, and comes back.

It wakes only when something happens to it. What checkpoints ended in between is counted, unless the policy
wants to hear of each or they share bandwidth with those of others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import simpy

from sim.engine.ahead import ahead, clashes, late
from sim.engine.clock import Clock, LivelockError
from sim.engine.fleet import Fleet
from sim.engine.hardware import Announcement, Incident
from sim.engine.ledger import Ledger, Span
from sim.engine.link import Flow, Link
from sim.engine.orders import Due, Orders
from sim.engine.progress import Progress
from sim.engine.saves import SAME_S, Save, replica_lives
from sim.engine.streams import Streams
from sim.engine.terms import Terms
from sim.maths.laws import Constant, Law
from sim.policies.base import Action, Event, EventKind, Migrate, Policy

MOST_BARREN = 10_000
"""Failures, or decisions at one moment, without more work kept, after which a job is not going to end."""

COUNTS = ("failures", "maintenances", "migrations", "requeues", "swaps", "restarts_from_replica")
"""What is counted of a gang."""

Wait = Generator[simpy.Event, Any, None]
Happened = tuple[Incident | Announcement | Event, Sequence[int]] | None


class _StruckError(Exception):
    """The gang stopped: by a failure, or to queue again."""


class Gang:
    """One gang. `nodes[i]` is the machine in place i."""

    def __init__(
        self,
        number: int,
        clock: Clock,
        fleet: Fleet,
        terms: Terms,
        policy: Policy,
        streams: Streams,
        links: dict[str, Link],
        spans: list[Span] | None,
    ) -> None:
        self.name = f"job{number}"
        self.nodes: list[int | None] = [None] * terms.job.nodes
        self.missing = set(range(terms.job.nodes))
        self.ledger = Ledger()
        self.recoveries_s: list[float] = []
        self.counts = dict.fromkeys(COUNTS, 0)
        self.end_s: float | None = None
        self._clock, self._fleet, self._terms = clock, fleet, terms
        self._costs, self._job = terms.config.costs, terms.job
        self._rng = streams.make("noise", number)
        self._links = links
        self._spans = spans
        self._orders = Orders(clock, terms, policy, self._rng)
        self._progress = Progress(self.name, terms, self.ledger, spans)
        self._alive = self._recovering = False
        self._lost_memory: set[int] = set()
        self._lost_state: set[int] = set()
        self._failed_s: float | None = None
        self._open: tuple[str, float] | None = None
        self._flows: list[tuple[Link, Flow]] = []
        self._unheard: deque[tuple[Announcement, Sequence[int]]] = deque()
        self._barren, self._reached_s = 0, 0.0
        self._moment, self._furthest_s = (-1.0, 0), 0.0
        self._process: simpy.Process | None = None

    @property
    def checkpoints(self) -> int:
        """How many were taken."""
        return self._progress.taken

    def start(self) -> simpy.Process:
        """Begin; the process ends with the work."""
        self._process = self._clock.process(self._run())
        return self._process

    # What the fleet says.

    def struck(self, incident: Incident, places: Sequence[int]) -> None:
        """Machines in these places failed."""
        if self._process is not None and self._process.is_alive:
            self._process.interrupt((incident, places))

    def told(self, announcement: Announcement, places: Sequence[int]) -> None:
        """Machines in these places are said to go."""
        self._wake(announcement.kind, announcement, places)

    def repaired(self, node: int) -> None:
        """A machine that the gang had is whole again."""
        self._wake("repaired", Event("repaired"))

    def _wake(self, kind: EventKind, what: Announcement | Event, places: Sequence[int] = ()) -> None:
        process = self._process
        if process is not None and process.is_alive and kind not in self._orders.ignores:
            process.interrupt((what, places))

    def close(self) -> None:
        """Account for what is under way as watching ends: work in memory is kept, as the job goes on."""
        if self.end_s is not None:
            return
        if self._progress.going:
            self._progress.settle(self._clock.now)
        if self._open is not None:
            bucket, since_s = self._open
            self._spend_until(bucket, since_s)
        if self._recovering:
            self._roll_back()
        self._progress.finish()

    # The life of a gang.

    def _run(self) -> Wait:
        self._tell(Event("start"))
        yield from self._first_start()
        while True:
            try:
                if self._recovering:
                    yield from self._recover()
                yield from self._work()
            except _StruckError:
                continue
            break
        self._progress.finish()
        self.end_s = self._clock.now
        self._fleet.release(self, range(len(self.nodes)))

    def _first_start(self) -> Wait:
        while True:
            try:
                yield from self._claim()
                yield from self._spend(self._draw(self._costs.startup), "startup")
            except _StruckError:
                # Nothing is lost, but it starts again.
                self._recovering, self._failed_s = False, None
                continue
            return

    def _recover(self) -> Wait:
        """From a stop to work going on."""
        requeue = "requeue" in self._orders.after
        if "planned" not in self._orders.after:
            yield from self._spend(self._draw(self._costs.detection), "detection")
        if "replica" in self._orders.after:
            yield from self._save_from_replica()
        self._roll_back()
        if requeue:
            self.counts["requeues"] += 1
            self._fleet.release(self, range(len(self.nodes)))
            yield from self._spend(self._draw(self._costs.requeue), "waiting")
        ready = "spare" in self._orders.after and 0 < len(self.missing) <= self._fleet.free
        if self.missing:
            yield from self._claim()
            # While it waited, machines may have gone that held copies.
            self._roll_back()
        if ready and self._costs.swap is not None:
            self.counts["swaps"] += 1
            yield from self._spend(self._draw(self._costs.swap), "restart")
        else:
            yield from self._spend(self._draw(self._costs.restart), "restart")
        yield from self._restore()
        self._recovering = False
        self._orders.after.clear()
        self._lost_memory.clear()
        self._lost_state.clear()
        if self._failed_s is not None:
            self.recoveries_s.append(self._clock.now - self._failed_s)
            self._failed_s = None
        self._tell(Event("restart"))

    def _save_from_replica(self) -> Wait:
        law = self._costs.jit_save
        if law is None:
            raise self._orders.refused("a save from a replica, for which costs.jit_save says no time")
        yield from self._spend(self._draw(law), "save_after_failure")
        step_s = self._job.step_s
        work_s = self._progress.work_s
        work_s -= work_s % step_s if step_s else 0.0
        self._progress.take_apart(self._terms.last, self._clock.now, work_s)
        self.counts["restarts_from_replica"] += 1
        self._orders.after -= {"replica"}

    def _roll_back(self) -> None:
        """Lose what no checkpoint holds."""
        self._progress.roll_back(self._clock.now)
        self._alive = False
        if self._progress.work_s > self._reached_s:
            self._reached_s, self._barren = self._progress.work_s, 0

    def _restore(self) -> Wait:
        best = self._progress.saves.best(self._clock.now)
        if best is None:
            return
        place = self._terms.place(best.level)
        link = self._links.get(best.level)
        wholes = 1 + best.parts * self._costs.increment
        if link is not None and place.storage is not None and place.storage.restore is None:
            storage = place.storage
            size = wholes * self._job.state_bytes * storage.write_bps / storage.read_bps
            yield from self._transfer(link, size, "restore")
            return
        yield from self._spend(wholes * self._draw(place.restore), "restore")

    # Work and checkpoints.

    def _work(self) -> Wait:
        job = self._job
        while True:
            self._alive = True
            while self._unheard:
                yield from self._hear(*self._unheard.popleft())
            left_s = job.work_s - self._progress.work_s
            if math.isfinite(left_s) and left_s <= 1e-12 * job.work_s:
                if job.final_checkpoint:
                    yield from self._last_checkpoint()
                return
            self._decide()
            if self._orders.due and self._orders.due[0].at_s <= self._clock.now + SAME_S:
                yield from self._do(self._orders.due.pop(0))
                continue
            due = late(self._progress, self._orders, self._clock.now)
            if due and not clashes(self._progress, self._orders):
                yield from self._checkpoint(self._progress.number + 1)
                continue
            yield from self._go_on(left_s)

    def _go_on(self, left_s: float) -> Wait:
        """Work, and take checkpoints that need no event, until something else happens."""
        until_s, schedule = ahead(
            self._progress, self._orders, self._clock.now, left_s, played=self._each_matters()
        )
        done = until_s == schedule.finish_s(left_s)
        self._progress.begin(schedule, self._clock.now)
        try:
            # Without an end in sight only an interrupt ends it.
            yield self._clock.event() if math.isinf(until_s) else self._clock.timeout(until_s)
        except simpy.Interrupt as interrupt:
            happened: Happened = interrupt.cause  # type: ignore[reportAssignmentType]
        else:
            happened = None
        stall = self._progress.settle(self._clock.now, left_s if done and happened is None else None)
        if stall is not None:
            # It is under way. It goes on unless the gang is struck, and what was heard of waits for its end.
            if happened is not None and stall.rest_s > SAME_S:
                what, places = happened
                if isinstance(what, Incident):
                    self._fail(what, places)
            yield from self._spend(
                stall.rest_s,
                "checkpoint_stall",
                lambda: self._taken(stall.number, stall.rest_s, stall.persist_s),
            )
        if happened is not None:
            yield from self._hear(*happened)

    def _checkpoint(self, number: int) -> Wait:
        """Take the checkpoint of this number, as an event of its own."""
        level = self._orders.regime.level(number)
        stall_s, persist_s = self._orders.plan().cost_s(number)
        link = self._links.get(level)
        if link is None:
            yield from self._spend(
                stall_s, "checkpoint_stall", lambda: self._taken(number, stall_s, persist_s)
            )
            return
        size = self._job.state_bytes * (1 if self._orders.regime.whole(number) else self._costs.increment)
        if self._orders.regime.asynchronous:
            if self._flows:
                # One is written at a time, or they would pile up.
                yield from self._wait(self._flows[-1][1].done, "checkpoint_stall")
            yield from self._spend(
                stall_s, "checkpoint_stall", lambda: self._write(link, size, number, stall_s)
            )
            return
        began_s = self._clock.now
        yield from self._transfer(link, size, "checkpoint_stall")
        self._taken(number, self._clock.now - began_s, 0.0)

    def _last_checkpoint(self) -> Wait:
        """At the end of the work; it is done once this counts."""
        stall_s, persist_s = self._orders.plan().cost_s(self._progress.number + 1)
        yield from self._spend(stall_s + persist_s, "checkpoint_stall")
        self._progress.taken += 1

    def _write(self, link: Link, size: float, number: int, stall_s: float) -> None:
        save = self._taken(number, stall_s, math.inf)
        flow = link.start(size)
        self._flows.append((link, flow))
        flow.done.callbacks.append(lambda _: self._written(flow, save))  # type: ignore[union-attr]

    def _written(self, flow: Flow, save: Save) -> None:
        self._flows = [(link, other) for link, other in self._flows if other is not flow]
        save.valid_s = self._clock.now
        self._wake("persisted", Event("persisted", level=save.level))

    def _taken(self, number: int, stall_s: float, persist_s: float) -> Save:
        """A checkpoint of the interval was taken."""
        now_s = self._clock.now
        save = self._progress.take(self._orders.regime, number, now_s, persist_s)
        if persist_s and math.isfinite(persist_s) and "persisted" not in self._orders.ignores:
            self._orders.later(save.valid_s, "persisted", save.level)
        if "checkpoint" not in self._orders.ignores:
            self._tell(Event("checkpoint", stall_s=stall_s, level=save.level))
        return save

    def _do(self, due: Due) -> Wait:
        if due.what == "persisted":
            self._tell(Event("persisted", level=due.level))
        elif due.what == "requeue":
            self._recovering, self._orders.after = True, {"requeue", "planned"}
            self._orders.due.clear()
            raise _StruckError
        else:
            level = due.level or self._terms.last
            yield from self._spend(
                self._draw(self._terms.place(level).blocking.stall),
                "checkpoint_stall",
                lambda: self._progress.take_apart(level, self._clock.now, self._progress.work_s),
            )

    # Failures and announcements.

    def _fail(self, incident: Incident, places: Sequence[int]) -> None:
        """The gang stops.

        Raises:
            _StruckError: always.

        """
        now_s = self._clock.now
        planned = incident.cause == "maintenance"
        self.counts["maintenances" if planned else "failures"] += 1
        self._barren += 1
        if self._barren >= MOST_BARREN:
            raise LivelockError
        if self._failed_s is None:
            self._failed_s = now_s
        for link, flow in self._flows:
            link.cancel(flow)
        self._flows.clear()
        self._orders.due.clear()
        self._lose(incident, places)
        replica = (
            self._alive
            and self._costs.jit_save is not None
            and replica_lives(self._lost_state, self._job.nodes, self._job.replicas)
        )
        self._recovering = True
        self._orders.after = {"planned"} if planned else set()
        self._tell(Event("failure", cause=incident.cause, replica=replica))
        raise _StruckError

    def _lose(self, incident: Incident, places: Sequence[int]) -> None:
        """What was on the machines in these places is gone."""
        self._lost_state.update(places)
        if incident.severity > 0:
            # The memory of a machine outlives a process on it.
            self._lost_memory.update(places)
        self._progress.saves.fail(
            self._clock.now, incident.severity, self._lost_memory, self._orders.regime.copies
        )

    def _hear(self, what: Incident | Announcement | Event, places: Sequence[int]) -> Wait:
        """Something happened while the gang works."""
        if isinstance(what, Incident):
            self._fail(what, places)
        elif isinstance(what, Event):
            self._tell(what)
        else:
            # Less lead by as long as it had to wait, and maybe other machines by now.
            lead_s = what.at_s + what.lead_s - self._clock.now
            going = [place for place in places if self.nodes[place] in what.nodes]
            if not going or lead_s < 0:
                return
            actions = self._tell(Event(what.kind, cause=what.cause, lead_s=lead_s))
            if any(isinstance(action, Migrate) for action in actions):
                yield from self._move(what, going)

    def _move(self, what: Announcement, going: Sequence[int]) -> Wait:
        """Move from machines that are going, if there are as many others."""
        if self._costs.migrate is None:
            raise self._orders.refused("a move, for which costs.migrate says no time")
        if len(going) > self._fleet.free:
            return
        yield from self._spend(self._draw(self._costs.migrate), "migration")
        for place in going:
            if self.nodes[place] in what.nodes and self._fleet.replace(self, place, what):
                self.counts["migrations"] += 1

    # Waiting.

    def _claim(self) -> Wait:
        while self.missing:
            event = self._fleet.claim(self)
            if event is None:
                return
            try:
                yield from self._wait(event, "waiting")
            except _StruckError:
                self._fleet.withdraw(self)
                raise

    def _transfer(self, link: Link, size: float, bucket: str) -> Wait:
        flow = link.start(size)
        try:
            yield from self._wait(flow.done, bucket)
        except _StruckError:
            link.cancel(flow)
            raise

    def _spend(self, seconds: float, bucket: str, then: Callable[[], object] | None = None) -> Wait:
        """Let time pass, then do something. What would end as a failure strikes has ended."""
        if seconds > 0:
            yield from self._wait(self._clock.timeout(seconds), bucket, self._clock.now + seconds, then)
        if then is not None:
            then()

    def _wait(
        self,
        event: simpy.Event,
        bucket: str,
        end_s: float = math.inf,
        then: Callable[[], object] | None = None,
    ) -> Wait:
        since_s = self._clock.now
        while True:
            self._open = bucket, since_s
            try:
                yield event
            except simpy.Interrupt as interrupt:
                happened: Happened = interrupt.cause  # type: ignore[reportAssignmentType]
            else:
                happened = None
            self._spend_until(bucket, since_s)
            since_s = self._clock.now
            if happened is None:
                return
            what, places = happened
            if isinstance(what, Incident):
                if bucket == "waiting":
                    # It has stopped already, and waits for one machine more.
                    self._lose(what, places)
                    continue
                if then is not None and end_s - since_s <= SAME_S:
                    then()
                self._fail(what, places)
            elif isinstance(what, Event):
                self._tell(what)
            else:
                # No work is going that could be saved or moved: it is heard once some is.
                self._unheard.append((what, places))

    def _spend_until(self, bucket: str, since_s: float) -> None:
        now_s = self._clock.now
        self._open = None
        self.ledger.add(bucket, now_s - since_s)
        if self._spans is not None and now_s > since_s:
            self._spans.append(Span(since_s, now_s, self.name, bucket))

    def _draw(self, law: Law) -> float:
        return law.mean if isinstance(law, Constant) else float(law.sample(self._rng, 1)[0])

    def _decide(self) -> None:
        """Notice a policy that goes round in circles, with hardly any time passing or none."""
        self._clock.done_s += max(0.0, self._progress.work_s - self._furthest_s)
        self._furthest_s = max(self._furthest_s, self._progress.work_s)
        if self._clock.worn_out:
            raise LivelockError
        moment_s, times = self._moment
        times = times + 1 if moment_s == self._clock.now else 0
        if times >= MOST_BARREN:
            raise LivelockError
        self._moment = self._clock.now, times

    def _tell(self, event: Event) -> list[Action]:
        progress, kept_s = self._progress, self._progress.kept_s(self._clock.now)
        risk_s = progress.work_s - kept_s
        return self._orders.tell(event, kept_s, risk_s, self._fleet.free, working=not self._recovering)

    def _each_matters(self) -> bool:
        """Whether each checkpoint must be an event."""
        heard = not {"checkpoint", "persisted"} <= self._orders.ignores
        return heard or any(name in self._links for name, _ in self._orders.regime.every)
