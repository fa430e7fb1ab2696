"""What happens to machines: failures, maintenance, spot machines taken, and what is told of it before.

None of it depends on what runs, so it is one stream of incidents in order of time, drawn in blocks as it is
needed; one that strikes a machine which is down already does nothing more. Nodes that fail without memory are
one process of the summed rate, with the node drawn for each failure; others have a clock each.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sim.engine.streams import Streams
from sim.errors import SimError
from sim.maths.laws import Constant, Exponential, Fixed, Law
from sim.policies.base import Cause
from sim.studies.config import (
    Cluster,
    Config,
    GroupFailures,
    Maintenance,
    NodeFailures,
    Predictor,
    SpotNotice,
    TraceFailures,
)  # fmt: skip

_BLOCK = 256
_PARTS = 4
"""Streams that one entry of a study may use: a number of its own for each keeps entries apart."""

Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class Incident:
    """Machines go down at `at_s` for `down_s`. `severity`: 0 process, 1 node, 2 rack, 3 switch."""

    at_s: float
    nodes: Sequence[int]
    down_s: float
    cause: Cause
    severity: int


@dataclass(frozen=True, slots=True)
class Announcement:
    """Somebody says at `at_s` that machines will go in `lead_s`; a prediction may be wrong."""

    at_s: float
    nodes: Sequence[int]
    lead_s: float
    kind: Literal["notice", "prediction"]
    cause: Cause


Item = Incident | Announcement


def stream(config: Config, streams: Streams) -> Iterator[Item]:
    """All that happens to the machines of a replication, in order of time; without an end where it has none.

    Raises:
        SimError: a trace is over before the replication begins.

    """
    sources: list[Iterator[Item]] = []
    for number in range(len(config.failures)):
        for part, source in enumerate(_failures(config, streams, number)):
            if config.predictor is None:
                sources.append(source)
            else:
                rng = streams.make("predictor", _PARTS * number + part)
                sources.append(_predicted(source, config.predictor, config.cluster.machines, rng))
    for number, notice in enumerate(config.notices):
        if isinstance(notice, Maintenance):
            sources.append(_maintenance(notice, config.cluster, streams, number))
        elif isinstance(notice, SpotNotice):
            sources += _spot(notice, config.cluster, streams, number)
    return heapq.merge(*sources, key=lambda item: item.at_s)


def groups(cluster: Cluster, scope: Literal["rack", "switch"]) -> list[range]:
    """The machines of each rack or switch; spares are spread over them as the nodes are."""
    count = cluster.racks if scope == "rack" else cluster.switches
    edges = [round(cluster.machines * group / count) for group in range(count + 1)]
    return [range(first, last) for first, last in itertools.pairwise(edges)]


def parts(cluster: Cluster) -> list[range]:
    """Nodes and spares: clocks of their own, so that with more spares the nodes fail when they did."""
    spans = (range(cluster.nodes), range(cluster.nodes, cluster.machines))
    return [span for span in spans if span]


def _failures(config: Config, streams: Streams, number: int) -> Iterator[Iterator[Incident]]:
    failures = config.failures[number]
    match failures:
        case NodeFailures(law, process):
            repair = Constant(0.0) if process else config.repair
            for part, nodes in enumerate(parts(config.cluster)):
                source = _PARTS * number + part
                rngs = streams.make("failure", source), streams.make("repair", source)
                yield _of_nodes(
                    _lives(law, repair, len(nodes), *rngs), nodes, "process" if process else "node"
                )
        case GroupFailures(scope, law, repair):
            members = groups(config.cluster, scope)
            source = _PARTS * number
            rngs = streams.make("failure", source), streams.make("repair", source)
            lives = _lives(law, repair or config.repair, len(members), *rngs)
            yield _of_groups(lives, members, 2 if scope == "rack" else 3)
        case TraceFailures():
            yield _replayed(failures, streams, number)


def _of_nodes(
    lives: Iterator[tuple[float, int, float]], nodes: range, cause: Literal["node", "process", "spot"]
) -> Iterator[Incident]:
    severity = 0 if cause == "process" else 1
    for at_s, which, down_s in lives:
        yield Incident(at_s, (nodes[which],), down_s, cause, severity)


def _of_groups(
    lives: Iterator[tuple[float, int, float]], members: Sequence[range], severity: int
) -> Iterator[Incident]:
    for at_s, which, down_s in lives:
        yield Incident(at_s, members[which], down_s, "group", severity)


def _lives(law: Law, repair: Law, count: int, lives: Rng, repairs: Rng) -> Iterator[tuple[float, int, float]]:
    """When each of `count` things fails and how long it is down, in order of time."""
    if isinstance(law, Exponential):
        at_s = 0.0
        while True:
            times = at_s + lives.exponential(law.mean / count, _BLOCK).cumsum()
            which = lives.integers(0, count, _BLOCK)
            downs = repair.sample(repairs, _BLOCK)
            yield from zip(times.tolist(), which.tolist(), downs.tolist(), strict=True)
            at_s = float(times[-1])
    rows: list[tuple[list[float], list[float]]] = []

    def more() -> None:
        # A row is a life of each: a thing's k-th life is the same whatever happens to the others.
        shape = (max(1, _BLOCK // count), count)
        pairs = law.sample(lives, shape).tolist(), repair.sample(repairs, shape).tolist()
        rows.extend(zip(*pairs, strict=True))

    more()
    clocks = [(life_s, which, 0) for which, life_s in enumerate(rows[0][0])]
    heapq.heapify(clocks)
    while True:
        at_s, which, life = clocks[0]
        down_s = rows[life][1][which]
        if life + 1 == len(rows):
            more()
        heapq.heapreplace(clocks, (at_s + down_s + rows[life + 1][0][which], which, life + 1))
        yield at_s, which, down_s


def _replayed(trace: TraceFailures, streams: Streams, number: int) -> Iterator[Incident]:
    if trace.offset_s is None:
        begin_s = float(streams.make("failure", _PARTS * number).uniform(0, trace.span_s))
    else:
        begin_s = trace.start_s + streams.replication * trace.offset_s
    if trace.repeat:
        begin_s %= trace.span_s
    elif begin_s >= trace.span_s:
        raise SimError(
            f"could not replay trace '{trace.path}': it ends {trace.span_s:g} s after its start, before "
            f"replication {streams.replication} begins at {begin_s:g} s; set repeat, or a shorter offset"
        )
    for start_s, down_s, node in trace.faults:
        if start_s < begin_s < start_s + down_s:
            yield Incident(0.0, (node,), start_s + down_s - begin_s, "node", 1)
    for turn in itertools.count() if trace.repeat else (0,):
        for start_s, down_s, node in trace.faults:
            at_s = start_s - begin_s + turn * trace.span_s
            if at_s >= 0:
                yield Incident(at_s, (node,), down_s, "node", 1)


def _told(
    source: Iterator[Incident], lead_s: float, tell: Callable[[Incident], list[Announcement] | None]
) -> Iterator[Item]:
    """Incidents and what `tell` says of them, in order. None: nothing said yet, ask at the next one."""
    held: list[tuple[float, int, Item]] = []
    order = itertools.count()
    for incident in source:
        said = tell(incident)
        for item in (*(said or ()), incident):
            heapq.heappush(held, (item.at_s, next(order), item))
        # What is still to be said is said no earlier than this.
        while said is not None and held and held[0][0] <= incident.at_s - lead_s:
            yield heapq.heappop(held)[2]
    while held:
        yield heapq.heappop(held)[2]


def _before(incident: Incident, lead_s: float, kind: Literal["notice", "prediction"]) -> Announcement:
    lead_s = min(lead_s, incident.at_s)
    return Announcement(incident.at_s - lead_s, incident.nodes, lead_s, kind, incident.cause)


def _predicted(source: Iterator[Incident], predictor: Predictor, machines: int, rng: Rng) -> Iterator[Item]:
    """Failures with their predictions, and false alarms.

    Their number between two true predictions is geometric and they lie anywhere there: for Poisson failures
    that is a Poisson process of its own, and it holds the precision for any others.
    """
    if predictor.recall == 0:
        return source
    last_s = 0.0

    def tell(incident: Incident) -> list[Announcement] | None:
        nonlocal last_s
        if rng.random() >= predictor.recall:
            return None
        alarms = int(rng.geometric(predictor.precision)) - 1
        times = np.sort(rng.uniform(last_s, incident.at_s, alarms)).tolist()
        nodes = rng.integers(0, machines, alarms).tolist()
        last_s = incident.at_s
        false = (Incident(at_s, (node,), 0.0, "node", 1) for at_s, node in zip(times, nodes, strict=True))
        return [_before(one, predictor.lead_s, "prediction") for one in (*false, incident)]

    return _told(source, predictor.lead_s, tell)


def _maintenance(notice: Maintenance, cluster: Cluster, streams: Streams, number: int) -> Iterator[Item]:
    rng = streams.make("maintenance", number)

    def source() -> Iterator[Incident]:
        at_s = 0.0
        while True:
            at_s += _draw(notice.every, rng)
            first = int(rng.integers(0, cluster.machines - notice.nodes + 1))
            down_s = _draw(notice.lasting, rng)
            yield Incident(at_s, range(first, first + notice.nodes), down_s, "maintenance", 1)

    return _told(source(), notice.lead_s, lambda one: [_before(one, notice.lead_s, "notice")])


def _draw(law: Law, rng: Rng) -> float:
    return law.mean if isinstance(law, Constant | Fixed) else float(law.sample(rng, 1)[0])


def _spot(notice: SpotNotice, cluster: Cluster, streams: Streams, number: int) -> Iterator[Iterator[Item]]:
    for part, nodes in enumerate(parts(cluster)):
        source = _PARTS * number + part
        rng = streams.make("spot", 2 * source)
        lives = _lives(notice.law, notice.away, len(nodes), rng, streams.make("spot", 2 * source + 1))
        looks = streams.make("spot", 1_000_000 + source)
        taken = _of_nodes(lives, nodes, "spot")
        yield _told(taken, notice.lead_s, _seen(notice, looks))


def _seen(notice: SpotNotice, rng: Rng) -> Callable[[Incident], list[Announcement]]:
    def tell(incident: Incident) -> list[Announcement]:
        covered, late_s = rng.random() < notice.coverage, rng.uniform(0, notice.poll_s)
        seen_s = notice.lead_s - late_s
        return [_before(incident, seen_s, "notice")] if covered and seen_s > 0 else []

    return tell
