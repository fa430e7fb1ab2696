"""A job with a deadline on spot machines, in windows of what capacity there was.

A replication is a window: replication r of a policy that runs in one zone has zone r modulo the zones, and
window r over the zones; one that chooses among regions sees all of them in window r. So the first as many
replications as there are zones and windows each see something of their own, and there are no more.
"""

from __future__ import annotations

import itertools

from sim.config import Config, SpotWork
from sim.errors import SimError
from sim.ledger import Ledger, Outcome, Span
from sim.policies.base import Policy
from sim.regions import Market, RegionalJob, RegionalOutcome
from sim.regions import run as run_regions
from sim.streams import Streams

_STATES = {"none": "waiting", "spot": "spot", "on-demand": "on-demand"}


def windows(work: SpotWork, policy: Policy) -> int:
    """How many replications there are something of their own to see for."""
    return len(work.starts) * (1 if _regional(policy) else len(work.regions))


def _regional(policy: Policy) -> bool:
    return bool(getattr(policy, "regional", False))


def run(config: Config, streams: Streams, policy: Policy, timeline: bool) -> Outcome:
    """Play one window to the end of the job, or its deadline.

    Raises:
        SimError: there are fewer windows than replications, capacity ends before a window, or the policy's
            answer is not a place.

    """
    work = config.workload
    assert isinstance(work, SpotWork)
    most = windows(work, policy)
    if streams.replication >= most:
        raise SimError(
            f"could not play replication {streams.replication} of policy '{policy.name}': there are {most} "
            f"windows of capacity; set study.replications.max to {most} or less"
        )
    markets = [
        Market(region.name, region.available, region.spot_usd_per_s * 3600, region.on_demand_usd_per_s * 3600)
        for region in work.regions
    ]
    window = streams.replication
    if not _regional(policy):
        window, zone = divmod(window, len(markets))
        markets = [markets[zone]]
    job = RegionalJob(
        work.work_s, work.deadline_s, work.restart_s, work.tick_s, work.state_bytes, work.move_usd_per_byte
    )
    out = run_regions(policy, job, markets, work.starts[window])
    return _outcome(work, out, _spans(out, work.tick_s) if timeline else [])


def _outcome(work: SpotWork, out: RegionalOutcome, spans: list[Span]) -> Outcome:
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
    return Outcome("done" if out.done else "horizon", metrics, ledger.buckets(), [], spans)


def _spans(out: RegionalOutcome, tick_s: float) -> list[Span]:
    spans: list[Span] = []
    tick = 0
    for (place, region), same in itertools.groupby(out.held):
        length = len(list(same))
        spans.append(Span(tick * tick_s, (tick + length) * tick_s, "job0", _STATES[place], region))
        tick += length
    return spans
