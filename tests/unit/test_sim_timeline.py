"""Timelines: who was in which state when adds up to the seconds of the books."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sim.engine import training
from sim.engine.ledger import Outcome
from sim.engine.streams import Streams
from sim.maths.laws import Constant, Exponential, Lognormal
from sim.policies import registry
from sim.studies.config import Cluster, Config, Costs, NodeFailures, PolicySpec, Storage, Training


def play(policy: str, options: dict[str, Any], **more: Any) -> Outcome:
    base: dict[str, Any] = {
        "cluster": Cluster(2),
        "workload": Training(2, count=1),
        "policy": PolicySpec("none"),
        "failures": (NodeFailures(Exponential(4000.0)),),
        "storage": (Storage("remote", stall=Constant(17.0), persist=Constant(40.0)),),
        "costs": Costs(restart=Constant(50.0), async_stall=Constant(3.0)),
        "horizon_s": 50_000.0,
    }
    return training.run(Config(**(base | more)), Streams(1, 0), registry.make(policy, options), True)


def seconds(out: Outcome, state: str) -> float:
    return math.fsum(
        span.t1_s - span.t0_s for span in out.spans if span.who == "job0" and span.state == state
    )


@pytest.mark.parametrize(
    ("policy", "options", "more"),
    [
        ("periodic", {"interval": 123.0}, {}),
        ("asynchronous", {"interval": 123.0}, {}),
        ("adaptive", {"guess_mtbf": 2000.0, "guess_stall": 17.0}, {}),
        ("periodic", {"interval": 123.0}, {"storage": (Storage("s", stall=Lognormal(20.0, 1.0)),)}),
        ("periodic", {"interval": 50.0}, {"storage": (Storage("s", stall=Constant(0.0)),)}),
    ],
)
def test_a_timeline_has_the_seconds_of_the_books(
    policy: str, options: dict[str, Any], more: dict[str, Any]
) -> None:
    out = play(policy, options, **more)
    assert out.metrics["failures"] > 5
    for state, bucket in (("work", "goodput"), ("lost_work", "lost_work"), ("restart", "restart")):
        assert seconds(out, state) == pytest.approx(out.buckets[bucket], abs=1e-3)
    assert seconds(out, "checkpoint_stall") == pytest.approx(out.buckets["checkpoint_stall"], abs=1e-3)
    spans = sorted(span.t0_s for span in out.spans if span.who == "job0")
    assert len(spans) == len(set(spans))


def test_more_checkpoints_than_anybody_could_see_are_shown_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.engine.progress.MOST_SHOWN", 100)
    out = play("periodic", {"interval": 50.0})
    stalls = [span for span in out.spans if span.state == "checkpoint_stall"]
    together = seconds(out, "work_and_checkpoints")
    assert 0 < len(stalls) <= 101 + out.metrics["failures"]
    assert seconds(out, "work") + seconds(out, "checkpoint_stall") + together == pytest.approx(
        out.buckets["goodput"] + out.buckets["checkpoint_stall"], abs=1e-3
    )
