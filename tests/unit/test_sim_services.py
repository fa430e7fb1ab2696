"""What a service is judged by: loading a cache is paid for, and who still waits at the end is counted."""

from __future__ import annotations

from typing import Any

import pytest

from sim.engine import inference
from sim.engine.ledger import Outcome
from sim.engine.streams import Streams
from sim.errors import SimError
from sim.maths.laws import Fixed
from sim.policies import registry
from sim.policies.base import Action, Event, RestoreCache, State
from sim.studies.config import Cluster, Config, Inference, PolicySpec, Requests, TraceFailures


def play(policy: str, times_s: tuple[float, ...], horizon_s: float = 1e6, warmup_s: float = 0.0,
         options: dict[str, object] | None = None, **more: Any) -> Outcome:  # fmt: skip
    """Requests of 100 tokens in and 10 out: 1 s to the first token computed, 1 s for the rest."""
    count = len(times_s)
    requests = Requests("made up", times_s, (100,) * count, (10,) * count)
    work = Inference(requests, most=1, prefill_tps=100.0, decode_tps=10.0, **more)
    config = Config(
        Cluster(1), work, PolicySpec(policy), horizon_s=horizon_s, warmup_s=warmup_s
    )  # fmt: skip
    return inference.run(config, Streams(1, 0), registry.make(policy, options or {}), False)


CACHE: dict[str, Any] = {"least": 1, "keep_share": 1.0, "cache_bytes_per_token": 10.0}


def test_the_overhead_of_loading_a_cache_is_paid() -> None:
    for overhead, ttft in ((0.0, 0.2), (0.3, 0.5), (0.9, 1.0)):
        out = play("kv-cheaper", (0.0,), options={"overhead": overhead}, **CACHE, cache_read_bps=5000.0)
        assert out.metrics["ttft_mean_s"] == pytest.approx(ttft)
        assert out.metrics["cache_s"] == pytest.approx(ttft)


class Loads:
    """Loads each cache, whether or not there is a way."""

    name = "loads"

    def on_event(self, state: State, event: Event) -> list[Action]:
        return [RestoreCache()] if event.kind == "resume" else []


def test_a_cache_that_nothing_says_the_size_of_is_not_loaded_for_nothing() -> None:
    config = Config(
        Cluster(1), Inference(Requests("a", (0.0,), (9,), (9,)), least=1, keep_share=1.0), PolicySpec("a")
    )
    with pytest.raises(SimError, match=r"'loads': it loads caches.*set inference.cache_per_token and"):
        inference.run(config, Streams(1, 0), Loads(), False)


def test_who_still_waits_at_the_end_is_counted_with_the_wait_so_far() -> None:
    out = play("none", (0.0, 4.0), horizon_s=10.0)
    assert out.metrics["requests_done"] == 0
    assert [out.metrics[f"{name}_mean_s"] for name in ("ttft", "latency")] == [8.0, 8.0]
    late = play("none", (0.0, 4.0), horizon_s=10.0, warmup_s=3.0)
    assert late.metrics["ttft_mean_s"] == 6.0, "not those of the warm-up"
    # The first is served, the second being served, the third waits behind it.
    busy = play("none", (0.0, 1.0, 1.5), horizon_s=3.0, least=1)
    assert busy.metrics["requests_done"] == 1
    assert busy.metrics["ttft_mean_s"] == pytest.approx((1.0 + 1.5) / 2)
    assert busy.metrics["latency_mean_s"] == pytest.approx((2.0 + 1.5) / 2)


def test_where_nobody_asks_there_is_no_time_to_the_first_token() -> None:
    metrics = play("none", (), horizon_s=9.0, least=1).metrics
    assert "ttft_p99_s" not in metrics and "latency_p95_s" not in metrics


def lost(nodes: int, spares: int, *faults: tuple[float, float, int]) -> Outcome:
    """Two replicas that are always wanted, and machines that go."""
    work = Inference(Requests("a", (0.0, 900.0), (9,) * 2, (9,) * 2), least=2, most=2, cold=Fixed(10.0))
    failures = (TraceFailures("by hand", faults, 1e9),)
    config = Config(Cluster(nodes, spares=spares), work, PolicySpec("a"), failures=failures)
    return inference.run(config, Streams(1, 0), registry.make("cold-start", {}), False)


def test_a_replica_whose_machine_failed_starts_on_another() -> None:
    fault = (100.0, 500.0, 0)
    for nodes, spares in ((2, 1), (3, 0)):
        assert lost(nodes, spares, fault).recoveries_s == [10.0]
    assert lost(2, 0, fault).recoveries_s == [510.0], "there is no other"
    # The spare that took over fails, too, and the first machine is back by then.
    assert lost(2, 1, fault, (700.0, 500.0, 2)).recoveries_s == [10.0, 10.0]
    # One that is away anyway is none to start on.
    out = lost(2, 1, (50.0, 500.0, 2), fault)
    assert out.recoveries_s == [460.0] and out.metrics["failures"] == 1
    # Nothing but what ran on it was lost: the machine serves on.
    assert lost(2, 0, (100.0, 0.0, 0)).recoveries_s == [10.0]
