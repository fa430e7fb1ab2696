"""Jobs on spot machines: deadlines hold whatever the capacity does, and figures worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import SimError
from sim.models.spot import SpotJob, run
from sim.policies.base import Action, Event, Place, Policy, RunOn, SetInterval, State
from sim.policies.spot import Greedy, OnDemand, UniformProgress
from sim.policies.step import ClusterType, StepPolicy

TICK = 600.0
HOUR = 3600.0
policies = st.sampled_from([Greedy, UniformProgress, OnDemand])


@st.composite
def capacities(draw: st.DrawFn) -> list[int]:
    """Zones that come and go in stretches, as real ones do."""
    stretches = draw(st.lists(st.integers(1, 60), min_size=1, max_size=20))
    first = draw(st.integers(0, 1))
    zone = [(first + n) % 2 for n, length in enumerate(stretches) for _ in range(length)]
    return (zone * (1 + 400 // len(zone)))[:400]


@settings(deadline=None, max_examples=200)
@given(policies, capacities(), st.floats(1, 50), st.floats(1.1, 2), st.floats(0, 3600))
def test_every_job_meets_its_deadline_and_does_its_work(
    policy: type[Policy], zone: list[int], hours: float, slack: float, restart_s: float
) -> None:
    # Two whole ticks and two starts: what a job needs that loses its machine in the last moment.
    work_s = hours * HOUR
    job = SpotJob(
        work_s=work_s, deadline_s=work_s * slack + 2 * restart_s + 3 * TICK, restart_s=restart_s, tick_s=TICK
    )
    if job.deadline_s > 400 * TICK:
        return
    out = run(policy(), job, zone)
    assert out.end_s <= job.deadline_s
    assert out.spot_work_s + out.on_demand_work_s == pytest.approx(work_s)
    assert out.spot_held_s + out.on_demand_held_s + out.idle_s == pytest.approx(out.end_s)
    assert out.cost == pytest.approx((out.spot_held_s * 0.9731 + out.on_demand_held_s * 3.06) / HOUR)
    assert out.spot_held_s <= sum(zone) * TICK


def test_spot_that_is_always_there_is_all_that_is_used() -> None:
    job = SpotJob(work_s=10 * HOUR, deadline_s=20 * HOUR)
    for policy in (Greedy(), UniformProgress()):
        out = run(policy, job, [1] * 200)
        assert (out.on_demand_held_s, out.preemptions) == (0, 0)
        # One start of 720 s, and ticks are paid whole: 36,720 s are 61.2 of them.
        assert out.spot_held_s == 62 * TICK


def test_without_spot_the_greedy_waits_and_uniform_progress_does_not() -> None:
    job = SpotJob(work_s=10 * HOUR, deadline_s=20 * HOUR)
    greedy, uniform = run(Greedy(), job, [0] * 200), run(UniformProgress(), job, [0] * 200)
    assert greedy.idle_s > 8 * HOUR
    assert uniform.idle_s <= TICK
    assert greedy.on_demand_held_s == 62 * TICK


def test_a_machine_that_is_taken_costs_another_start() -> None:
    job = SpotJob(work_s=2 * HOUR, deadline_s=20 * HOUR)
    out = run(Greedy(), job, [1] * 6 + [0] * 2 + [1] * 100)
    assert (out.preemptions, out.idle_s) == (1, 2 * TICK)
    assert out.spot_held_s == 15 * TICK  # 7,200 s of work and two starts are 8,640 s: 14.4 ticks


def test_a_new_start_replaces_what_was_left_of_the_last_one() -> None:
    # One tick into a start of 720 s the machine is taken; the next start is 720 s and not 840.
    out = run(Greedy(), SpotJob(work_s=480, deadline_s=20 * HOUR), [1, 0] + [1] * 100)
    assert out.end_s == 4 * TICK


@pytest.mark.parametrize("policy", [Greedy(), UniformProgress()])
def test_the_last_moments_before_a_deadline(policy: Policy) -> None:
    # 6,000 s of work are 12 ticks with one start of 720 s, and 13 with two.
    state = State(
        now_s=30 * HOUR, work_s=24 * HOUR, done_s=24 * HOUR - 6000, restart_s=720, tick_s=TICK, spot=True,
    )  # fmt: skip

    def chosen(room_ticks: int, place: Place, starting_s: float = 0.0) -> list[Action]:
        state.deadline_s = state.now_s + room_ticks * TICK
        state.place, state.starting_s = place, starting_s
        return policy.on_event(state, Event("tick"))

    assert chosen(14, "none") == [RunOn("spot")]
    assert chosen(13, "none") == [RunOn("on-demand")]
    assert chosen(13, "on-demand") == [RunOn("on-demand")]
    assert chosen(13, "spot", 100) == [RunOn("spot")]
    assert chosen(12, "spot", 100) == [RunOn("on-demand")]
    assert chosen(12, "spot") == [RunOn("spot")]


def test_a_job_that_cannot_meet_its_deadline_is_refused() -> None:
    with pytest.raises(SimError, match="do not fit before its deadline"):
        SpotJob(work_s=10 * HOUR, deadline_s=10 * HOUR)
    with pytest.raises(SimError, match="its tick is 0"):
        SpotJob(tick_s=0)


def test_capacity_that_ends_before_the_job_is_refused() -> None:
    with pytest.raises(SimError, match="ends after 10 ticks"):
        run(Greedy(), SpotJob(), [1] * 10)


def test_a_policy_that_does_not_say_where_is_named() -> None:
    class Silent:
        name = "silent"

        def on_event(self, state: State, event: Event) -> list[Action]:
            return [SetInterval(5)]

    with pytest.raises(SimError, match="'silent'"):
        run(Silent(), SpotJob(), [1] * 400)


def test_policies_for_spot_say_nothing_to_other_events_and_need_a_deadline() -> None:
    for policy in (Greedy(), UniformProgress(), OnDemand()):
        assert policy.on_event(State(), Event("failure")) == []
    for policy in (Greedy(), UniformProgress()):
        with pytest.raises(SimError, match="no deadline"):
            policy.on_event(State(tick_s=600, work_s=1), Event("tick"))


def test_uniform_progress_stays_on_demand_until_it_is_two_restarts_ahead() -> None:
    state = State(
        now_s=HOUR, work_s=10 * HOUR, done_s=0.5 * HOUR, deadline_s=20 * HOUR, restart_s=720, tick_s=TICK,
        spot=True, place="on-demand",
    )  # fmt: skip
    assert UniformProgress().on_event(state, Event("tick")) == [RunOn("on-demand")]
    state.done_s = 0.5 * HOUR + 2 * 720 * 0.5 - 1
    assert UniformProgress().on_event(state, Event("tick")) == [RunOn("on-demand")]
    state.done_s = 0.5 * HOUR + 2 * 720 * 0.5 + 1
    assert UniformProgress().on_event(state, Event("tick")) == [RunOn("spot")]


class Patient(StepPolicy):
    """As somebody writes it who knows the released simulator."""

    name = "patient"

    def _step(self, last_cluster_type: ClusterType, has_spot: bool) -> ClusterType:
        if has_spot:
            return ClusterType.SPOT
        behind = sum(self.task_done_time) < self.env.elapsed_seconds * self.task_duration / self.deadline
        if behind and last_cluster_type is not ClusterType.NONE:
            return ClusterType.ON_DEMAND
        return ClusterType.NONE


class Rich(StepPolicy):
    name = "rich"

    def _step(self, last_cluster_type: ClusterType, has_spot: bool) -> ClusterType:
        return ClusterType.ON_DEMAND


@settings(deadline=None, max_examples=60)
@given(capacities(), st.floats(1, 40), st.floats(1.1, 2), st.floats(0, 3600))
def test_a_policy_of_two_arguments_meets_deadlines_too(
    zone: list[int], hours: float, slack: float, restart_s: float
) -> None:
    work_s = hours * HOUR
    job = SpotJob(
        work_s=work_s, deadline_s=work_s * slack + 2 * restart_s + 3 * TICK, restart_s=restart_s, tick_s=TICK
    )
    if job.deadline_s > 400 * TICK:
        return
    assert run(Patient(), job, zone).end_s <= job.deadline_s
    assert run(Rich(), job, zone) == run(OnDemand(), job, zone)


class Clings(StepPolicy):
    name = "clings"

    def _step(self, last_cluster_type: ClusterType, has_spot: bool) -> ClusterType:
        if has_spot:
            return ClusterType.SPOT
        return ClusterType.NONE if last_cluster_type is ClusterType.NONE else ClusterType.ON_DEMAND


def test_a_policy_of_two_arguments_is_told_of_the_machine_that_was_just_taken() -> None:
    out = run(Clings(), SpotJob(work_s=10 * HOUR, deadline_s=20 * HOUR), [0] * 3 + [1, 1] + [0] * 100)
    assert (out.idle_s, out.spot_held_s, out.preemptions) == (3 * TICK, 2 * TICK, 1)
