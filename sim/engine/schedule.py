"""When checkpoints are due, counted and not played: how many ended by a time, and when the work is done.

Checkpoints are numbered; a number says where the checkpoint goes and whether it is whole. Times here are
since the beginning of a stretch of work and stalls, which goes on until something else happens.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from sim.errors import SimError
from sim.maths.laws import Constant, Law

_LONGEST_CYCLE = 100_000
_MOST_DRAWN = 1_000_000
"""Checkpoints between two incidents: more would take minutes and fill the memory."""

_BLOCK = 256


@dataclass(frozen=True)
class Regime:
    """How checkpoints are taken, as a policy asked for it.

    `every`: name of a level and how often it has its turn; the last level whose turn it is gets the
    checkpoint. The first of each `full_every` is whole.
    """

    interval_s: float = math.inf
    every: tuple[tuple[str, int], ...] = ()
    asynchronous: bool = False
    full_every: int = 1
    copies: int = 0

    def level(self, number: int) -> str:
        """Where the checkpoint of this number goes."""
        return next(name for name, count in reversed(self.every) if number % count == 0)

    def whole(self, number: int) -> bool:
        """Whether it holds everything."""
        return self.parts(number) == 0

    def parts(self, number: int) -> int:
        """How many that hold only what has changed a restart from it reads, beside the whole one."""
        return (number - 1) % self.full_every


@dataclass(frozen=True)
class Price:
    """What a checkpoint of a level takes: time that work stops, then time until it counts."""

    stall: Law
    persist: Law


class Schedule:
    """A stretch of work with its checkpoints, from number `first` + 1 on, `since_s` of work after `first`."""

    def __init__(self, regime: Regime, first: int, since_s: float) -> None:
        self.regime = regime
        self.first = first
        self.since_s = since_s

    def _ends(self, count: int) -> float:
        """Work and stalls up to the end of the count-th checkpoint of the stretch, `since_s` of it before."""
        raise NotImplementedError

    def ended(self, elapsed_s: float) -> int:
        """How many checkpoints end by then."""
        raise NotImplementedError

    def persist_s(self, count: int) -> float:
        """Time from the end of the count-th checkpoint until it counts."""
        raise NotImplementedError

    def end_s(self, count: int) -> float:
        """When the count-th ends; of the 0th, when work since it began."""
        return (self._ends(count) if count else 0.0) - self.since_s

    def stall_s(self, count: int) -> float:
        """What the count-th stalls."""
        return self._ends(count) - (self._ends(count - 1) if count > 1 else 0.0) - self.regime.interval_s

    def work_s(self, count: int) -> float:
        """Work done in the stretch up to the count-th checkpoint."""
        return count * self.regime.interval_s - self.since_s

    def progress(self, elapsed_s: float) -> tuple[int, float, float]:
        """How many checkpoints ended, work done, and how far the next one's stall has come."""
        count = self.ended(elapsed_s)
        into_s = elapsed_s - self.end_s(count)
        interval_s = self.regime.interval_s
        if count == 0:
            # Not by way of an interval, which may be infinite.
            work_s = min(elapsed_s, interval_s - self.since_s)
        else:
            work_s = self.work_s(count) + min(into_s, interval_s)
        return count, max(work_s, 0.0), max(into_s - interval_s, 0.0)

    def finish_s(self, left_s: float) -> float:
        """When `left_s` of work is done; no checkpoint is taken just as it is."""
        if math.isinf(left_s):
            return math.inf
        count = self.before_end(left_s)
        return left_s + self._ends(count) - count * self.regime.interval_s if count else left_s

    def before_end(self, left_s: float) -> int:
        """How many checkpoints are taken before `left_s` of work is done."""
        return max(0, math.ceil((self.since_s + left_s) / self.regime.interval_s * (1 - 1e-12)) - 1)


class Stretch(Schedule):
    """Work without a checkpoint in it."""

    def __init__(self, since_s: float) -> None:
        super().__init__(Regime(), 0, since_s)

    def ended(self, elapsed_s: float) -> int:
        return 0


class CountedSchedule(Schedule):
    """Costs are constants: arithmetic on whole turns of the levels."""

    def __init__(self, cycle: Cycle, first: int, since_s: float) -> None:
        super().__init__(cycle.regime, first, since_s)
        self._cycle = cycle
        self._offset = first % cycle.length
        self._begin = cycle.before[self._offset]

    def _ends(self, count: int) -> float:
        turns, place = divmod(self._offset + count, self._cycle.length)
        return turns * self._cycle.before[-1] + self._cycle.before[place] - self._begin

    def ended(self, elapsed_s: float) -> int:
        if math.isinf(self.regime.interval_s):
            return 0
        total_s = elapsed_s + self.since_s + self._begin
        turns = math.floor(total_s / self._cycle.before[-1])
        rest_s = total_s - turns * self._cycle.before[-1]
        # A rounding error of the division must not count a checkpoint that has not ended, or miss one.
        place = bisect.bisect_right(self._cycle.before, rest_s) - 1
        return turns * self._cycle.length + place - self._offset

    def persist_s(self, count: int) -> float:
        return self._cycle.persists[(self._offset + count) % self._cycle.length]


@dataclass(frozen=True)
class Cycle:
    """A whole turn of a regime's levels: `before[i]` is work and stalls up to the end of its i-th."""

    regime: Regime
    length: int
    before: list[float]
    persists: list[float]


class DrawnSchedule(Schedule):
    """Costs are drawn, in the order of the checkpoints, no further than somebody asks."""

    def __init__(
        self,
        regime: Regime,
        first: int,
        since_s: float,
        draw: Callable[[int], tuple[float, float]],
    ) -> None:
        super().__init__(regime, first, since_s)
        self._draw = draw
        self._sums = [0.0]
        self._persists = [0.0]

    def _ends(self, count: int) -> float:
        if count > _MOST_DRAWN:
            raise SimError(
                f"could not draw the costs of {count} checkpoints in a row, one every "
                f"{self.regime.interval_s:g} s; use a longer interval, or costs that are constants"
            )
        while len(self._sums) <= count:
            stall_s, persist_s = self._draw(self.first + len(self._sums))
            self._sums.append(self._sums[-1] + self.regime.interval_s + stall_s)
            self._persists.append(persist_s)
        return self._sums[count]

    def ended(self, elapsed_s: float) -> int:
        if math.isinf(self.regime.interval_s):
            return 0
        total_s = elapsed_s + self.since_s
        while self._sums[-1] <= total_s:
            self._ends(len(self._sums))
        return bisect.bisect_right(self._sums, total_s) - 1

    def persist_s(self, count: int) -> float:
        self._ends(count)
        return self._persists[count]


class Planner:
    """Makes schedules of a regime. `prices`: of each level it names; `increment`: share of a whole stall."""

    def __init__(
        self, regime: Regime, prices: Mapping[str, Price], increment: float, rng: np.random.Generator
    ) -> None:
        self.regime = regime
        self._increment = increment
        self._drawn = {name: _values(price, rng) for name, price in prices.items()}
        used = [prices[name] for name, _ in regime.every]
        constant = all(isinstance(law, Constant) for price in used for law in (price.stall, price.persist))
        self._cycle = self._turn() if constant and math.isfinite(regime.interval_s) else None

    def schedule(self, first: int, since_s: float) -> Schedule:
        """The stretch that begins after checkpoint `first` and `since_s` of work."""
        if self._cycle is not None:
            return CountedSchedule(self._cycle, first, since_s)
        return DrawnSchedule(self.regime, first, since_s, self.cost_s)

    def cost_s(self, number: int) -> tuple[float, float]:
        """Stall and persist of the checkpoint of this number."""
        stall_s, persist_s = next(self._drawn[self.regime.level(number)])
        share = 1 if self.regime.whole(number) else self._increment
        return stall_s * share, persist_s * share

    def _turn(self) -> Cycle:
        regime = self.regime
        length = math.lcm(regime.full_every, *(count for _, count in regime.every))
        if length > _LONGEST_CYCLE:
            raise SimError(
                f"could not take checkpoints at levels {dict(regime.every)}: their turns meet only every "
                f"{length} checkpoints; use counts that divide each other"
            )
        before, persists = [0.0], [0.0] * length
        for number in range(1, length + 1):
            stall_s, persist_s = self.cost_s(number)
            before.append(before[-1] + regime.interval_s + stall_s)
            persists[number % length] = persist_s
        return Cycle(regime, length, before, persists)


def _values(price: Price, rng: np.random.Generator) -> Iterator[tuple[float, float]]:
    """Costs without an end; blocks of them, as a call for each would be slow."""
    if isinstance(price.stall, Constant) and isinstance(price.persist, Constant):
        pair = price.stall.mean, price.persist.mean
        while True:
            yield pair
    while True:
        stalls, persists = price.stall.sample(rng, _BLOCK), price.persist.sample(rng, _BLOCK)
        yield from zip(stalls.tolist(), persists.tolist(), strict=True)
