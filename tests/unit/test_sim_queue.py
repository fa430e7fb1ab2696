"""Queues of jobs by hand: where checkpoints go and what is lost with it, and what is counted of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sim.engine import queue
from sim.engine.jobs import job_rate
from sim.engine.ledger import Outcome
from sim.engine.streams import Streams
from sim.errors import SimError
from sim.maths.laws import Constant, Exponential, Fixed
from sim.policies import registry
from sim.policies.base import Action, Event, SetInterval, State
from sim.studies.config import (
    Cluster,
    Config,
    Costs,
    JobClass,
    Maintenance,
    NodeFailures,
    PolicySpec,
    Queue,
    Scope,
    SpotNotice,
    Storage,
    TraceFailures,
)

HOUR = 3600.0


def play(work: Queue, nodes: int, name: str, options: dict[str, Any], **more: Any) -> Outcome:
    config = Config(Cluster(nodes, racks=1), work, PolicySpec("none"), **more)
    return queue.run(config, Streams(0, 0), registry.make(name, options), False)


def one_job(work_s: float, nodes: int = 1) -> Queue:
    return Queue((JobClass("a", nodes, Fixed(work_s), most=1),))


def level(name: str, lost_with: Scope, stall_s: float) -> Storage:
    return Storage(name, lost_with=lost_with, stall=Constant(stall_s), restore=Constant(0.0))


@pytest.mark.parametrize("swapped", [False, True])
def test_checkpoints_of_a_queue_go_where_they_survive_most(swapped: bool) -> None:
    storage = (level("remote", "nothing", 10.0), level("local", "node", 1.0))
    failures = TraceFailures("by hand", ((250.0, 1.0, 0),), 1e9)
    out = play(
        one_job(1000.0),
        1,
        "periodic",
        {"interval": 100.0},
        storage=storage[::-1] if swapped else storage,
        failures=(failures,),
    )
    # At 250 s two intervals are kept with their stalls, and 30 s of work are not.
    assert out.buckets["lost_work"] == pytest.approx(30.0)
    assert out.buckets["checkpoint_stall"] == pytest.approx(90.0)


@pytest.mark.parametrize(("lost_with", "lost_s"), [("node", 200.0 + 30.0), ("rack", 30.0), ("nothing", 30.0)])
def test_what_is_lost_with_a_node_is_lost_when_one_fails(lost_with: Scope, lost_s: float) -> None:
    failures = TraceFailures("by hand", ((250.0, 1.0, 0),), 1e9)
    out = play(
        one_job(1000.0),
        1,
        "periodic",
        {"interval": 100.0},
        storage=(level("s", lost_with, 10.0),),
        failures=(failures,),
    )
    assert out.status == "done"
    assert out.buckets["lost_work"] == pytest.approx(lost_s)
    # Twenty seconds of the 250 were two stalls, which are spent again where their checkpoints are lost.
    again_s = 20.0 if lost_with == "node" else 0.0
    assert out.metrics["makespan_s"] == pytest.approx(1000.0 + 9 * 10.0 + 1.0 + lost_s + again_s)


def test_a_job_whose_checkpoints_never_survive_is_given_up() -> None:
    failures = TraceFailures("by hand", ((250.0, 0.0, 0),), 300.0, repeat=True)
    more: dict[str, Any] = {"storage": (level("s", "node", 10.0),), "failures": (failures,)}
    out = play(one_job(1000.0), 1, "periodic", {"interval": 100.0}, **more)
    assert out.status == "livelock"


PERIODIC: dict[str, Any] = {"storage": (level("s", "nothing", 0.0),)}


def test_work_of_jobs_that_are_not_done_is_useful_too() -> None:
    out = play(one_job(2000.0, 2), 4, "periodic", {"interval": 100.0}, horizon_s=1000.0, **PERIODIC)
    assert out.status == "horizon"
    assert out.metrics["node_goodput"] == out.metrics["node_utilisation"] == pytest.approx(0.5)


def test_what_was_lost_by_the_end_is_not_useful() -> None:
    failures = (TraceFailures("by hand", ((950.0, 1e6, 0),), 1e9),)
    more: dict[str, Any] = {"failures": failures, "horizon_s": 1000.0} | PERIODIC
    assert play(one_job(2000.0), 1, "periodic", {"interval": 100.0}, **more).metrics[
        "node_goodput"
    ] == pytest.approx(0.9)


def test_use_of_machines_before_the_warm_up_is_over_does_not_count() -> None:
    work = Queue(
        (
            JobClass("first", 2, Fixed(650.0), most=1),
            JobClass("second", 1, Fixed(1000.0), gaps=Fixed(800.0), most=1),
        )
    )
    out = play(work, 2, "periodic", {"interval": 100.0}, horizon_s=1000.0, warmup_s=600.0, **PERIODIC)
    # Fifty seconds of two nodes and 200 s of one, in 400 s of two.
    assert out.metrics["node_goodput"] == out.metrics["node_utilisation"] == pytest.approx(300 / 800)
    assert out.buckets["goodput"] == pytest.approx(850.0)


def test_a_warm_up_that_outlasts_all_jobs_is_refused() -> None:
    with pytest.raises(SimError, match=r"all jobs are done at 100 s; shorten study\.warmup"):
        play(one_job(100.0), 1, "periodic", {"interval": 10.0}, warmup_s=200.0, **PERIODIC)


def test_what_did_not_happen_has_no_mean() -> None:
    work = Queue((JobClass("long", 1, Fixed(2000.0), most=1), JobClass("short", 1, Fixed(10.0), most=1)))
    out = play(work, 2, "periodic", {"interval": 100.0}, horizon_s=1000.0, **PERIODIC)
    assert out.metrics["time_in_system.short_s"] == 10.0
    assert not {"time_in_system.long_s", "recovery_s"} & out.metrics.keys()


def test_a_job_is_told_that_notices_stop_it_too() -> None:
    config = Config(
        Cluster(16),
        one_job(1.0),
        PolicySpec("none"),
        failures=(NodeFailures(Exponential(8e6)),),
        notices=(
            SpotNotice(Exponential(8000.0), Constant(600.0), 0.0),
            Maintenance(Exponential(1000.0), 2, 60.0, Constant(600.0)),
        ),
    )
    # Two neighbours drained touch eight nodes from 9 of 15 places.
    assert job_rate(config, 8) == pytest.approx(8 / 8e6 + 8 / 8000 + 9 / 15 / 1000)
    alone = Config(Cluster(16), one_job(1.0), PolicySpec("none"), notices=config.notices)
    out = queue.run(alone, Streams(0, 0), registry.make("exact", {}), False)
    assert out.status == "done", "the MTBF is known"


def test_a_question_to_the_policy_does_not_begin_a_stall_anew() -> None:
    more: dict[str, Any] = {"storage": (level("s", "nothing", 10.0),), "horizon_s": 1000.0}
    options = {"how": "none", "base": {"name": "periodic", "interval": 50.0}}
    for gap_s in (3.0, 500.0):
        work = Queue(
            (
                JobClass("long", 2, Fixed(1e4), most=1),
                JobClass("urgent", 2, Fixed(1.0), 1, Fixed(1.0), 1),
                # Whenever one comes, the long one is asked to make room for the urgent one.
                JobClass("tiny", 1, Fixed(1.0), 0, Fixed(gap_s)),
            )
        )
        out = play(work, 2, "preemption", options, **more)
        assert out.metrics["checkpoints"] == 16
        assert out.buckets["checkpoint_stall"] == pytest.approx(160.0)
        assert out.buckets["goodput"] == pytest.approx(840.0)


class Longer:
    """Has a longer interval once it is asked to make room."""

    name = "longer"

    def on_event(self, state: State, event: Event) -> list[Action]:
        return [SetInterval({"start": 50.0, "preempt": 400.0}.get(event.kind))]


def test_a_checkpoint_under_way_ends_whatever_the_interval_becomes() -> None:
    work = Queue(
        (JobClass("long", 1, Fixed(500.0), most=1), JobClass("urgent", 1, Fixed(1.0), 1, Fixed(55.0), 1))
    )
    config = Config(Cluster(1), work, PolicySpec("none"), storage=(level("s", "nothing", 10.0),))
    out = queue.run(config, Streams(0, 0), Longer(), False)
    # At 55 s the first has half its stall; the next comes after 400 s of work.
    assert out.metrics["checkpoints"] == 2
    assert out.metrics["time_in_system.long_s"] == pytest.approx(520.0)


SHARED: dict[str, Any] = {"storage": (Storage("s", write_bps=10.0, read_bps=20.0, shared=True),)}


def two(work_s: float = 250.0) -> Queue:
    """Two jobs of a node, whose checkpoints of 100 bytes fall together."""
    return Queue((JobClass("a", 1, Fixed(work_s), most=2),), state_bytes=100.0)


def test_jobs_that_save_or_restore_at_once_share_the_bandwidth() -> None:
    every = {"interval": 100.0}
    assert play(two(), 2, "periodic", every, **SHARED).metrics["time_in_system_s"] == pytest.approx(290.0)
    alone = play(two(), 1, "periodic", every, **SHARED)
    assert alone.metrics["makespan_s"] == pytest.approx(2 * 270.0)
    # Both fail at 130 s, 10 s after a checkpoint, and read it back together.
    faults = TraceFailures("by hand", ((130.0, 10.0, 0), (130.0, 10.0, 1)), 1e9)
    out = play(two(), 2, "periodic", every, failures=(faults,), **SHARED)
    assert out.metrics["time_in_system_s"] == pytest.approx(130.0 + 10.0 + 10.0 + 100.0 + 20.0 + 50.0)
    # One fails after half of a shared save and leaves all the bandwidth to the other, then begins anew.
    fault = TraceFailures("by hand", ((105.0, 1e6, 0),), 1e9)
    out = play(two(), 2, "periodic", every, failures=(fault,), **SHARED)
    assert out.buckets["lost_work"] == pytest.approx(100.0)
    assert out.metrics["makespan_s"] == pytest.approx(100.0 + 12.5 + 100.0 + 10.0 + 50.0 + 270.0)


def test_shared_bandwidth_is_no_more_for_many_nodes_whatever_a_save_stalls() -> None:
    queue = Queue((JobClass("a", 8, Fixed(500.0), most=1),), state_bytes=800.0)
    storage = Storage("s", write_bps=10.0, read_bps=10.0, shared=True, stall=Fixed(5.0))
    fault = TraceFailures("by hand", ((150.0, 10.0, 0),), 1e9)
    out = play(queue, 8, "periodic", {"interval": 100.0}, storage=(storage,), failures=(fault,))
    # The second 100 s of work are cut at 45, and 80 s go into reading the first back.
    assert out.buckets["startup"] == pytest.approx(80.0)


def test_a_job_of_higher_priority_waits_for_the_saves_of_all() -> None:
    for nodes, waits_s in ((4, 10.0), (2, 20.0), (1, 40.0)):
        low = JobClass("low", nodes, Fixed(1000.0), most=4 // nodes)
        work = Queue((low, JobClass("high", 4, Fixed(50.0), 1, Fixed(500.0), 1)), state_bytes=100.0)
        out = play(work, 4, "preemption", {"how": "checkpoint"}, **SHARED)
        assert out.metrics["time_in_system.high_s"] == pytest.approx(waits_s + 50.0)


def test_a_save_under_way_makes_room_as_it_ends() -> None:
    low, high = JobClass("low", 2, Fixed(250.0), most=1), JobClass("high", 2, Fixed(50.0), 1, Fixed(105.0), 1)
    for how, high_s, low_s in (("checkpoint", 55.0, 315.0 + 10.0 + 5.0 - 5.0), ("kill", 50.0, 425.0)):
        options = {"how": how, "interval": 100.0}
        out = play(Queue((low, high), state_bytes=100.0), 2, "preemption", options, **SHARED)
        assert out.metrics["time_in_system.high_s"] == pytest.approx(high_s)
        assert out.metrics["time_in_system.low_s"] == pytest.approx(low_s)


def drained(work: Queue, lead_s: float, name: str, options: dict[str, Any], **more: Any) -> Outcome:
    """Two machines, of which maintenance takes the one that the first job has after 1,000 s."""
    notices = (Maintenance(Fixed(1000.0), 1, lead_s, Fixed(1e6)),)
    costs = Costs(migrate=Constant(7.0))
    config = Config(
        Cluster(2), work, PolicySpec("none"), notices=notices, costs=costs, horizon_s=1500.0, **more
    )
    for seed in range(20):
        out = queue.run(replace(config, seed=seed), Streams(seed, 0), registry.make(name, options), False)
        if out.metrics["migrations"]:
            return out
    raise AssertionError("it never moves")


def test_a_notice_during_a_save_is_heard_at_its_end() -> None:
    work = Queue((JobClass("a", 1, Fixed(2000.0), most=1),), state_bytes=100.0)
    # The eighth save goes from 870 to 880 s.
    out = drained(work, 125.0, "migrate", {"interval": 100.0}, **SHARED)
    assert out.buckets["migration"] == pytest.approx(7.0)
    assert out.buckets["lost_work"] == 0


def test_a_job_that_moves_is_asked_to_make_room_afterwards() -> None:
    classes = JobClass("low", 1, Fixed(2000.0), most=1), JobClass("high", 1, Fixed(50.0), 1, Fixed(883.0), 1)
    options = {"how": "checkpoint", "base": {"name": "migrate", "interval": 1e9}}
    out = drained(Queue(classes), 120.0, "preemption", options, storage=(level("s", "nothing", 10.0),))
    # It moves until 887 s and is saved until 897 s.
    assert out.metrics["time_in_system.high_s"] == pytest.approx(14.0 + 50.0)
