"""The preemptive queue against hand-made cases, a recursion, a slow brute force and closed forms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import SimError
from sim.maths import theory
from sim.maths.laws import Exponential, Fixed
from sim.models.queueing import mean_times, times_in_system

jobs = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 2)), max_size=12)


def test_a_low_job_is_preempted_and_resumes() -> None:
    # The low one works 0..2 and 5..8, the high one 2..5.
    assert times_in_system([0, 2], [5, 3], [1, 0]) == [8, 3]


@given(jobs)
def test_every_job_ends_when_unit_by_unit_work_says(drawn: list[tuple[int, int, int]]) -> None:
    arrivals = list(itertools.accumulate(gap for gap, _, _ in drawn))
    needs = [need for _, need, _ in drawn]
    classes = [which for _, _, which in drawn]
    left, ends, now = list(needs), [0] * len(drawn), 0
    while any(left):
        there = [job for job in range(len(drawn)) if left[job] and arrivals[job] <= now]
        if there:
            job = min(there, key=lambda job: (classes[job], job))
            left[job] -= 1
            if not left[job]:
                ends[job] = now + 1
        now += 1
    expected = [end - arrival for end, arrival in zip(ends, arrivals, strict=True)]
    assert times_in_system(arrivals, needs, classes) == expected


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.floats(0.1, 0.9))
def test_one_class_follows_lindleys_recursion(seed: int, load: float) -> None:
    rng = np.random.default_rng(seed)
    gaps, needs = rng.exponential(1 / load, 200), rng.exponential(1, 200)
    waits = [0.0]
    for need, gap in zip(needs[:-1], gaps[1:], strict=True):
        waits.append(max(0.0, waits[-1] + need - gap))
    spent = times_in_system(gaps.cumsum().tolist(), needs.tolist(), [0] * 200)
    assert spent == pytest.approx([wait + need for wait, need in zip(waits, needs, strict=True)])


def test_mean_times_are_those_of_theory() -> None:
    rates = (0.2, 0.3, 0.1)
    seen = mean_times(rates, Exponential(1), 200_000, np.random.default_rng(8))
    for one, expected in zip(seen, theory.preemptive_mm1(rates, 1), strict=True):
        assert one.mean == pytest.approx(expected, rel=0.05)
        assert abs(one.mean - expected) < 4 * one.error
    # M/D/1, Pollaczek-Khinchine: 1 + load / (2 (1 - load)).
    (seen_one,) = mean_times((0.5,), Fixed(1), 100_000, np.random.default_rng(8))
    assert seen_one.mean == pytest.approx(1.5, rel=0.02)


def test_queues_that_cannot_be_run_are_refused() -> None:
    with pytest.raises(SimError, match="sort them"):
        times_in_system([2, 1], [1, 1], [0, 0])
    with pytest.raises(SimError, match=r"load is 1\.2"):
        mean_times((0.6,), Fixed(2), 10, np.random.default_rng(1))
    assert times_in_system([], [], []) == []
