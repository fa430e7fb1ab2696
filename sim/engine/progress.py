"""How far the work of a gang has come, and how much of it checkpoints hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sim.engine.ledger import Ledger, Span
from sim.engine.saves import SAME_S, Save, Saves
from sim.engine.schedule import Regime, Schedule
from sim.engine.terms import Terms

MOST_SHOWN = 10_000
"""Checkpoints of a gang that a timeline shows one by one; later stretches show theirs together with work."""


@dataclass(frozen=True, slots=True)
class Stall:
    """The rest of the stall of a checkpoint that is under way, and what comes after it."""

    number: int
    rest_s: float
    persist_s: float


class Progress:
    """Work in memory and on storage.

    Attributes:
        work_s: work in memory.
        since_s: work since the last checkpoint of the interval.
        number: of that checkpoint.
        saves: checkpoints that exist.
        taken: how many were, ever.

    """

    def __init__(self, name: str, terms: Terms, ledger: Ledger, spans: list[Span] | None) -> None:
        self.work_s = 0.0
        self.since_s = 0.0
        self.number = 0
        self.saves = Saves(terms)
        self.taken = 0
        self._name, self._ledger, self._spans = name, ledger, spans
        self._schedule: Schedule | None = None
        self._began_s = 0.0
        self._stretches: list[_Stretch] = []
        self._shown = 0

    @property
    def going(self) -> bool:
        """Whether a stretch of work is under way that has not been counted."""
        return self._schedule is not None

    def begin(self, schedule: Schedule, now_s: float) -> None:
        """Work by a schedule from now on."""
        self._schedule, self._began_s = schedule, now_s

    def settle(self, now_s: float, finished_s: float | None = None) -> Stall | None:
        """Count what the schedule did until now. `finished_s`: all of this work is done.

        Returns:
            the checkpoint that is under way, if one is.

        """
        schedule, began_s = self._schedule, self._began_s
        assert schedule is not None
        self._schedule = None
        elapsed_s = now_s - began_s
        count, work_s, into_s = schedule.progress(elapsed_s)
        if finished_s is not None:
            # All of it, whatever the last digit of a sum says.
            count, work_s, into_s = schedule.before_end(finished_s), finished_s, 0.0
        self._ledger.add("checkpoint_stall", elapsed_s - work_s)
        self.taken += count
        for save in self._ended(schedule, count, now_s):
            self.saves.add(save, now_s)
        self.since_s = work_s - schedule.work_s(count) if count else self.since_s + work_s
        self.number += count
        self.work_s += work_s
        if self._spans is not None:
            self._stretches.append(_Stretch(schedule, began_s, now_s, count, into_s))
        if into_s <= 0:
            return None
        rest_s = schedule.stall_s(count + 1) - into_s
        return Stall(self.number + 1, rest_s, schedule.persist_s(count + 1))

    def _ended(self, schedule: Schedule, count: int, now_s: float) -> list[Save]:
        """Of the checkpoints that ended, those that a failure from now on may go back to, in order."""
        found: list[Save] = []
        regime = schedule.regime
        missing = {name for name, _ in regime.every}
        for k in range(count, 0, -1):
            number = self.number + k
            level = regime.level(number)
            if level not in missing:
                continue
            at_s = self._began_s + schedule.end_s(k)
            valid_s = at_s + schedule.persist_s(k)
            work_s = self.work_s + schedule.work_s(k)
            found.append(Save(level, work_s, number, at_s, valid_s, regime.parts(number)))
            if valid_s <= now_s + SAME_S:
                missing.discard(level)
                if not missing:
                    break
        return found[::-1]

    def take(self, regime: Regime, number: int, now_s: float, persist_s: float) -> Save:
        """A checkpoint of the interval is taken; it counts `persist_s` from now."""
        self.number, self.since_s = number, 0.0
        save = Save(regime.level(number), self.work_s, number, now_s, now_s + persist_s, regime.parts(number))
        self.saves.add(save, now_s)
        self.taken += 1
        return save

    def take_apart(self, level: str, now_s: float, work_s: float) -> None:
        """A checkpoint apart from the interval is taken, of this work, and counts."""
        self.saves.add(Save(level, work_s, self.number, now_s, now_s), now_s)
        self.taken += 1

    def kept_s(self, now_s: float) -> float:
        """Work that a checkpoint holds."""
        best = self.saves.best(now_s)
        return 0.0 if best is None else min(best.work_s, self.work_s)

    def roll_back(self, now_s: float) -> None:
        """Lose what no checkpoint holds."""
        best = self.saves.best(now_s)
        kept_s = 0.0 if best is None else min(best.work_s, self.work_s)
        self._ledger.add("lost_work", self.work_s - kept_s)
        self._show(-math.inf if best is None else best.at_s)
        self.work_s, self.since_s = kept_s, 0.0
        self.number = 0 if best is None else best.number

    def finish(self) -> None:
        """What is in memory is kept."""
        self._show(math.inf)
        self._ledger.add("goodput", self.work_s)

    def _show(self, cut_s: float) -> None:
        """Put the work since the last stop on the timeline: up to `cut_s` kept, then lost."""
        if self._spans is None:
            return
        for stretch in self._stretches:
            self._shown += stretch.count
            together = self._shown > MOST_SHOWN
            pieces = stretch.whole() if together else stretch.pieces()
            if stretch.until_s <= cut_s:
                self._spans += [
                    Span(t0_s, t1_s, self._name, state) for t0_s, t1_s, state in pieces if t1_s > t0_s
                ]
                continue
            for t0_s, t1_s, state in pieces:
                middle_s = min(max(cut_s, t0_s), t1_s) if state != "checkpoint_stall" else t1_s
                if middle_s > t0_s:
                    self._spans.append(Span(t0_s, middle_s, self._name, state))
                if t1_s > middle_s:
                    self._spans.append(Span(middle_s, t1_s, self._name, "lost_work"))
        self._stretches.clear()


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What a schedule did: so many checkpoints ended, and the stall of the next one has come so far."""

    schedule: Schedule
    began_s: float
    until_s: float
    count: int
    into_s: float

    def whole(self) -> Iterator[tuple[float, float, str]]:
        """All but the last stall in one state."""
        stop_s = self.until_s - self.into_s
        yield self.began_s, stop_s, "work_and_checkpoints" if self.count else "work"
        yield stop_s, self.until_s, "checkpoint_stall"

    def pieces(self) -> Iterator[tuple[float, float, str]]:
        """Work and stalls in turns: from, until and state. Work without a stall between is one piece."""
        from_s, at_s, before_s = self.began_s, self.began_s, 0.0
        for number in range(1, self.count + 1):
            work_s = self.schedule.work_s(number)
            stop_s, at_s = at_s + work_s - before_s, self.began_s + self.schedule.end_s(number)
            before_s = work_s
            if at_s - stop_s > SAME_S:
                yield from_s, stop_s, "work"
                yield stop_s, at_s, "checkpoint_stall"
                from_s = at_s
        yield from_s, self.until_s - self.into_s, "work"
        yield self.until_s - self.into_s, self.until_s, "checkpoint_stall"
