"""A queue for one server with classes of jobs: a lower class is preempted, and resumes where it was."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimError
from sim.maths.laws import Law
from sim.maths.statistics import batch_means, t_quantile, warm_up
from sim.models.renewal import Estimate

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


def series(rates: Sequence[float], service: Law, jobs: int, rng: np.random.Generator) -> list[list[float]]:
    """Times in the system of each class, the first one the highest, in order, when jobs come at random.

    Args:
        rates: of each class's Poisson arrivals.
        service: the time that a job needs.
        jobs: of all classes; the queue starts empty, so the first ones have it easy.
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
    return [spent[classes == which].tolist() for which in range(len(rates))]


def mean_times(rates: Sequence[float], service: Law, jobs: int, rng: np.random.Generator) -> list[Estimate]:
    """Mean time in the system of each class in the steady state, with its standard error.

    Of `series`, without the warm-up (MSER-5), from the means of 20 batches: neighbours in a queue are alike.

    Raises:
        SimError: the queue has no steady state, or too few jobs to find it.

    """
    found: list[Estimate] = []
    for times in series(rates, service, jobs, rng):
        batches = batch_means(times[warm_up(times) :])
        found.append(Estimate(batches.mean, batches.ci95 / t_quantile(batches.batches - 1)))
    return found
