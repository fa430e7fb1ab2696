"""The event engine against the step-by-step model, the array model and closed forms, and its own books."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine import hardware
from sim.engine.clock import Clock
from sim.engine.dispatch import simulate
from sim.engine.ledger import Outcome
from sim.engine.link import Link
from sim.engine.streams import Streams
from sim.maths import theory
from sim.maths.laws import Constant, Exponential, Fixed, Law, Lognormal, Quantiles, Weibull
from sim.models import renewal
from sim.models.renewal import Estimate, estimate
from sim.models.replay import Costs as ReplayCosts
from sim.models.replay import replay
from sim.policies.interval import Periodic
from sim.studies.config import (
    Cluster,
    Config,
    Costs,
    GroupFailures,
    Maintenance,
    NodeFailures,
    PolicySpec,
    Predictor,
    SpotNotice,
    Storage,
    TraceFailures,
    Training,
)
from sim.studies.study import Cell

HOUR, DAY = 3600.0, 86400.0
seeds = st.integers(0, 2**32)


def play(config: Config, replication: int = 0, **more: Any) -> Outcome:
    return simulate(Cell("cell", {}, config), replication, **more)


def job(
    law: Law, interval_s: float, stall_s: float, restart_s: float = 0.0, persist_s: float = 0.0, **more: Any
) -> Config:
    """One node that is whole again at once: the model of the closed forms."""
    options = {"interval": interval_s}
    base: dict[str, Any] = {
        "cluster": Cluster(1),
        "workload": Training(1),
        "policy": PolicySpec("asynchronous" if persist_s else "periodic", options),
        "failures": (NodeFailures(law),),
        "storage": (Storage("remote", stall=Constant(stall_s), persist=Constant(persist_s)),),
        "costs": Costs(restart=Constant(restart_s), async_stall=Constant(stall_s)),
    }
    return Config(**(base | more))


@settings(deadline=None, max_examples=40)
@given(
    seeds,
    st.floats(5, 500),
    st.floats(0, 100),
    st.floats(0, 200),
    st.one_of(st.just(0.0), st.floats(0, 300)),
    st.floats(100, 3000),
)
def test_the_engine_spends_each_second_as_the_step_by_step_model_does(
    seed: int, interval_s: float, stall_s: float, restart_s: float, persist_s: float, mean_s: float
) -> None:
    config = job(
        Exponential(mean_s), interval_s, stall_s, restart_s, persist_s, horizon_s=30 * mean_s, seed=seed
    )
    seen = play(config)
    items = itertools.takewhile(
        lambda one: one.at_s < config.horizon_s, hardware.stream(config, Streams(seed, 0))
    )
    interval_s = max(interval_s, persist_s)  # one checkpoint is written at a time
    ledger = replay(
        Periodic(interval_s),
        1e12,
        ReplayCosts(stall_s, restart_s, persist_s),
        [(one.at_s, 0.0) for one in items],
        limit_s=config.horizon_s,
    )
    buckets = seen.buckets
    assert buckets["checkpoint_stall"] == pytest.approx(ledger.stall_s, abs=1e-6)
    assert buckets["restart"] == pytest.approx(ledger.restart_s, abs=1e-6)
    # What is in memory at the horizon: kept here, as the job goes on, and lost there.
    unsaved_s = buckets["goodput"] - ledger.kept_s
    assert -1e-6 <= unsaved_s <= interval_s + persist_s + 1e-6
    assert buckets["lost_work"] + unsaved_s == pytest.approx(ledger.lost_s, abs=1e-6)
    assert seen.metrics["checkpoints"] == ledger.checkpoints
    assert seen.metrics["failures"] == ledger.failures


@settings(deadline=None, max_examples=20)
@given(seeds, st.floats(20, 500), st.floats(0, 50), st.floats(0, 100), st.integers(2, 12))
def test_the_wall_time_is_that_of_the_array_model_on_the_same_failures(
    seed: int, interval_s: float, stall_s: float, restart_s: float, segments: int
) -> None:
    work = Training(1, interval_s * segments, final_checkpoint=True)
    config = job(Exponential(1000), interval_s, stall_s, restart_s, workload=work, seed=seed)
    at = [item.at_s for item in itertools.islice(hardware.stream(config, Streams(seed, 0)), 2000)]

    class Given:
        """The gaps that the engine sees, as a law."""

        mean = 1000.0
        gaps = iter(np.diff([0.0, *at]))

        def survival(self, time: float) -> float:
            raise NotImplementedError

        def sample(self, rng: np.random.Generator, shape: Any) -> Any:
            return np.array([next(self.gaps)])

    model = renewal.Job(interval_s, stall_s, restart_s)
    (wall_s,) = renewal.wall_times(model, work.work_s, Given(), np.random.default_rng(0), 1)
    seen = play(config)
    assert seen.status == "done"
    assert seen.metrics["wall_s"] == pytest.approx(wall_s, rel=1e-9)
    assert seen.buckets["goodput"] == pytest.approx(work.work_s, rel=1e-9)


def ettrs(config: Config, replications: int) -> Estimate:
    outs = [play(config, number) for number in range(replications)]
    good = np.array([out.buckets["goodput"] for out in outs])
    wall = np.array([out.metrics["wall_s"] for out in outs])
    ratio = float(good.sum() / wall.sum())
    return Estimate(ratio, estimate((good - ratio * wall) / float(wall.mean())).error)


@pytest.mark.parametrize(
    ("law", "interval_s", "stall_s", "restart_s", "persist_s"),
    [
        (Exponential(11135.08), 797.5, 30.0, 300.0, 0.0),  # V18
        (Exponential(11135.08), 600.0, 5.0, 300.0, 120.0),  # V20
        (Weibull(0.7, 11135.08), 1800.0, 30.0, 300.0, 0.0),  # V22
        (Weibull(2.0, 5000.0), 700.0, 20.0, 100.0, 0.0),
        (Lognormal(9000.0, 1.2), 700.0, 20.0, 100.0, 60.0),
        (Exponential(6490.0), 3600.0, 0.0, 300.0, 0.0),  # V13
    ],
    ids=repr,
)
def test_the_engine_has_the_ettr_of_the_closed_form_and_of_the_array_model(
    law: Law, interval_s: float, stall_s: float, restart_s: float, persist_s: float
) -> None:
    config = job(law, interval_s, stall_s, restart_s, persist_s, horizon_s=400 * law.mean, seed=11)
    seen = ettrs(config, 10)
    exact = theory.renewal_ettr(law.survival, law.mean, interval_s, stall_s, restart_s, persist_s)
    array = renewal.ettr(
        renewal.Job(interval_s, stall_s, restart_s, persist_s), law, np.random.default_rng(5), 200, 2000
    )
    # It begins with work and ends with what is in memory: up to an interval and a restart in 400 gaps.
    bias = (interval_s + persist_s + restart_s) / config.horizon_s
    assert abs(seen.mean - exact) < 3 * seen.error + bias
    assert abs(seen.mean - array.mean) < 3 * math.hypot(seen.error, array.error) + bias
    assert seen.error < 0.005


def test_a_job_with_an_end_takes_as_long_as_daly_says() -> None:
    work = Training(1, 500 * HOUR, final_checkpoint=True)
    config = job(Exponential(24 * HOUR), 500 * HOUR / 257, 300.0, 600.0, workload=work, seed=5)
    seen = estimate(np.array([play(config, number).metrics["wall_s"] for number in range(150)]))
    exact = theory.expected_wall(500 * HOUR, 500 * HOUR / 257, 300, 24 * HOUR, 600)
    assert abs(seen.mean - exact) < 3 * seen.error
    assert seen.error < 0.002 * exact


def test_many_nodes_fail_as_one_of_the_summed_rate_and_as_nodes_with_clocks_of_their_own() -> None:
    """Exponential nodes as one stream, and as Weibull ones of shape 1: the heap."""
    shared: dict[str, Any] = {"cluster": Cluster(100), "workload": Training(100), "horizon_s": 40 * DAY}
    one = ettrs(job(Exponential(11135.08 * 100), 797.5, 30.0, 300.0, **shared), 10)
    heap = ettrs(job(Weibull(1.0, 11135.08 * 100), 797.5, 30.0, 300.0, **shared), 10)
    exact = theory.exponential_ettr(797.5, 30, 11135.08, 300)
    assert abs(one.mean - exact) < 3 * one.error + 3e-4
    assert abs(heap.mean - exact) < 3 * heap.error + 3e-4


def test_two_levels_cost_what_theory_says() -> None:
    # V24: failures of a process heal from the local level, of a node from the remote one only.
    local, remote = 1 / 7200, 1 / 72000
    levels = theory.multilevel((10, 120), (local, remote))
    config = Config(
        Cluster(1),
        Training(1),
        PolicySpec("multilevel"),
        failures=(
            NodeFailures(Exponential(1 / local), process=True),
            NodeFailures(Exponential(1 / remote)),
        ),
        storage=(
            Storage("local", stall=Constant(10.0), lost_with="node"),
            Storage("remote", stall=Constant(120.0)),
        ),
        horizon_s=60 * DAY,
    )
    seen = ettrs(config, 6)
    # The formula is first order: a point optimistic where the overhead is near 10 %.
    assert 1 / seen.mean - 1 == pytest.approx(levels.overhead, abs=0.015)
    single = [
        ettrs(replace(config, policy=PolicySpec("periodic", {"interval": s})), 4).mean
        for s in (1000.0, 1500.0, 2500.0)
    ]
    assert seen.mean > max(single) + 0.01


def test_predictions_save_what_aupy_says() -> None:
    # First order, as their formula is: waste stall/T + (T (1 - r) / 2 + R + (r / p) stall) / mtbf.
    mtbf, stall, recall, precision = 36_000.0, 60.0, 0.85, 0.5
    config = job(
        Exponential(mtbf),
        1.0,
        stall,
        300.0,
        policy=PolicySpec("predicted", {"recall": recall}),
        notices=(Predictor(precision, recall, 120.0),),
        horizon_s=200 * mtbf,
    )
    seen = ettrs(config, 12)
    period = theory.prediction_period(stall, mtbf, recall)
    waste = stall / period + ((1 - recall) * period / 2 + 300 + recall / precision * stall) / mtbf
    assert 1 - seen.mean == pytest.approx(waste, rel=0.05)


@pytest.mark.parametrize("repair", [Constant(DAY), Lognormal(DAY, 1.0)], ids=repr)
def test_nodes_in_repair_are_those_of_an_infinite_server(repair: Law) -> None:
    cluster = Cluster(1000, spares=20)
    config = Config(
        cluster,
        Training(1000),
        PolicySpec("periodic", {"interval": 1800.0}),
        failures=(NodeFailures(Exponential(1000 / 7.75 * DAY)),),
        repair=repair,
        storage=(Storage("remote", stall=Constant(30.0)),),
        horizon_s=150 * DAY,
    )
    down = estimate(np.array([play(config, number).metrics["nodes_down"] for number in range(4)]))
    # Nodes that are down do not fail, and the pool fills in the first days.
    expected = cluster.machines * DAY / (1000 / 7.75 * DAY + DAY)
    assert abs(down.mean - expected) < 4 * down.error + expected * 3 / 150


# Books.

costs = st.one_of(
    st.builds(Constant, st.floats(0, 200)),
    st.builds(
        lambda a, b: Quantiles((0.0, 0.5, 1.0), (a, a + b, a + 3 * b)), st.floats(0, 50), st.floats(0, 50)
    ),
)
lives = st.one_of(
    st.builds(Exponential, st.floats(3e4, 3e6)),
    st.builds(Weibull, st.floats(0.5, 2), st.floats(3e4, 3e6)),
    st.builds(Lognormal, st.floats(3e4, 3e6), st.floats(0.2, 1.5)),
)
policies = st.sampled_from(
    [
        PolicySpec("none"),
        PolicySpec("periodic", {"interval": 600.0}),
        PolicySpec("daly"),
        PolicySpec("adaptive", {"guess_stall": 30.0, "guess_mtbf": 1e4}),
        PolicySpec("asynchronous"),
        PolicySpec("incremental", {"full_every": 4}),
        PolicySpec("multilevel"),
        PolicySpec("in-memory", {"copies": 2, "remote": 7200.0}),
        PolicySpec("event", {"interval": 900.0}),
        PolicySpec("predicted", {"recall": 0.7}),
        PolicySpec("just-in-time", {"interval": 3600.0}),
        PolicySpec("hot-spares", {"interval": 900.0}),
        PolicySpec("migrate", {"interval": 900.0}),
        PolicySpec("requeue", {"interval": 900.0}),
    ]
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    nodes, count = draw(st.integers(1, 6)) * 2, draw(st.integers(1, 3))
    failures: list[Any] = [
        NodeFailures(draw(lives), draw(st.booleans())),
        GroupFailures(draw(st.sampled_from(["rack", "switch"])), draw(lives)),
    ]
    if draw(st.booleans()):
        faults = [(float(k) * 5000, draw(st.floats(1, 9e4)), k % nodes) for k in range(20)]
        failures.append(TraceFailures("made up", tuple(faults), 2e5, 0.0, 1e4, draw(st.booleans())))
    notices: list[Any] = [Maintenance(Fixed(3e4), 1, draw(st.floats(0, 900)), draw(costs))]
    notices.append(SpotNotice(draw(lives), draw(costs), 120.0, 0.8, 5.0))
    if draw(st.booleans()):
        notices.append(Predictor(0.6, 0.7, draw(st.floats(0, 900))))
    shared = draw(st.booleans())
    return Config(
        Cluster(nodes * count, spares=draw(st.integers(0, 3)), racks=2, switches=1),
        Training(
            nodes, draw(st.sampled_from([math.inf, 5e4, 5e5])), 2, 8.0, 1e11, count, draw(st.booleans())
        ),
        draw(policies),
        tuple(failures),
        draw(st.one_of(costs, st.builds(Lognormal, st.floats(100, 1e5), st.floats(0.2, 2)))),
        tuple(notices),
        (
            Storage("local", lost_with=draw(st.sampled_from(["node", "rack"])), stall=draw(costs)),
            Storage("remote", 2e9, 4e9, True)
            if shared
            else Storage("remote", stall=draw(costs), restore=draw(costs)),
        ),
        Costs(
            *(draw(costs) for _ in range(3)),
            async_stall=draw(costs),
            increment=0.3,
            replica_stall=draw(costs),
            jit_save=draw(costs),
            migrate=draw(costs),
            swap=draw(st.none() | costs),
            requeue=draw(costs),
        ),
        horizon_s=draw(st.sampled_from([3e5, 1e5])),
        seed=draw(seeds),
    )


@settings(deadline=None, max_examples=50)
@given(configs())
def test_every_second_of_every_gang_is_in_one_bucket(config: Config) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Some take a checkpoint of hardly any cost every few milliseconds.
        patch.setattr("sim.engine.clock.MOST_EVENTS", 20_000)
        patch.setattr("sim.engine.clock.EVENTS_PER_S", 0.0)
        seen, again = play(config, timeline=True), play(config)
    assert (again.metrics, again.buckets) == (seen.metrics, seen.buckets)
    wall_s = seen.metrics["wall_s"]
    # An outcome whose books do not balance cannot be made; here from outside, too.
    assert abs(math.fsum(seen.buckets.values()) - wall_s) <= 1e-9 * wall_s
    assert all(seconds >= -1e-6 for seconds in seen.buckets.values())
    assert seen.metrics["goodput_s"] <= wall_s
    work = config.workload
    assert isinstance(work, Training)
    if seen.status == "done":
        assert seen.buckets["goodput"] == pytest.approx(work.work_s * work.count, rel=1e-9)
    for gang in range(work.count):
        spans = [span for span in seen.spans if span.who == f"job{gang}"]
        for earlier, later in itertools.pairwise(spans):
            assert later.t0_s == pytest.approx(earlier.t1_s, abs=1e-3)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(1, 1000)), min_size=1, max_size=8))
def test_shared_bandwidth_is_used_in_full_and_evenly(flows: list[tuple[float, float]]) -> None:
    clock = Clock()
    link = Link(clock, 10.0)
    ends: dict[int, float] = {}

    def send(number: int, at_s: float, size: float) -> Any:
        yield clock.timeout(at_s)
        yield link.start(size).done
        ends[number] = clock.now

    for number, (at_s, size) in enumerate(flows):
        clock.process(send(number, at_s, size))
    clock.run()
    # Step by step: every flow that is there has the same share.
    left = {number: size for number, (_, size) in enumerate(flows)}
    now = 0.0
    while left:
        there = [number for number in left if flows[number][0] <= now + 1e-9]
        coming = [flows[number][0] for number in left if number not in there]
        until = min(
            [now + min(left[number] for number in there) * len(there) / 10 if there else math.inf, *coming]
        )
        for number in there:
            left[number] -= (until - now) * 10 / len(there)
        now = until
        for number in [number for number in there if left[number] <= 1e-6]:
            assert ends[number] == pytest.approx(now, abs=1e-4)
            del left[number]
