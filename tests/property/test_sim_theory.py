"""Closed forms of the simulator over random parameters: optima are optima, limits are limits."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.maths import theory

mtbfs = st.floats(60, 1e7)
ratios = st.floats(1e-6, 3)
shares = st.floats(0, 0.5)


@given(mtbfs, ratios)
def test_the_exact_interval_solves_its_equation(mtbf: float, ratio: float) -> None:
    u = theory.exact_interval(ratio * mtbf, mtbf) / mtbf
    assert math.isclose((1 - u) * math.exp(u), math.exp(-ratio), rel_tol=1e-12)


@given(mtbfs, ratios, shares, st.floats(0.3, 3))
def test_no_other_interval_keeps_more_work(mtbf: float, ratio: float, restart: float, other: float) -> None:
    stall, best = ratio * mtbf, theory.exact_interval(ratio * mtbf, mtbf)
    here = theory.exponential_ettr(best, stall, mtbf, restart * mtbf)
    assert theory.exponential_ettr(best * other, stall, mtbf, restart * mtbf) <= here * (1 + 1e-12)


@settings(deadline=None, max_examples=50)
@given(mtbfs, st.floats(0.01, 1), shares, shares, shares)
def test_the_sum_over_survivals_is_the_exponential_form(
    mtbf: float, interval: float, stall: float, restart: float, persist: float
) -> None:
    scaled = [x * mtbf for x in (interval, stall, restart, persist)]
    summed = theory.renewal_ettr(lambda t: math.exp(-t / mtbf), mtbf, *scaled)
    closed = theory.exponential_ettr(scaled[0], scaled[1], mtbf, scaled[2], scaled[3])
    assert math.isclose(summed, closed, rel_tol=1e-9)


@given(mtbfs, ratios, shares, st.floats(0.05, 2), st.integers(1, 1000))
def test_wall_time_is_work_over_the_share_kept_but_for_the_first_restart(
    mtbf: float, ratio: float, restart: float, interval: float, segments: int
) -> None:
    stall, tau, rest = ratio * mtbf, interval * mtbf, restart * mtbf
    work = segments * tau
    wall = theory.expected_wall(work, tau, stall, mtbf, rest)
    assert math.isclose(work / wall, theory.exponential_ettr(tau, stall, mtbf, rest), rel_tol=1e-9)
    assert wall >= work


@given(mtbfs, st.floats(1e-7, 1e-5), shares)
def test_the_first_order_formula_is_right_where_failures_are_rare(
    mtbf: float, interval: float, write: float
) -> None:
    tau, stall = interval * mtbf, write * interval * mtbf
    assert math.isclose(
        theory.meta_ettr(mtbf, tau, stall, 0), theory.exponential_ettr(tau, stall, mtbf), rel_tol=1e-4
    )


@given(st.lists(st.floats(0.01, 0.3), min_size=1, max_size=3), st.floats(1, 100))
def test_preemption_hides_lower_classes_and_keeps_the_order(loads: list[float], service: float) -> None:
    rates = [load * service for load in loads]
    times = theory.preemptive_mm1(rates, service)
    assert math.isclose(times[0], 1 / (service - rates[0]), rel_tol=1e-9)
    assert list(times) == sorted(times)
    # The work in the queue does not depend on the order of service (all jobs are alike): Little's law.
    jobs = sum(rate * time for rate, time in zip(rates, times, strict=True))
    load = sum(loads)
    assert math.isclose(jobs, load / (1 - load), rel_tol=1e-9)


@given(mtbfs, st.floats(1e-4, 0.2), st.floats(1e-4, 0.2))
def test_saving_after_a_failure_beats_periodic_checkpoints_in_large_jobs(
    mtbf: float, stall: float, more: float
) -> None:
    # All else alike, saving late costs what it takes longer, and periodic ones their stalls and losses.
    interval = theory.exact_interval(stall * mtbf, mtbf)
    periodic = theory.exponential_ettr(interval, stall * mtbf, mtbf, 0.1 * mtbf)
    late = theory.just_in_time_ettr(mtbf, (0.1 + more) * mtbf)
    assert (late > periodic) == (math.exp(-more) > theory.exponential_ettr(interval, stall * mtbf, mtbf))
