"""Many nodes at once: when any of them fails, and how many are in repair."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.maths.laws import Law

Array = NDArray[np.float64]


def failure_times(law: Law, nodes: int, horizon: float, rng: np.random.Generator) -> Array:
    """Every failure of `nodes` nodes until `horizon`, in order; its gaps follow `law`, repair is at once.

    Played node by node, not as one process of the summed rate: that they are the same for exponential gaps is
    what a check finds out.
    """
    reached = np.zeros(nodes)
    found: list[Array] = []
    block = max(16, round(1.3 * horizon / law.mean))
    while (alive := np.flatnonzero(reached < horizon)).size:
        times = reached[alive, None] + law.sample(rng, (int(alive.size), block)).cumsum(axis=1)
        found.append(times[times < horizon])
        reached[alive] = times[:, -1]
    return np.sort(np.concatenate(found))


def in_repair(starts: Array, repairs: Array, at: Array) -> NDArray[np.int64]:
    """How many of the failures that began at `starts` (in order) are not yet repaired at the times `at`."""
    ends = np.sort(starts + repairs)
    return np.searchsorted(starts, at, side="right") - np.searchsorted(ends, at, side="right")


def spares_needed(
    arrivals: float, repair: Law, chance: float, rng: np.random.Generator, repairs: int = 200_000
) -> int:
    """Spares that suffice with `chance`, in simulation: failures are a Poisson process of rate `arrivals`.

    Looks at as many moments as there are repairs, after the pool has filled for ten times the mean repair or
    a tenth of the whole, whichever is longer.
    """
    starts = rng.exponential(1 / arrivals, repairs).cumsum()
    end = float(starts[-1])
    warm = max(10 * repair.mean, end / 10)
    moments = rng.uniform(warm, end, repairs)
    counts = np.sort(in_repair(starts, repair.sample(rng, repairs), moments))
    return int(counts[int(np.ceil(chance * counts.size)) - 1])
