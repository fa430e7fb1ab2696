"""Training gangs on a cluster: sets the stage, runs the clock, adds up."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Generator, Iterator

import simpy

from sim.engine import hardware
from sim.engine.clock import Clock, LivelockError
from sim.engine.fleet import Fleet
from sim.engine.gang import Gang
from sim.engine.ledger import BUCKETS, Outcome, Span, Status
from sim.engine.link import Link
from sim.engine.streams import Streams
from sim.engine.terms import terms
from sim.policies.base import Policy
from sim.studies.config import Config, Training


def run(config: Config, streams: Streams, policy: Policy, timeline: bool) -> Outcome:
    """Play a replication of training gangs.

    Args:
        config: its workload is training.
        streams: randomness of the replication.
        policy: asked for each gang, of which every one has a copy.
        timeline: whether to keep who was in which state when.

    Raises:
        SimError: the policy asks for what a gang cannot do, or a trace is over.

    """
    job = config.workload
    assert isinstance(job, Training)
    clock = Clock()
    spans: list[Span] | None = [] if timeline else None
    fleet = Fleet(clock, config.cluster.machines, spans)
    bargain = terms(config, job)
    # Bandwidth is worked out as an event only where several divide it.
    links = {
        storage.name: Link(clock, storage.write_bps)
        for storage in config.storage
        if job.count > 1 and storage.shared and storage.stall is None
    }
    gangs = [
        Gang(number, clock, fleet, bargain, copy.deepcopy(policy), streams, links, spans)
        for number in range(job.count)
    ]
    running = [gang.start() for gang in gangs]
    clock.process(_happen(clock, fleet, hardware.stream(config, streams)))
    status: Status = "done"
    try:
        done = clock.all_of(running)
        if math.isfinite(config.horizon_s):
            clock.run(until=clock.any_of([done, clock.timeout(config.horizon_s)]))
        else:
            clock.run(until=done)
    except LivelockError:
        status = "livelock"
    for gang in gangs:
        gang.close()
    fleet.close()
    if status == "done" and any(gang.end_s is None for gang in gangs):
        status = "horizon"
    return _outcome(config, clock, fleet, gangs, status, spans or [])


def _happen(
    clock: Clock, fleet: Fleet, items: Iterator[hardware.Item]
) -> Generator[simpy.Event, object, None]:
    """Bring about what happens to the machines.

    Raises:
        LivelockError: so much has happened that nobody will ever get enough of them.

    """
    for item in items:
        if clock.worn_out:
            raise LivelockError
        yield clock.timeout(max(0.0, item.at_s - clock.now))
        if isinstance(item, hardware.Incident):
            fleet.strike(item)
        else:
            fleet.announce(item)


def _outcome(
    config: Config, clock: Clock, fleet: Fleet, gangs: list[Gang], status: Status, spans: list[Span]
) -> Outcome:
    end_s = clock.now
    ledgers = [gang.ledger.buckets() for gang in gangs]
    buckets = {name: math.fsum(ledger[name] for ledger in ledgers) for name in BUCKETS}
    wall_s = math.fsum(end_s if gang.end_s is None else gang.end_s for gang in gangs)
    counts: Counter[str] = Counter()
    for gang in gangs:
        counts.update(gang.counts)
    recoveries_s = [seconds for gang in gangs for seconds in gang.recoveries_s]
    node_s = config.cluster.machines * end_s
    metrics = {
        "wall_s": wall_s,
        "makespan_s": end_s,
        "ettr": buckets["goodput"] / wall_s if wall_s else 1.0,
        "goodput_s": buckets["goodput"],
        "lost_work_s": buckets["lost_work"],
        "cost_usd": node_s * config.costs.node_usd_per_s,
        "nodes_down": fleet.down_area_s / end_s if end_s else 0.0,
        "most_nodes_down": float(fleet.most_down),
        "events": float(clock.events),
        "checkpoints": float(sum(gang.checkpoints for gang in gangs)),
        **{name: float(counts[name]) for name in gangs[0].counts},
    }
    if counts["failures"]:
        metrics["mttf_s"] = wall_s / counts["failures"]
    if recoveries_s:
        metrics["recovery_s"] = math.fsum(recoveries_s) / len(recoveries_s)
    if config.cluster.spares:
        metrics["spare_use"] = fleet.spare_area_s(config.cluster.spares) / (config.cluster.spares * end_s)
    if status != "done":
        metrics["unfinished"] = float(sum(gang.end_s is None for gang in gangs))
    spans.sort(key=lambda span: (span.t0_s, span.who))
    return Outcome(status, metrics, buckets, recoveries_s, spans)
