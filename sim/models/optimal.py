"""The cheapest way to run a job over regions when everything is known before, by dynamic programming.

What SkyNomad (NSDI 2027) calls Optimal, after its released simulator: progress, restarts and moves are in
whole ticks, so that it is a plan and no bound; what it costs comes out when it is followed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimError
from sim.models.regions import Market, RegionalJob
from sim.policies.base import Action, Event, Place, RunOn, State

Step = tuple[Place, str]
Costs = NDArray[np.float64]
Codes = NDArray[np.int64]

_PLACES: tuple[Place, ...] = ("none", "on-demand", "spot")


class Plan:
    """Follows a plan, tick by tick."""

    name = "optimal"
    regional = True

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    def on_event(self, state: State, event: Event) -> list[Action]:
        if event.kind != "tick":
            return []
        place, region = self._steps[min(round(state.now_s / state.tick_s), len(self._steps) - 1)]
        return [RunOn(place, region)]


def no_longer(source: Market, target: Market) -> float:
    """A restart takes as long when the checkpoint comes from another region."""
    return 0.0


def plan(
    job: RegionalJob,
    markets: Sequence[Market],
    start: int = 0,
    move_s: Callable[[Market, Market], float] = no_longer,
) -> list[Step]:
    """Where to run at each tick until the deadline.

    Args:
        job: the job.
        markets: the regions.
        start: the tick at which the job is handed in.
        move_s: how much longer a restart takes when the checkpoint comes from another region.

    Raises:
        SimError: no plan meets the deadline.

    """
    table = _Table(job, markets, move_s)
    ticks = math.floor(job.deadline_s / job.tick_s)
    trail = [
        table.advance(np.array([bool(market.available[start + tick]) for market in markets]))
        for tick in range(ticks)
    ]
    return table.back(trail)


class _Table:
    """The least cost of each state: place, region, ticks of restart left, ticks of work done.

    A state's code is its place in the table but for the work, and one more for the state before the first
    start; what led to a state is a code times 2, plus 1 where a tick of work was done.
    """

    def __init__(
        self, job: RegionalJob, markets: Sequence[Market], move_s: Callable[[Market, Market], float]
    ) -> None:
        self.markets = markets
        self.need = math.ceil(job.work_s / job.tick_s - 1e-9)
        first = math.ceil(job.restart_s / job.tick_s - 1e-9)
        size = len(markets)
        self.ticks = np.full((size + 1, size), first)  # by source, the last one the state before the first
        self.dollars = np.zeros((size + 1, size))
        for i, source in enumerate(markets):
            for j, target in enumerate(markets):
                longer_s = move_s(source, target) if i != j else 0.0
                self.ticks[i, j] = math.ceil((job.restart_s + longer_s) / job.tick_s - 1e-9)
                if source.area != target.area:
                    self.dollars[i, j] = job.state_bytes * job.move_usd_per_byte
        hours = job.tick_s / 3600
        self.price = np.array(
            [
                [0.0] * size,
                [market.on_demand_price * hours for market in markets],
                [market.spot_price * hours for market in markets],
            ]
        )
        self.shape = (3, size, max(1, int(self.ticks.max())), self.need + 1)
        self.best: Costs = np.full(self.shape, np.inf)
        self.codes: Codes = 2 * np.arange(math.prod(self.shape[:3])).reshape(self.shape[:3])
        self.before = np.full(self.need + 1, np.inf)
        self.before[0] = 0.0

    def advance(self, spot: NDArray[np.bool_]) -> Codes:
        """One tick; what led to each state."""
        best, codes = self.best, self.codes
        after: Costs = np.full(self.shape, np.inf)
        came: Codes = np.zeros(self.shape, dtype=np.int64)

        def offer(places: slice, left: int, cost: Costs, origin: Codes) -> None:
            better = cost < after[places, :, left]
            after[places, :, left] = np.where(better, cost, after[places, :, left])
            came[places, :, left] = np.where(better, origin, came[places, :, left])

        nothing, running = slice(0, 1), slice(1, 3)
        # As it was: nothing, a tick of work, or a tick of the restart. Work that is done stays done.
        offer(nothing, 0, best[:1, :, 0], codes[:1, :, 0, None])
        worked = np.full_like(best[1:, :, 0], np.inf)
        worked[:, :, 1:] = best[1:, :, 0, :-1]
        offer(running, 0, worked, codes[1:, :, 0, None] + 1)
        done = np.full_like(worked, np.inf)
        done[:, :, -1] = best[1:, :, 0, -1]
        offer(running, 0, done, codes[1:, :, 0, None])
        for left in range(1, self.shape[2]):
            offer(running, left - 1, best[1:, :, left], codes[1:, :, left, None])
        # The least cost in each region, whatever was there, and whatever ran there.
        cheapest, origin = self._cheapest(slice(0, 3))
        stopped, stopped_origin = self._cheapest(running)
        offer(nothing, 0, stopped[None], stopped_origin[None])
        sources = np.concatenate([cheapest, self.before[None]])
        origins = np.concatenate([origin, np.full((1, self.need + 1), 2 * math.prod(self.shape[:3]))])
        for length in sorted(set(self.ticks.ravel().tolist())):
            costs = sources[:, None, :] + self.dollars[:, :, None]
            costs[self.ticks != length] = np.inf
            row = costs.argmin(axis=0)
            cost = np.take_along_axis(costs, row[None], axis=0)[0]
            came_from = np.take_along_axis(origins, row, axis=0)
            if length == 0:
                cost = np.concatenate([np.full((len(cost), 1), np.inf), cost[:, :-1]], axis=1)
                came_from = np.concatenate([came_from[:, :1], came_from[:, :-1] + 1], axis=1)
            offer(running, max(0, int(length) - 1), cost[None], came_from[None])
        after += self.price[:, :, None, None]
        after[2, ~spot] = np.inf
        self.best = after
        return came

    def _cheapest(self, places: slice) -> tuple[Costs, Codes]:
        """For each region and work done, over these places and any restart left."""
        rows = self.best[places].transpose(1, 0, 2, 3).reshape(self.shape[1], -1, self.need + 1)
        codes = self.codes[places].transpose(1, 0, 2).reshape(self.shape[1], -1)
        which = rows.argmin(axis=1)
        return rows.min(axis=1), np.take_along_axis(codes, which, axis=1)

    def back(self, trail: Sequence[Codes]) -> list[Step]:
        """The steps that lead to the cheapest state with all work done.

        Raises:
            SimError: there is none.

        """
        last = self.best[..., self.need].ravel()
        code, done = int(last.argmin()), self.need
        if not math.isfinite(last[code]):
            raise SimError("could not plan a job: nothing meets its deadline; allow more time")
        steps: list[Step] = []
        for came in reversed(trail):
            if code == math.prod(self.shape[:3]):
                steps.append(("none", ""))
                continue
            place, region, left = np.unravel_index(code, self.shape[:3])
            steps.append((_PLACES[int(place)], self.markets[int(region)].name))
            code, worked = divmod(int(came[place, region, left, done]), 2)
            done -= worked
        return steps[::-1]
