"""Spot jobs over regions: deadlines hold, money adds up, and nothing is cheaper than the best plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import SimError
from sim.models import spot
from sim.models.optimal import Plan, plan
from sim.models.regions import PROBE_S, Market, RegionalJob, RegionalOutcome, run
from sim.policies import registry
from sim.policies.base import Action, Event, Probe, RunOn, SetInterval, State
from sim.policies.lifetimes import Lifetimes
from sim.policies.skynomad import SkyNomad
from sim.policies.spot import Greedy, UniformProgress
from sim.validation import published
from tests.support.traces import trace

TICK = 600.0
HOUR = 3600.0
TICKS = 60
NAMES = ("a1-a", "a1-b", "b1-a")
REGIONAL = ("up-failover", "up-availability", "up-availability-price", "skynomad", "skynomad-oracle")


@st.composite
def capacities(draw: st.DrawFn) -> list[int]:
    stretches = draw(st.lists(st.integers(1, 25), min_size=1, max_size=8))
    first = draw(st.integers(0, 1))
    zone = [(first + n) % 2 for n, length in enumerate(stretches) for _ in range(length)]
    return (zone * (1 + TICKS // len(zone)))[:TICKS]


@st.composite
def worlds(draw: st.DrawFn) -> list[Market]:
    return [
        Market(name, draw(capacities()), draw(st.sampled_from([1.0, 1.5])), draw(st.sampled_from([4.0, 5.0])))
        for name in NAMES
    ]


def adds_up(out: RegionalOutcome, job: RegionalJob, markets: list[Market]) -> None:
    """Time and money of an outcome are those of the ticks that it tells of."""
    by_name = {market.name: market for market in markets}
    cost = out.probe_cost + out.move_cost
    for place, region in out.held:
        if place != "none":
            market = by_name[region]
            cost += (market.spot_price if place == "spot" else market.on_demand_price) * TICK / HOUR
    assert out.cost == pytest.approx(cost)
    assert out.spot_held_s + out.on_demand_held_s + out.idle_s == pytest.approx(out.end_s)
    assert out.end_s == len(out.held) * TICK
    assert out.move_cost == pytest.approx(out.moves * job.state_bytes * job.move_usd_per_byte)
    for tick, (place, region) in enumerate(out.held):
        assert place != "spot" or by_name[region].available[tick]


@settings(deadline=None, max_examples=100)
@given(worlds(), st.sampled_from(REGIONAL), st.floats(0.5, 7), st.floats(1.0, 1.6), st.floats(0, 1500))
def test_every_job_meets_its_deadline(
    markets: list[Market], name: str, hours: float, slack: float, restart_s: float
) -> None:
    work_s = hours * HOUR
    deadline_s = -(-(work_s * slack + 2 * restart_s + 3 * TICK) // TICK) * TICK
    job = RegionalJob(work_s, min(deadline_s, TICKS * TICK), restart_s, TICK)
    if deadline_s > TICKS * TICK:
        return
    out = run(registry.make(name), job, markets)
    assert out.done and out.end_s <= deadline_s
    assert out.spot_work_s + out.on_demand_work_s == pytest.approx(work_s)
    adds_up(out, job, markets)


@settings(deadline=None, max_examples=60)
@given(worlds(), st.integers(3, 30), st.integers(0, 3), st.sampled_from(REGIONAL))
def test_nothing_is_cheaper_than_the_best_plan(
    markets: list[Market], work: int, restart: int, name: str
) -> None:
    # In whole ticks the plan is exact; a policy pays for its looks besides.
    job = RegionalJob(work * TICK, (work + 3 * restart + 8) * TICK, restart * TICK, TICK)
    best = run(Plan(plan(job, markets)), job, markets)
    assert best.done
    adds_up(best, job, markets)
    other = run(registry.make(name), job, markets)
    assert other.done
    assert best.cost <= other.cost + 1e-9
    cheapest = min(market.spot_price for market in markets)
    assert best.cost >= (work + restart) * TICK / HOUR * cheapest - 1e-9


@settings(deadline=None, max_examples=100)
@given(
    capacities(), st.sampled_from([Greedy, UniformProgress]), st.floats(0.5, 6), st.floats(1.1, 1.6),
    # Whole milliseconds: the two round what is below a nanosecond each in its own way.
    st.floats(0, 1500).map(lambda seconds: round(seconds, 3)),
)  # fmt: skip
def test_one_region_is_the_job_of_one_zone(
    zone: list[int], policy: type[Greedy], hours: float, slack: float, restart_s: float
) -> None:
    work_s = hours * HOUR
    deadline_s = -(-(work_s * slack + 2 * restart_s + 3 * TICK) // TICK) * TICK
    if deadline_s > TICKS * TICK:
        return
    alone = spot.run(policy(), spot.SpotJob(work_s, deadline_s, restart_s, TICK, 1.0, 3.0), [*zone, 0])
    out = run(policy(), RegionalJob(work_s, deadline_s, restart_s, TICK), [Market("a1-a", zone, 1.0, 3.0)])
    assert (out.cost, out.end_s, out.preemptions) == (
        pytest.approx(alone.cost), alone.end_s, alone.preemptions
    )  # fmt: skip
    assert (out.spot_work_s, out.on_demand_work_s) == (
        pytest.approx(alone.spot_work_s), pytest.approx(alone.on_demand_work_s)
    )  # fmt: skip


def test_a_look_is_paid_for_a_minute_and_a_move_for_its_bytes() -> None:
    class Wanders:
        name = "wanders"

        def on_event(self, state: State, event: Event) -> list[Action]:
            if event.kind == "answer":
                return []
            looks: list[Action] = [Probe("b1-a")] if state.now_s == 0 else []
            return [*looks, RunOn("spot", "a1-a" if state.now_s < 2 * TICK else "b1-a")]

    markets = [Market("a1-a", [1] * TICKS, 6.0, 60.0), Market("b1-a", [1] * TICKS, 12.0, 60.0)]
    job = RegionalJob(4 * TICK, 20 * TICK, 0.0, TICK, 1e9, 5e-9)
    out = run(Wanders(), job, markets)
    assert out.probe_cost == pytest.approx(12 * PROBE_S / HOUR)
    assert out.move_cost == pytest.approx(5.0)
    assert out.cost == pytest.approx(2 * 1.0 + 2 * 2.0 + 0.2 + 5.0)
    assert out.last_tick_cost == pytest.approx(2.0)
    assert (out.starts, out.moves) == (2, 1)


def test_zones_of_a_region_share_its_storage() -> None:
    def area(name: str) -> str:
        return Market(name, [1], 1.0, 1.0).area

    assert area("us-east-1c_v100_1") == area("us-east-1a") == "us-east-1"
    assert area("us-central1-a") == area("us-central1-b") == "us-central1"
    assert area("somewhere") == "somewhere"


def test_foresight_goes_where_capacity_lasts_and_hindsight_learns_it() -> None:
    # Ten minutes an hour for little, or all the time for a little more.
    flaky, steady = [1, 0, 0, 0, 0, 0] * 10, [1] * TICKS
    markets = [Market("a1-a", flaky, 1.0, 10.0), Market("b1-a", steady, 1.2, 10.0)]
    job = RegionalJob(30 * TICK, 50 * TICK, 720.0, TICK)
    knows = run(registry.make("skynomad-oracle"), job, markets)
    assert {region for place, region in knows.held if place != "none"} == {"b1-a"}
    assert knows.on_demand_held_s == 0
    learns = run(SkyNomad(), job, markets)
    assert knows.cost < learns.cost < 30 * TICK / HOUR * 10.0


def test_lifetimes_are_the_nelson_aalen_estimate() -> None:
    life = Lifetimes(1 / 6)
    assert life.remaining_h(0.0) > 1e6  # nothing has failed yet
    for start, hours, failed in ((0, 1, True), (7200, 2, True), (18000, 4, False)):
        life.start(start, "spot")
        life.end(start + hours * HOUR, failed=failed)
    # One of three failed at 1 h, one of two at 2 h; the tail goes on as the last step, a tick at a time.
    assert life.knots() == [(1.0, pytest.approx(1 / 3)), (2.0, pytest.approx(1 / 2))]
    life.start(36000, "spot")
    expected = 1 + 0.7165313 * 1 + 0.7165313 * 0.6065307 * (1 / 6) / (1 - 0.6065307)
    assert life.remaining_h(36000) == pytest.approx(expected, rel=1e-6)
    assert life.availability(36000) == pytest.approx(7 * HOUR / 36000)
    assert life.age_h(36000 + 1800) == 0.5


def test_a_policy_that_does_not_choose_is_told_so() -> None:
    class Silent:
        name = "silent"

        def on_event(self, state: State, event: Event) -> list[Action]:
            return [SetInterval(1.0)]

    market = Market("a1-a", [1] * 10, 1.0, 2.0)
    with pytest.raises(SimError, match="at a tick it says SetInterval"):
        run(Silent(), RegionalJob(TICK, 5 * TICK), [market])
    with pytest.raises(SimError, match="capacity is not given for 20 ticks from tick 0 on"):
        run(Greedy(), RegionalJob(TICK, 20 * TICK), [market])
    with pytest.raises(SimError, match="nothing meets its deadline"):
        plan(RegionalJob(9 * TICK, 9 * TICK, 2 * TICK), [market])


def test_a_job_that_is_late_is_not_done() -> None:
    class Waits:
        name = "waits"

        def on_event(self, state: State, event: Event) -> list[Action]:
            return [RunOn("none")] if event.kind == "tick" else []

    out = run(Waits(), RegionalJob(TICK, 5 * TICK), [Market("a1-a", [1] * 10, 1.0, 2.0)])
    assert (out.done, out.end_s, out.idle_s, out.cost) == (False, 5 * TICK, 5 * TICK, 0.0)


def test_skynomads_tables_have_the_points_that_are_checked() -> None:
    path = trace("skynomad/expected_deadline_sensitivity.csv")
    points = published.expected(path, "deadline_ratio")
    assert {name for name, _ in points} == {*published.POLICIES, "UP"}
    assert sum(ratio > 1 for _, ratio in points) == 49
    with pytest.raises(SimError, match="it is no table of strategy, checkpoint_size and mean"):
        published.expected(path, "checkpoint_size")
