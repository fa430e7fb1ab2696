"""The array model against the step-by-step one and against closed forms, over random jobs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sim.errors import SimError
from sim.maths import theory
from sim.maths.laws import Exponential, Fixed, Law, Lognormal, Weibull
from sim.models.pool import failure_times, in_repair, spares_needed
from sim.models.renewal import Job, best_interval, estimate, ettr, kept, wall_times
from sim.models.replay import Costs, replay
from sim.policies.interval import Periodic

costs = st.builds(
    Job,
    interval=st.floats(5, 500),
    stall=st.floats(0, 100),
    restart=st.floats(0, 200),
    persist=st.floats(0, 300),
)
seeds = st.integers(0, 2**32)


@settings(deadline=None, max_examples=100)
@given(costs, seeds, st.floats(100, 3000))
def test_every_second_is_in_one_bucket_and_the_array_model_keeps_the_same_work(
    job: Job, seed: int, mean: float
) -> None:
    gaps = np.random.default_rng(seed).exponential(mean, 30)
    at = gaps.cumsum()
    ledger = replay(
        Periodic(job.interval),
        1e12,
        Costs(job.stall, job.restart, job.persist),
        [(float(time), 0.0) for time in at],
        limit_s=float(at[-1]),
    )
    assert ledger.wall_s == pytest.approx(float(at[-1]), rel=1e-9)
    # The first start is not a restart: the array model sees it as a gap that is longer by one.
    gaps[0] += job.restart
    each = kept(job, gaps)
    off = abs(ledger.kept_s - float(each.sum()))
    # A failure within a rounding error of a checkpoint may count it or not.
    assert off < 1e-6 * max(1.0, ledger.kept_s) or off == pytest.approx(job.interval)


@settings(deadline=None, max_examples=40)
@given(costs, seeds, st.floats(200, 3000), st.integers(1, 20), st.integers(0, 99))
def test_wall_times_are_those_of_the_step_by_step_model(
    job: Job, seed: int, mean: float, segments: int, percent: int
) -> None:
    job = Job(min(job.interval, mean), min(job.stall, mean / 2), min(job.restart, mean))
    law, work = Exponential(mean), (segments + percent / 100) * job.interval
    (wall,) = wall_times(job, work, law, np.random.default_rng(seed), 1)
    rng = np.random.default_rng(seed)
    at = np.array([law.sample(rng, 1)[0] for _ in range(3000)]).cumsum()
    ledger = replay(
        Periodic(job.interval),
        work,
        Costs(job.stall, job.restart, final_checkpoint=True),
        [(float(time), 0.0) for time in at],
    )
    assert ledger.done
    assert wall == pytest.approx(ledger.wall_s, rel=1e-6)


@pytest.mark.parametrize(
    "law", [Exponential(1000), Weibull(0.7, 1000), Weibull(2, 1000), Lognormal(1000, 1.2)], ids=repr
)
@pytest.mark.parametrize("job", [Job(200, 10, 50), Job(100, 2, 50, 60), Job(700, 0)], ids=repr)
def test_the_array_model_is_the_closed_form_for_any_law(job: Job, law: Law) -> None:
    seen = ettr(job, law, np.random.default_rng(7), 100, 3000)
    expected = theory.renewal_ettr(law.survival, law.mean, job.interval, job.stall, job.restart, job.persist)
    assert abs(seen.mean - expected) < 4 * seen.error
    assert seen.error < 0.005


def test_wall_times_have_dalys_mean() -> None:
    job = Job(100, 5, 10)
    times = wall_times(job, 5000, Exponential(400), np.random.default_rng(3), 4000)
    seen = estimate(times)
    assert abs(seen.mean - theory.expected_wall(5000, 100, 5, 400, 10)) < 4 * seen.error


def test_the_best_interval_in_simulation_is_the_exact_optimum() -> None:
    for stall in (3.0, 30.0, 300.0):
        true = theory.exact_interval(stall, 900)
        grid = np.geomspace(true / 4, true * 4, 61)
        found = best_interval(Job(1, stall, 50), Exponential(900), np.random.default_rng(1), grid, 200_000)
        assert found == pytest.approx(true, rel=0.06)


def test_a_grid_without_the_best_interval_is_refused() -> None:
    rng = np.random.default_rng(1)
    with pytest.raises(SimError, match="use a finer one"):
        best_interval(Job(1, 3), Exponential(900), rng, np.array([10.0, 1000.0]), 1000)
    with pytest.raises(SimError, match="use a wider one"):
        best_interval(Job(1, 3), Exponential(900), rng, np.linspace(4, 8, 10), 100_000)


def test_a_job_that_cannot_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.models.renewal.MOST_FAILURES", 1000)
    with pytest.raises(SimError, match="hardly ever fit"):
        wall_times(Job(10, 1), 100, Fixed(5), np.random.default_rng(1), 1)


@pytest.mark.parametrize("field", ["interval", "stall", "restart", "persist"])
def test_costs_below_zero_are_named(field: str) -> None:
    with pytest.raises(SimError, match=field):
        Job(**{"interval": 1.0, "stall": 1.0, field: -1.0})


@pytest.mark.parametrize(
    "law", [Exponential(5), Weibull(0.7, 5), Weibull(3, 5), Lognormal(5, 1), Fixed(5)], ids=repr
)
def test_a_laws_samples_follow_its_mean_and_survival(law: Law) -> None:
    times = law.sample(np.random.default_rng(11), 200_000)
    assert times.mean() == pytest.approx(law.mean, rel=0.02)
    for time in (0.0, 1.0, 5.5, 12.0):
        assert float((times > time).mean()) == pytest.approx(law.survival(time), abs=0.005)


@pytest.mark.parametrize("bad", [0.0, -3.0, math.nan, math.inf])
def test_a_law_of_nothing_is_refused(bad: float) -> None:
    for make in (Exponential, Fixed, lambda mean: Weibull(1, mean), lambda mean: Lognormal(mean, 1)):
        with pytest.raises(SimError, match="mean is"):
            make(bad)
    with pytest.raises(SimError, match="shape is"):
        Weibull(bad, 1)


@settings(deadline=None, max_examples=30)
@given(seeds, st.integers(1, 50))
def test_nodes_fail_until_the_horizon_in_order(seed: int, nodes: int) -> None:
    times = failure_times(Exponential(10), nodes, 200, np.random.default_rng(seed))
    assert np.all(np.diff(times) >= 0)
    assert not times.size or (times[0] > 0 and times[-1] < 200)
    assert abs(times.size - 20 * nodes) < 6 * math.sqrt(20 * nodes)


def test_nodes_that_fail_far_more_often_than_the_mean_says_fail_until_the_horizon_too() -> None:
    class Short(Fixed):
        def sample(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> NDArray[np.float64]:
            return np.full(shape, 0.5)

    times = failure_times(Short(10), 3, 200, np.random.default_rng(1))
    assert list(times) == [0.5 * k for k in range(1, 400) for _ in range(3)]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=20))
def test_in_repair_counts_the_open_ones(outages: list[tuple[int, int]]) -> None:
    outages.sort()
    starts, repairs = (np.array(column, dtype=float) for column in zip(*outages, strict=True))
    moments = np.arange(0, 75, 0.5)
    counted = [sum(start <= at < start + lasting for start, lasting in outages) for at in moments]
    assert list(in_repair(starts, repairs, moments)) == counted


def test_spares_do_not_depend_on_the_law_of_repairs() -> None:
    for repair in (Fixed(4), Exponential(4), Lognormal(4, 1)):
        seen = spares_needed(2.0, repair, 0.99, np.random.default_rng(5), 100_000)
        assert abs(seen - theory.poisson_quantile(8, 0.99)) <= 1
