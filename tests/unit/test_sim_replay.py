"""A job step by step: figures worked out by hand, policies, and every second in one bucket."""

from __future__ import annotations

import math

import pytest

from sim.errors import SimError
from sim.maths import theory
from sim.models.replay import Costs, replay
from sim.policies.base import Action, Event, Policy, RunOn, State
from sim.policies.interval import Adaptive, Daly, DalyFirst, Exact, Never, Periodic, Young


def test_a_job_without_checkpoints_starts_over() -> None:
    ledger = replay(Never(), 600, Costs(1), [(300, 300)])
    assert (ledger.wall_s, ledger.lost_s, ledger.outage_s, ledger.checkpoints) == (1200, 300, 300, 0)


def test_a_job_with_checkpoints_loses_what_came_after_the_last() -> None:
    ledger = replay(Periodic(60), 600, Costs(1), [(300, 300)])
    assert (ledger.wall_s, ledger.lost_s, ledger.stall_s, ledger.checkpoints) == (965, 56, 9, 9)


def test_a_last_checkpoint_is_taken_on_demand() -> None:
    assert replay(Periodic(60), 600, Costs(1, final_checkpoint=True), []).wall_s == 610
    assert replay(Periodic(60), 600, Costs(1, persist_s=5, final_checkpoint=True), []).wall_s == 615


def test_a_checkpoint_counts_once_it_persists() -> None:
    # It ends at 61 s and counts at 71 s.
    early = replay(Periodic(60), 100, Costs(1, persist_s=10), [(70.9, 0)])
    late = replay(Periodic(60), 100, Costs(1, persist_s=10), [(71, 0)])
    assert early.lost_s == pytest.approx(69.9)
    assert late.lost_s == pytest.approx(10)


def test_a_failure_during_a_restart_starts_it_over() -> None:
    ledger = replay(Periodic(60), 100, Costs(0, restart_s=30), [(50, 0), (60, 0)])
    assert ledger.restart_s == 40
    assert ledger.wall_s == 100 + 50 + 40


def test_a_failure_without_a_machine_changes_nothing() -> None:
    assert replay(Never(), 100, Costs(1), [(50, 30), (60, 500)]).wall_s == 180


def test_a_job_that_never_ends_is_given_up() -> None:
    ledger = replay(Never(), 100, Costs(1), [(50.0 * k, 0) for k in range(1, 1000)], limit_s=10_000)
    assert not ledger.done
    assert (ledger.kept_s, ledger.wall_s, ledger.lost_s) == (0, 10_000, 10_000)


def test_outages_out_of_order_are_refused() -> None:
    with pytest.raises(SimError, match="sort them"):
        replay(Never(), 1000, Costs(1), [(50, 0), (40, 0)])


def test_a_policy_that_moves_jobs_cannot_be_replayed() -> None:
    class Mover:
        name = "mover"

        def on_event(self, state: State, event: Event) -> list[Action]:
            return [RunOn("spot")]

    with pytest.raises(SimError, match=r"'mover'.*moves a job"):
        replay(Mover(), 100, Costs(1), [])


@pytest.mark.parametrize(
    ("policy", "interval"),
    [
        (Young(), theory.young(30, 11135)),
        (DalyFirst(), theory.daly_first(30, 11135, 300)),
        (Daly(), theory.daly_higher(30, 11135)),
        (Exact(), theory.exact_interval(30, 11135)),
    ],
)
def test_a_formula_sets_its_interval(policy: Policy, interval: float) -> None:
    ledger = replay(policy, 100_000, Costs(30, restart_s=300), [], mtbf_s=11135)
    assert ledger.checkpoints == math.ceil(100_000 / interval) - 1


def test_a_formula_without_its_inputs_says_which() -> None:
    with pytest.raises(SimError, match="'daly': the MTBF is not known; give a study failures, or"):
        replay(Daly(), 100, Costs(1), [])
    with pytest.raises(SimError, match="the cost of a checkpoint is not known"):
        Daly().on_event(State(mtbf_s=1), Event("start"))


@pytest.mark.parametrize("bad", [0, -1, math.nan])
def test_an_interval_of_nothing_is_refused(bad: float) -> None:
    with pytest.raises(SimError, match="must be above 0"):
        Periodic(bad)
    with pytest.raises(SimError, match="guessed stall"):
        Adaptive(bad, 1)


def test_the_adaptive_policy_learns_what_it_was_not_told() -> None:
    # Told ten times too rare failures and ten times too cheap checkpoints.
    true = theory.exact_interval(30, 10_000)
    outages = [(10_000.0 * k, 0.0) for k in range(1, 300)]
    policy = Adaptive(3, 100_000)
    replay(policy, 2_000_000, Costs(30, restart_s=60), outages, limit_s=2_500_000)
    (action,) = policy.on_event(State(now_s=2_500_000), Event("restart"))
    assert getattr(action, "work_s", 0) == pytest.approx(true, rel=0.1)


def test_the_adaptive_policy_takes_a_free_checkpoint_for_a_cheap_one() -> None:
    policy = Adaptive(1, 1000, weight=1)
    (action,) = policy.on_event(State(), Event("checkpoint", 0.0))
    assert getattr(action, "work_s", 0) > 0
