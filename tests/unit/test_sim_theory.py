"""Closed forms against figures of their papers and against brute force."""

from __future__ import annotations

import itertools
import math

import pytest

from sim.errors import SimError
from sim.maths import theory

MINUTE, HOUR = 60.0, 3600.0


@pytest.mark.parametrize(("mtbf_hours", "minutes", "places"), [(24, 117, 0), (6, 57, 0), (0.25, 9.1, 1)])
def test_daly_prints_the_optima_of_his_figures(mtbf_hours: float, minutes: float, places: int) -> None:
    interval = theory.daly_higher(5 * MINUTE, mtbf_hours * HOUR) / MINUTE
    assert round(interval, places) == minutes


def test_daly_takes_the_mtbf_where_a_checkpoint_costs_two_of_them() -> None:
    assert theory.daly_higher(60, 20) == 20
    assert theory.daly_higher(40, 20) == 20
    assert theory.daly_higher(39.99, 20) != 20


def test_daly_first_order_refuses_where_it_has_no_answer() -> None:
    assert theory.daly_first(5, 1440, 10) == pytest.approx(math.sqrt(10 * 1450) - 5)
    with pytest.raises(SimError, match="use the exact optimum"):
        theory.daly_first(60, 20)


def test_young_and_the_exact_optimum_meet_where_checkpoints_are_cheap() -> None:
    for stall in (1e-6, 1e-4, 1e-2):
        assert theory.exact_interval(stall, 1e6) == pytest.approx(theory.young(stall, 1e6), rel=1e-3)


def test_checkpoints_dearer_than_any_failure_gap_are_taken_once_a_gap() -> None:
    assert theory.exact_interval(1e5, 1.0) == 1.0
    assert theory.exact_interval(30, 1.0) == pytest.approx(theory.exact_interval(30.0001, 1.0), rel=1e-12)


def test_metas_formula_is_not_the_exact_value_at_long_intervals() -> None:
    mttf = theory.job_mttf(2048, 6.5e-3 / 86400)
    assert theory.meta_ettr(mttf, HOUR, 0, 300) == pytest.approx(0.67644, abs=1e-5)
    assert theory.exponential_ettr(HOUR, 0, mttf, 300) == pytest.approx(0.71438, abs=1e-5)


def test_a_placement_is_the_share_of_losses_that_leave_each_group_a_member() -> None:
    for machines, replicas in ((8, 2), (12, 3)):
        for lost in range(2 * replicas):
            draws = list(itertools.combinations(range(machines), lost))
            alive = sum(
                all(
                    len([m for m in draw if m // replicas == group]) < replicas
                    for group in range(machines // replicas)
                )
                for draw in draws
            )
            assert theory.gemini_placement(machines, replicas, lost) == pytest.approx(alive / len(draws))


def test_a_placement_of_a_broken_group_is_refused() -> None:
    with pytest.raises(SimError, match="multiple of replicas"):
        theory.gemini_placement(16, 3, 2)


def test_a_notice_seen_too_late_saves_nothing() -> None:
    assert theory.notice_capacity(120, 5, 2.5e9) == 287.5e9
    assert theory.notice_capacity(5, 30, 2.5e9) == 0


def test_a_quantile_is_the_least_that_suffices() -> None:
    for mean in (0.3, 7.759, 50.0):
        for chance in (0.5, 0.9, 0.99):
            n = theory.poisson_quantile(mean, chance)
            mass = [math.exp(-mean) * mean**k / math.factorial(k) for k in range(n + 1)]
            assert sum(mass) >= chance > sum(mass[:-1])


def test_a_queue_that_grows_without_end_is_refused() -> None:
    with pytest.raises(SimError, match="below 1"):
        theory.preemptive_mm1((0.6, 0.5), 1)
    assert theory.preemptive_mm1((0.5,), 1) == (2.0,)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_what_must_be_above_zero_is_named(bad: float) -> None:
    with pytest.raises(SimError, match=r"mtbf is .*; it must be above 0"):
        theory.exact_interval(1, bad)
    with pytest.raises(SimError, match="stall"):
        theory.young(bad, 1)


def test_levels_need_a_stall_and_a_rate_each() -> None:
    with pytest.raises(SimError, match="2 stalls and 1 rates"):
        theory.multilevel((1, 2), (1,))
    with pytest.raises(SimError, match="recall is 1"):
        theory.prediction_period(60, 36000, 1)


def test_a_law_without_an_end_is_refused() -> None:
    with pytest.raises(SimError, match="not converged"):
        theory.renewal_ettr(lambda t: 1 / (1 + t), 1.0, 1.0, 0.0)
