"""Queues of gangs and services of replicas: against theory, by hand, and that no second is lost."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine import inference, queue, spotjob
from sim.engine.dispatch import simulate
from sim.engine.ledger import Outcome
from sim.engine.streams import Streams
from sim.errors import SimError
from sim.maths import theory
from sim.maths.laws import Constant, Exponential, Fixed, Lognormal
from sim.policies import registry
from sim.policies.base import Action, Event, State, UseSpare
from sim.studies.config import (
    Cluster,
    Config,
    Costs,
    GroupFailures,
    Inference,
    JobClass,
    Maintenance,
    NodeFailures,
    PolicySpec,
    Queue,
    RegionCapacity,
    Requests,
    SpotWork,
    Storage,
    TraceFailures,
    Training,
)  # fmt: skip
from sim.studies.study import Cell

HOUR, DAY = 3600.0, 86400.0


def play(config: Config, name: str, replication: int = 0, **options: Any) -> Outcome:
    runs = {Queue: queue.run, Inference: inference.run, SpotWork: spotjob.run}
    run = runs[type(config.workload)]  # type: ignore[index]
    return run(config, Streams(config.seed, replication), registry.make(name, options), True)


def config(work: Queue | Inference | SpotWork, nodes: int = 1, **more: Any) -> Config:
    return Config(Cluster(nodes), work, PolicySpec("none"), **more)


class Wrong:
    """Asks for what only a gang has."""

    name = "wrong"

    def on_event(self, state: State, event: Event) -> list[Action]:
        return [UseSpare()]


def whole(out: Outcome) -> None:
    """Buckets add up (the outcome checks that itself), and so do the spans of each job or replica."""
    assert math.fsum(span.t1_s - span.t0_s for span in out.spans if span.state != "down") == pytest.approx(
        out.metrics["wall_s"]
    )
    for span in out.spans:
        assert span.t1_s > span.t0_s


# Queue


def test_a_queue_of_two_classes_takes_the_time_of_theory() -> None:
    work = Queue(
        (
            JobClass("high", 1, Exponential(1.0), 1, Exponential(1 / 0.3)),
            JobClass("low", 1, Exponential(1.0), 0, Exponential(1 / 0.4)),
        )
    )
    runs = [
        play(config(work, horizon_s=1500.0, warmup_s=200.0), "preemption", number, how="checkpoint").metrics
        for number in range(25)
    ]  # fmt: skip
    for name, expected in zip(("high", "low"), theory.preemptive_mm1((0.3, 0.4), 1.0), strict=True):
        seen = [metrics[f"time_in_system.{name}_s"] for metrics in runs]
        error = statistics.stdev(seen) / math.sqrt(len(seen))
        assert abs(statistics.fmean(seen) - expected) < 3.5 * error
        assert error < 0.15 * expected


def jobs(*rows: tuple[str, int, float, int, float]) -> Queue:
    """Jobs that come once: name, nodes, work, priority, when."""
    return Queue(
        tuple(
            JobClass(name, nodes, Fixed(work_s), priority, Fixed(at_s) if at_s else None, 1)
            for name, nodes, work_s, priority, at_s in rows
        ),
        state_bytes=100.0,
    )


SMALL: dict[str, Any] = {"storage": (Storage("remote", write_bps=10.0, read_bps=20.0),)}


@pytest.mark.parametrize(
    ("how", "low", "high", "lost"),
    [
        # The low one has 40 s done when the high one comes at 40 s and takes 50 s.
        ("none", 100.0, 110.0, 0.0),
        ("kill", 190.0, 50.0, 40.0),
        # A checkpoint takes 5 s of two nodes at 10 B/s, and reading it back 2.5 s.
        ("checkpoint", 100.0 + 50.0 + 5.0 + 2.5, 55.0, 0.0),
    ],
)
def test_a_job_of_higher_priority_comes(how: str, low: float, high: float, lost: float) -> None:
    work = jobs(("low", 2, 100.0, 0, 0.0), ("high", 2, 50.0, 1, 40.0))
    out = play(config(work, 2, **SMALL), "preemption", how=how)
    assert out.status == "done"
    assert out.metrics["time_in_system.low_s"] == pytest.approx(low)
    assert out.metrics["time_in_system.high_s"] == pytest.approx(high)
    assert out.metrics["lost_work_s"] == out.buckets["lost_work"] == pytest.approx(lost)
    assert out.metrics["preemptions"] == (how != "none")
    assert out.buckets["goodput"] == pytest.approx(150.0)
    whole(out)


def test_a_job_that_only_starts_makes_room_at_once() -> None:
    work = jobs(("low", 2, 100.0, 0, 0.0), ("other", 2, 100.0, 0, 5.0), ("high", 2, 50.0, 1, 10.0))
    costs = Costs(startup=Constant(40.0), restart=Constant(20.0))
    out = play(config(work, 2, costs=costs, **SMALL), "preemption", how="checkpoint")
    # Ten seconds of a start are lost, and it starts again after the urgent one.
    assert out.metrics["time_in_system.high_s"] == pytest.approx(90.0)
    assert out.metrics["time_in_system.low_s"] == pytest.approx(10.0 + 90.0 + 20.0 + 100.0)
    assert out.metrics["preemptions"] == 1
    assert out.buckets["lost_work"] == 0
    whole(out)


def test_nobody_is_preempted_for_a_job_that_does_not_fit_anyway() -> None:
    work = jobs(("low", 1, 100.0, 0, 0.0), ("same", 2, 200.0, 1, 0.0), ("high", 3, 50.0, 1, 10.0))
    out = play(config(work, 3, **SMALL), "preemption", how="kill")
    assert out.metrics["preemptions"] == 0
    assert out.metrics["time_in_system.high_s"] == pytest.approx(240.0)


def test_a_job_that_does_not_fit_holds_up_those_behind_it() -> None:
    work = jobs(("first", 2, 100.0, 0, 0.0), ("large", 3, 10.0, 0, 1.0), ("small", 1, 10.0, 0, 2.0))
    out = play(config(work, 3), "preemption", how="none")
    assert out.metrics["time_in_system.large_s"] == pytest.approx(109.0)
    assert out.metrics["time_in_system.small_s"] == pytest.approx(118.0)


def outage(at_s: float, lasting_s: float, node: int = 0) -> tuple[TraceFailures, ...]:
    return (TraceFailures("made up", ((at_s, lasting_s, node),), 1e9),)


def test_a_failure_costs_what_is_not_kept_and_the_wait_for_the_node() -> None:
    # A checkpoint of 10 s after every 60 s: at 100 s 60 s are kept and 30 s are lost.
    more = {"failures": outage(100.0, 300.0), "costs": Costs(detection=Constant(5.0), restart=Constant(20.0))}
    out = play(config(jobs(("only", 1, 150.0, 0, 0.0)), 1, **SMALL, **more), "periodic", interval=60)
    assert out.buckets["lost_work"] == pytest.approx(30.0)
    assert out.buckets["detection"] == pytest.approx(5.0)
    assert out.buckets["waiting"] == pytest.approx(295.0)
    assert out.buckets["startup"] == pytest.approx(20.0 + 5.0)  # a restart, and reading 100 B at 20 B/s
    assert out.buckets["checkpoint_stall"] == pytest.approx(20.0)
    assert out.recoveries_s == [pytest.approx(325.0)]
    assert out.metrics["time_in_system_s"] == pytest.approx(100 + 300 + 25 + 90 + 10)
    whole(out)


@pytest.mark.parametrize(
    ("name", "lost", "migrations"),
    [("periodic", 1000.0, 0), ("migrate", 0.0, 1), ("requeue", 0.0, 0), ("event", 2.0, 0)],
)
def test_maintenance_drains_a_node(name: str, lost: float, migrations: int) -> None:
    # A checkpoint of 10 s is begun 12 s ahead, and the 2 s of work after it are lost with the node.
    work = Queue((JobClass("job", 1, Fixed(2000.0), 0, None, 2),), state_bytes=100.0)
    more = {
        "notices": (Maintenance(Fixed(1000.0), 1, 120.0, Fixed(100.0)),),
        "costs": Costs(migrate=Constant(7.0)),
        "horizon_s": 1500.0,
    }
    # Three nodes for two jobs: a seed whose maintenance hits one of them.
    drawn = (config(work, 3, seed=seed, **SMALL, **more) for seed in range(20))
    hit = next(one for one in drawn if play(one, "periodic", interval=1e9).buckets["lost_work"])
    out = play(hit, name, interval=1e9)
    assert out.buckets["lost_work"] == pytest.approx(lost)
    assert out.metrics["migrations"] == migrations
    assert out.buckets["migration"] == pytest.approx(7.0 * migrations)
    whole(out)


def test_asking_a_policy_does_not_undo_what_it_has_planned() -> None:
    # Maintenance is told of at 880 s for 1,000 s; at 900 s a job comes that is of no use to ask for.
    work = Queue(
        (
            JobClass("job", 1, Fixed(2000.0), 0, None, 1),
            JobClass("high", 1, Fixed(10.0), 1, Fixed(900.0), 1),
        ),
        state_bytes=100.0,
    )
    more = {"notices": (Maintenance(Fixed(1000.0), 1, 120.0, Fixed(100.0)),), "horizon_s": 1500.0}
    out = play(config(work, 1, **SMALL, **more), "event", interval=1e9)
    assert out.metrics["checkpoints"] == 1
    assert out.buckets["lost_work"] == pytest.approx(2.0)


@pytest.mark.parametrize(("horizon_s", "status", "taken"), [(1e5, "horizon", 99), (2e5, "done", 149)])
def test_each_checkpoint_is_counted_once(horizon_s: float, status: str, taken: int) -> None:
    # Up to the end of watching, and none at the end of the work.
    work = Queue((JobClass("job", 1, Fixed(1.5e5), most=1),))
    storage = (Storage("remote", stall=Constant(1.0)),)
    out = play(config(work, storage=storage, horizon_s=horizon_s), "periodic", interval=1000.0)
    assert (out.status, out.metrics["checkpoints"]) == (status, taken)
    assert out.buckets["checkpoint_stall"] == pytest.approx(taken)


def test_the_same_failures_come_whatever_the_policy() -> None:
    work = Queue((JobClass("job", 4, Lognormal(5 * HOUR, 1.0), 0, Exponential(2 * HOUR)),), state_bytes=1e9)
    more = {
        "failures": (NodeFailures(Exponential(5 * DAY)), GroupFailures("rack", Exponential(40 * DAY))),
        "repair": Lognormal(6 * HOUR, 1.0),
        "storage": (Storage("remote", write_bps=1e8, read_bps=1e8),),
        "horizon_s": 20 * DAY,
    }
    base = config(work, 16, **more)
    base = replace(base, cluster=Cluster(16, racks=4))
    outs = [play(base, name, **options) for name, options in (("daly", {}), ("none", {}))]
    down = [[(span.t0_s, span.who) for span in out.spans if span.state == "detecting"][:1] for out in outs]
    assert down[0] == down[1]
    assert outs[0].metrics["jobs"] == outs[1].metrics["jobs"]
    assert outs[0].buckets["lost_work"] < outs[1].buckets["lost_work"]


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 1000), st.sampled_from([
        ("preemption", {"how": "kill"}), ("preemption", {"how": "checkpoint"}),
        ("migrate", {"interval": 900}), ("requeue", {"interval": 900}), ("event", {"interval": 900}),
        ("periodic", {"interval": 100}),
    ]),
    st.floats(0, 200), st.floats(0.5, 5), st.booleans(),
)  # fmt: skip
def test_no_second_of_a_job_is_lost(
    seed: int, policy: tuple[str, dict[str, Any]], cost_s: float, days: float, shared: bool
) -> None:
    work = Queue(
        (
            JobClass("big", 5, Lognormal(3 * HOUR, 1.0), 2, Exponential(7 * HOUR)),
            JobClass("small", 2, Lognormal(HOUR, 1.0), 0, Exponential(HOUR)),
        ),
        state_bytes=1e9,
    )
    drawn = Config(
        Cluster(8, racks=2),
        work,
        PolicySpec("none"),
        failures=(
            NodeFailures(Exponential(2 * DAY)), GroupFailures("rack", Exponential(6 * DAY), Fixed(HOUR)),
        ),
        repair=Lognormal(2 * HOUR, 1.0),
        notices=(Maintenance(Exponential(DAY), 2, 600.0, Fixed(HOUR)),),
        storage=(Storage("remote", write_bps=1e7, read_bps=1e7, shared=shared),),
        costs=Costs(
            startup=Constant(cost_s), restart=Constant(cost_s), detection=Constant(cost_s / 2),
            migrate=Constant(cost_s),
        ),
        horizon_s=days * DAY,
        seed=seed,
    )  # fmt: skip
    out = play(drawn, policy[0], **policy[1])
    whole(out)
    assert out.metrics["node_utilisation"] <= 1 + 1e-9
    assert out.metrics["node_goodput"] <= out.metrics["node_utilisation"] + 1e-9
    again = play(drawn, policy[0], **policy[1])
    assert (again.metrics, again.buckets) == (out.metrics, out.buckets)


def test_a_queue_that_cannot_end_says_so() -> None:
    forever = JobClass("job", 1, Fixed(1.0), 0, Exponential(1.0))
    with pytest.raises(SimError, match="jobs of class 'job' come for ever; give a horizon or say how many"):
        play(config(Queue((forever,))), "preemption")
    with pytest.raises(SimError, match="class 'job' has no end; say how many jobs"):
        play(config(Queue((replace(forever, gaps=None),)), horizon_s=10.0), "preemption")
    with pytest.raises(SimError, match="jobs of class 'job' need 2 nodes and the cluster has 1"):
        play(config(Queue((replace(forever, nodes=2, most=1),))), "preemption")
    with pytest.raises(SimError, match="asks for UseSpare, which a queue does not have"):
        queue.run(config(Queue((replace(forever, most=1),))), Streams(0, 0), Wrong(), False)


def test_a_job_that_never_gets_anywhere_is_a_livelock() -> None:
    work = jobs(("only", 1, 1000.0, 0, 0.0))
    out = play(config(work, 1, failures=(NodeFailures(Fixed(10.0)),)), "none")
    assert out.status == "livelock"
    assert out.buckets["goodput"] == 0
    # The only node never comes back, and nothing else is to happen.
    out = play(config(work, 1, failures=outage(100.0, math.inf)), "none")
    assert out.status == "livelock"


# Inference


def service(times_s: tuple[float, ...], **more: Any) -> Inference:
    """Requests of 100 tokens in and 10 out: 1 s to the first token and 1 s for the rest."""
    count = len(times_s)
    requests = Requests("made up", times_s, (100,) * count, (10,) * count)
    usual: dict[str, Any] = {"most": 2, "slots": 1, "prefill_tps": 100.0, "decode_tps": 10.0}
    return Inference(requests, **{**usual, **more})


def test_a_request_waits_for_a_replica_to_start() -> None:
    work = service((0.0, 1.0, 200.0), cold=Fixed(60.0), warm=Fixed(5.0))
    out = play(config(work, 2), "cold-start", idle=30)
    # Both wait for a start of 60 s; the second one for the first to be served. It stops after 30 s.
    assert out.metrics["starts_cold"] == 2
    assert out.metrics["ttft_mean_s"] == pytest.approx((61.0 + 62.0 + 61.0) / 3)
    assert out.metrics["stops"] == 1
    assert out.buckets["startup"] == pytest.approx(120.0)
    assert out.buckets["goodput"] == pytest.approx(6.0)
    assert out.buckets["idle"] == pytest.approx(30.0)
    whole(out)
    warm = play(config(work, 2), "warm-start", idle=30)
    # The first start has nothing to start from.
    assert (warm.metrics["starts_cold"], warm.metrics["starts_warm"]) == (1, 1)
    assert warm.metrics["ttft_mean_s"] == pytest.approx((61.0 + 62.0 + 6.0) / 3)


def test_a_replica_that_fails_gives_its_requests_back() -> None:
    work = service((0.0,), least=1, most=2, cold=Fixed(10.0))
    out = play(config(work, 2, failures=outage(0.5, 1e6)), "cold-start")
    assert (out.metrics["failures"], out.metrics["requests_restarted"]) == (1, 1)
    assert out.metrics["ttft_mean_s"] == pytest.approx(0.5 + 10.0 + 1.0)
    assert out.recoveries_s == [pytest.approx(10.0)]


@pytest.mark.parametrize(
    ("name", "ttft", "restored"), [("kv-restore", 0.2, 1), ("kv-recompute", 1.0, 0), ("kv-cheaper", 0.2, 1)]
)
def test_a_session_that_goes_on_gets_its_cache_back(name: str, ttft: float, restored: int) -> None:
    work = service((0.0,), least=1, keep_share=1.0, cache_bytes_per_token=10.0, cache_read_bps=5000.0)
    out = play(config(work, 2), name)
    assert out.metrics["ttft_mean_s"] == pytest.approx(ttft)
    assert out.metrics["caches_restored"] == restored
    assert out.metrics["caches_recomputed"] == 1 - restored


def test_loading_pays_above_the_bandwidth_of_theory() -> None:
    limit = theory.kv_break_even(10.0, 1.0, 200.0)  # 100 tokens a second
    for share, restored in ((0.99, 0), (1.01, 1)):
        work = service(
            (0.0,), least=1, keep_share=1.0, cache_bytes_per_token=10.0, cache_read_bps=limit * share
        )
        assert play(config(work, 2), "kv-cheaper").metrics["caches_restored"] == restored


def test_random_requests_come_at_their_rate_and_in_bursts() -> None:
    steady = Requests(per_s=5.0)
    bursts = Requests(per_s=5.0, burst_every_s=1000.0, burst_s=50.0, burst_factor=11.0)
    counts = {
        kind: [len(inference.arrivals(requests, 0.5, Streams(1, number), 4000.0)) for number in range(10)]
        for kind, requests in (("steady", steady), ("bursts", bursts))
    }
    assert statistics.fmean(counts["steady"]) == pytest.approx(20_000, rel=0.01)
    # Four bursts of 50 s with ten times as many more.
    assert statistics.fmean(counts["bursts"]) == pytest.approx(30_000, rel=0.15)
    assert statistics.stdev(counts["bursts"]) > 3 * statistics.stdev(counts["steady"])
    found = inference.arrivals(bursts, 0.5, Streams(1, 0), 2000.0)
    assert sum(request.resumed for request in found) / len(found) == pytest.approx(0.5, abs=0.05)
    with pytest.raises(SimError, match="its requests come for ever; give a horizon"):
        inference.arrivals(steady, 0.0, Streams(1, 0), math.inf)


@settings(deadline=None, max_examples=10)
@given(
    st.integers(0, 1000), st.sampled_from(["cold-start", "warm-start", "kv-restore", "kv-cheaper"]),
    st.integers(0, 2), st.integers(1, 4),
)  # fmt: skip
def test_no_second_of_a_replica_is_lost(seed: int, name: str, least: int, slots: int) -> None:
    requests = Requests(per_s=0.5, burst_every_s=600.0, burst_s=60.0, burst_factor=5.0)
    work = Inference(
        requests, least, 4, slots, 2000.0, 200.0, Lognormal(60.0, 0.5), Lognormal(5.0, 0.5), 1e5, 1e9, 0.5
    )
    drawn = config(
        work,
        4,
        failures=(NodeFailures(Exponential(HOUR)),),
        repair=Fixed(300.0),
        horizon_s=HOUR / 2,
        seed=seed,
    )
    out = play(drawn, name)
    whole(out)
    assert out.metrics["replicas_most"] <= 4
    assert out.metrics["requests_done"] <= out.metrics["requests"]
    assert play(drawn, name).metrics == out.metrics


def test_a_service_that_cannot_be_played_says_so() -> None:
    with pytest.raises(SimError, match="2 replicas do not fit on 1 nodes"):
        play(config(service((0.0,)), 1), "cold-start")

    with pytest.raises(SimError, match="asks for UseSpare, which a service does not have"):
        inference.run(config(service((0.0,)), 2), Streams(0, 0), Wrong(), False)


# Spot


def test_each_replication_is_a_window_and_alone_a_policy_is_in_every_zone() -> None:
    zones = tuple(
        RegionCapacity(name, available, 1.0 / HOUR, 3.0 / HOUR)
        for name, available in (("a1-a", (1,) * 40), ("b1-a", (0,) * 40))
    )
    work = SpotWork(2 * HOUR, 4 * HOUR, 0.0, 600.0, zones, starts=(0, 10))
    base = config(work)
    for replication in range(2):
        alone = play(base, "uniform-progress", replication)
        assert alone.metrics["cost_usd"] == pytest.approx((2.0 + 6.0) / 2)
        assert alone.metrics["deadline_met"] == 1
        assert {span.who for span in alone.spans} == {"job in a1-a", "job in b1-a"}
        out = play(base, "up-failover", replication)
        assert out.metrics["cost_usd"] == pytest.approx(2.0)
        assert out.buckets["goodput"] == alone.buckets["goodput"] == pytest.approx(2 * HOUR)
        assert [(span.state, span.cause) for span in out.spans] == [("spot", "a1-a")]
        whole(out)
    with pytest.raises(SimError, match="there are 2 windows of capacity; set study"):
        play(base, "up-failover", 2)


# Training, against a closed form of its own


def test_saving_after_failures_keeps_the_share_of_theory() -> None:
    mtbf_s = 6000.0
    gang = Config(
        Cluster(8),
        Training(8, replicas=8, step_s=8.0),
        PolicySpec("just-in-time"),
        failures=(NodeFailures(Exponential(8 * mtbf_s)),),
        storage=(Storage("remote", stall=Constant(30.0)),),
        costs=Costs(detection=Constant(20.0), jit_save=Constant(15.0), restart=Constant(300.0)),
        horizon_s=1000 * mtbf_s,
    )
    seen = [simulate(Cell("gang", {}, gang), replication).metrics["ettr"] for replication in range(10)]
    error = statistics.stdev(seen) / math.sqrt(len(seen))
    assert error < 1e-3
    assert abs(statistics.fmean(seen) - theory.just_in_time_ettr(mtbf_s, 335.0, 8.0)) < 3.5 * error
