"""A job with a deadline on spot machines, in windows of what capacity there was.

A replication is a window, and there are no more of them. A policy that chooses among regions sees all of
them; any other is played alone in each, and the outcome is the mean over them.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence

from sim.engine.ledger import Ledger, Outcome, Span
from sim.engine.streams import Streams
from sim.errors import SimError
from sim.models.regions import Market, RegionalJob, RegionalOutcome
from sim.models.regions import run as run_regions
from sim.policies.base import Policy
from sim.studies.config import Config, SpotWork

_STATES = {"none": "waiting", "spot": "spot", "on-demand": "on-demand"}


def run(config: Config, streams: Streams, policy: Policy, timeline: bool) -> Outcome:
    """Play one window to the end of the job, or its deadline.

    Raises:
        SimError: there are fewer windows than replications, capacity ends before a window does, or the
            policy's answer is not a place.

    """
    work = config.workload
    assert isinstance(work, SpotWork)
    most = len(work.starts)
    if streams.replication >= most:
        raise SimError(
            f"could not play replication {streams.replication} of policy '{policy.name}': there are {most} "
            f"windows of capacity; set study.replications.max to {most} or less"
        )
    markets = [
        Market(region.name, region.available, region.spot_usd_per_s * 3600, region.on_demand_usd_per_s * 3600)
        for region in work.regions
    ]
    job = RegionalJob(
        work.work_s, work.deadline_s, work.restart_s, work.tick_s, work.state_bytes, work.move_usd_per_byte
    )
    start = work.starts[streams.replication]
    if getattr(policy, "regional", False) or len(markets) == 1:
        played = {"job0": run_regions(policy, job, markets, start)}
    else:
        # Each zone has a policy of its own, which knows nothing of the others.
        policies = [copy.deepcopy(policy) for _ in markets]
        played = {
            f"job in {market.name}": run_regions(own, job, [market], start)
            for own, market in zip(policies, markets, strict=True)
        }
    spans = [span for who, out in played.items() for span in _spans(who, out, work.tick_s)]
    return _mean([_outcome(work, out) for out in played.values()], spans if timeline else [])


def _mean(outcomes: Sequence[Outcome], spans: list[Span]) -> Outcome:
    count = len(outcomes)

    def mean(name: str) -> float:
        return math.fsum(outcome.metrics[name] for outcome in outcomes) / count

    ledger = Ledger()
    for outcome in outcomes:
        for bucket, seconds in outcome.buckets.items():
            ledger.add(bucket, seconds / count)
    done = all(outcome.status == "done" for outcome in outcomes)
    metrics = {name: mean(name) for name in outcomes[0].metrics}
    return Outcome("done" if done else "horizon", metrics, ledger.buckets(), [], spans)


def _outcome(work: SpotWork, out: RegionalOutcome) -> Outcome:
    ledger = Ledger()
    done_s = out.spot_work_s + out.on_demand_work_s
    held_s = out.spot_held_s + out.on_demand_held_s
    ledger.add("goodput", done_s)
    ledger.add("restart", out.starting_s)
    ledger.add("waiting", out.idle_s)
    # Ticks are paid whole: what is left of the last one.
    ledger.add("idle", held_s - done_s - out.starting_s)
    metrics = {
        "wall_s": out.idle_s + held_s,
        "goodput_s": done_s,
        "ettr": done_s / out.end_s if out.end_s else 0.0,
        "cost_usd": out.cost,
        "move_usd": out.move_cost,
        "probe_usd": out.probe_cost,
        "deadline_met": float(out.done and out.end_s <= work.deadline_s),
        "spot_work_s": out.spot_work_s,
        "on_demand_work_s": out.on_demand_work_s,
        "spot_held_s": out.spot_held_s,
        "on_demand_held_s": out.on_demand_held_s,
        "preemptions": float(out.preemptions),
        "starts": float(out.starts),
        "moves": float(out.moves),
        "events": float(len(out.held)),
    }
    return Outcome("done" if out.done else "horizon", metrics, ledger.buckets())


def _spans(who: str, out: RegionalOutcome, tick_s: float) -> list[Span]:
    spans: list[Span] = []
    tick = 0
    for (place, region), same in itertools.groupby(out.held):
        length = len(list(same))
        spans.append(Span(tick * tick_s, (tick + length) * tick_s, who, _STATES[place], region))
        tick += length
    return spans
