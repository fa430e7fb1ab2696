"""One job under failures whose clock starts anew after each: many replications at once.

The model of `sim.maths.theory`: failures may strike during work, checkpoint and restart; a checkpoint counts
`persist` after its stall; a failure costs everything since the last one that counts, then `restart`. What
happens between two failures is counted, not played: the cost is one array operation for each failure of a
replication.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimError
from sim.maths.laws import Law

Array = NDArray[np.float64]

MOST_FAILURES = 100_000
"""Failures in one replication after which a job is not going to end."""


@dataclass(frozen=True)
class Job:
    """What a job and its checkpoints cost. Times in the unit of the law of failures."""

    interval: float
    stall: float
    restart: float = 0.0
    persist: float = 0.0

    def __post_init__(self) -> None:
        if not self.interval > 0:
            raise SimError(f"could not make a job: interval is {self.interval}; it must be above 0")
        for name, value in (("stall", self.stall), ("restart", self.restart), ("persist", self.persist)):
            if not value >= 0:
                raise SimError(f"could not make a job: {name} is {value}; it must be 0 or more")


def kept(job: Job, gaps: Array) -> Array:
    """Work kept out of each gap between two failures."""
    room = np.maximum(gaps - job.restart - job.persist, 0.0)
    return job.interval * np.floor(room / (job.interval + job.stall))


@dataclass(frozen=True)
class Estimate:
    """A mean over replications and its standard error."""

    mean: float
    error: float


def estimate(values: Array) -> Estimate:
    """Mean of independent values and its standard error.

    Raises:
        SimError: fewer than two values.

    """
    if values.size < 2:
        raise SimError(f"could not estimate an error from {values.size} replications; use 2 or more")
    return Estimate(float(values.mean()), float(values.std(ddof=1)) / float(np.sqrt(values.size)))


def ettr(job: Job, law: Law, rng: np.random.Generator, replications: int, failures: int) -> Estimate:
    """Share of time whose work is kept, of a job without an end.

    Args:
        job: its costs.
        law: the time between two failures.
        rng: randomness; the same state gives the same failures to every job.
        replications: independent ones.
        failures: failures in each.

    """
    gaps = law.sample(rng, (replications, failures))
    good, time = kept(job, gaps).sum(axis=1), gaps.sum(axis=1)
    ratio = float(good.sum() / time.sum())
    # The error of a ratio of means, by linearisation: replications with more time weigh more.
    return Estimate(ratio, estimate((good - ratio * time) / float(time.mean())).error)


def best_interval(job: Job, law: Law, rng: np.random.Generator, intervals: Array, failures: int) -> float:
    """The interval with the highest ETTR in simulation, by a parabola through the best ones of a grid.

    Every interval sees the same failures, so that their differences have little noise. The chosen one may lie
    between two of the grid.

    Args:
        job: its costs; its own interval is not used.
        law: the time between two failures.
        rng: randomness.
        intervals: the grid, rising.
        failures: failures that each interval sees.

    """
    gaps = law.sample(rng, failures)
    shares = np.array(
        [
            kept(Job(float(interval), job.stall, job.restart, job.persist), gaps).sum() / gaps.sum()
            for interval in intervals
        ]
    )
    near = np.abs(np.log(intervals / intervals[int(shares.argmax())])) <= np.log(1.5)
    if int(near.sum()) < 5:
        raise SimError(
            "could not find the best interval: fewer than 5 of the grid are near it; use a finer one"
        )
    square, slope, _ = np.polyfit(np.log(intervals[near]), np.log(shares[near]), 2)
    best = float(np.exp(-slope / (2 * square)))
    if not (square < 0 and intervals[0] < best < intervals[-1]):
        raise SimError("could not find the best interval: the grid does not hold it; use a wider one")
    return best


def wall_times(job: Job, work: float, law: Law, rng: np.random.Generator, replications: int) -> Array:
    """Time until `work` is done, in each replication. The last part ends in a checkpoint that counts, too.

    Raises:
        SimError: a job is not done after `MOST_FAILURES` failures: no interval fits between them.

    """
    if not work > 0:
        raise SimError(f"could not run a job: work is {work}; it must be above 0")
    if job.persist:
        raise SimError("could not run a job to its end: only checkpoints that count at once are built")
    whole, part = divmod(work, job.interval)
    length = job.interval + job.stall
    tail = part + job.stall if part > 1e-9 * job.interval else 0.0
    wall = np.zeros(replications)
    left = np.full(replications, whole)
    restart = np.zeros(replications)  # the first start is not a restart
    active = np.arange(replications)
    for _ in range(MOST_FAILURES):
        gaps = law.sample(rng, active.size)
        need = restart[active] + left[active] * length + tail
        wall[active] += np.minimum(gaps, need)
        done = np.floor(np.maximum(gaps - restart[active], 0.0) / length)
        left[active] = np.maximum(left[active] - done, 0.0)
        restart[active] = job.restart
        active = active[gaps < need]
        if not active.size:
            return wall
    raise SimError(
        f"could not run a job to its end: after {MOST_FAILURES} failures it is not done; "
        "an interval and its checkpoint hardly ever fit between two of them"
    )
