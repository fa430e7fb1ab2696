"""Checkpoints that are played one by one against those that are counted, over times up to ten years."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.engine import training
from sim.engine.ledger import Outcome
from sim.engine.streams import Streams
from sim.maths.laws import Constant, Exponential
from sim.policies.interval import Periodic
from sim.studies.config import Cluster, Config, Costs, NodeFailures, PolicySpec, Storage, Training

YEAR = 365 * 86400.0


class Listening(Periodic):
    """Does what periodic does, and hears of each checkpoint."""

    ignores = frozenset()


def both(interval_s: float, stall_s: float, seed: int, **more: Any) -> tuple[Outcome, Outcome]:
    base: dict[str, Any] = {
        "cluster": Cluster(8, spares=1),
        "policy": PolicySpec("periodic"),
        "repair": Constant(6 * 3600.0),
        "storage": (Storage("remote", stall=Constant(stall_s)),),
        "costs": Costs(restart=Constant(300.0)),
        "seed": seed,
    }
    config = Config(**(base | more))
    played, counted = (
        training.run(config, Streams(seed, 0), policy, False)
        for policy in (Listening(interval_s), Periodic(interval_s))
    )
    return played, counted


def same(played: Outcome, counted: Outcome) -> None:
    assert played.status == counted.status != "livelock"
    for name in ("checkpoints", "failures"):
        assert played.metrics[name] == counted.metrics[name]
    for name, seconds in counted.buckets.items():
        # A rounding error of the clock for each checkpoint.
        assert played.buckets[name] == pytest.approx(seconds, rel=1e-9, abs=1e-2)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**32),
    st.floats(0.01, 10),
    st.integers(200, 3000),
    st.sampled_from((0.0, 30.0, 61.7)),
    st.floats(5, 200),
)
# So many that the clock can no longer tell a millionth of a millionth of an interval.
@example(1, 0.7, 15001, 61.7, 30.0)
@example(2, 10.0, 20011, 61.7, 30.0)
def test_a_policy_that_plays_each_checkpoint_comes_to_what_counting_them_does(
    seed: int, years: float, checkpoints: int, stall_s: float, failures: float
) -> None:
    horizon_s = years * YEAR
    law = NodeFailures(Exponential(8 * horizon_s / failures))
    more = {"workload": Training(8), "failures": (law,), "horizon_s": horizon_s}
    same(*both(horizon_s / checkpoints, stall_s, seed, **more))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.floats(1, 1e5), st.integers(1, 2000), st.floats(0.1, 20))
def test_work_of_whole_intervals_ends_without_a_checkpoint_either_way(
    seed: int, interval_s: float, intervals: int, failures: float
) -> None:
    work = Training(8, interval_s * intervals)
    law = NodeFailures(Exponential(8 * max(work.work_s / failures, 20 * interval_s)))
    quick = {"repair": Constant(interval_s / 10), "costs": Costs(restart=Constant(interval_s / 10))}
    same(*both(interval_s, interval_s / 50, seed, workload=work, failures=(law,), **quick))


def test_ten_years_of_checkpoints_are_no_livelock_for_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.engine.clock.MOST_EVENTS", 1000)
    law = NodeFailures(Exponential(8 * YEAR))
    same(*both(43200.0, 60.0, 1, workload=Training(8), failures=(law,), horizon_s=10 * YEAR))
