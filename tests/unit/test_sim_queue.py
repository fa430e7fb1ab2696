"""Queues of jobs by hand: where checkpoints go and what is lost with it, and what is counted of a run."""

from __future__ import annotations

from typing import Any

import pytest

from sim.engine import queue
from sim.engine.ledger import Outcome
from sim.engine.streams import Streams
from sim.maths.laws import Constant, Fixed
from sim.policies import registry
from sim.studies.config import (
    Cluster,
    Config,
    JobClass,
    PolicySpec,
    Queue,
    Scope,
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
