"""A queue for one server with classes of jobs: a lower class is preempted, and resumes where it was."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimError
from sim.laws import Law

Array = NDArray[np.float64]


def times_in_system(arrivals: Sequence[float], needs: Sequence[float], classes: Sequence[int]) -> list[float]:
    """How long each job is there, from its arrival to its end.

    Args:
        arrivals: when each job comes, in order.
        needs: how long the server works on each.
        classes: of each job; a lower number preempts a higher one, equal ones are served in order.

    Raises:
        SimError: the arrivals are not in order.

    """
    if any(later < earlier for earlier, later in itertools.pairwise(arrivals)):
        raise SimError("could not run a queue: its arrivals are not in order; sort them")
    queues: list[deque[int]] = [deque() for _ in range(max(classes, default=-1) + 1)]
    left = list(needs)
    spent = [0.0] * len(left)
    now, coming = 0.0, 0
    while True:
        serving = next((queue for queue in queues if queue), None)
        if serving is None:
            if coming == len(left):
                return spent
            now = arrivals[coming]
        else:
            job = serving[0]
            end = now + left[job]
            if coming == len(left) or arrivals[coming] >= end:
                now = end
                spent[job] = now - arrivals[job]
                serving.popleft()
                continue
            left[job] -= arrivals[coming] - now
            now = arrivals[coming]
        queues[classes[coming]].append(coming)
        coming += 1


def mean_times(rates: Sequence[float], service: Law, jobs: int, rng: np.random.Generator) -> list[float]:
    """Mean time in the system of each class, the first one the highest, when jobs come at random.

    Args:
        rates: of each class's Poisson arrivals.
        service: the time that a job needs.
        jobs: of all classes; the first tenth is not counted, as the queue starts empty.
        rng: randomness.

    """
    total = sum(rates)
    if not total * service.mean < 1:
        raise SimError(f"could not run a queue: its load is {total * service.mean:g}; it must be below 1")
    arrivals = rng.exponential(1 / total, jobs).cumsum()
    classes = rng.choice(len(rates), jobs, p=np.array(rates) / total)
    spent = np.array(
        times_in_system(arrivals.tolist(), service.sample(rng, jobs).tolist(), classes.tolist()),
        dtype=np.float64,
    )
    counted = np.arange(jobs) >= jobs // 10
    return [float(spent[counted & (classes == which)].mean()) for which in range(len(rates))]
