"""What a training job pays, and what its policy is told of that: worked out once from the configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sim.engine.hardware import groups
from sim.engine.schedule import Price
from sim.maths.laws import Constant, Law
from sim.policies.base import MEMORY, Level, State
from sim.studies.config import (
    Config,
    GroupFailures,
    Maintenance,
    NodeFailures,
    Predictor,
    SpotNotice,
    Storage,
    TraceFailures,
    Training,
)

SEVERITY = {"node": 1, "rack": 2, "switch": 3, "nothing": 4}
"""A level survives a failure that is less severe than what it is lost with."""


@dataclass(frozen=True)
class Place:
    """Where checkpoints go: what a blocking one and an asynchronous one take there, and reading one back."""

    name: str
    blocking: Price
    background: Price
    restore: Law
    severity: int
    storage: Storage | None = None

    def price(self, asynchronous: bool) -> Price:
        """Of a checkpoint of that kind."""
        return self.background if asynchronous else self.blocking


@dataclass(frozen=True)
class Terms:
    """All that a gang needs of a configuration."""

    config: Config
    job: Training
    places: dict[str, Place] = field(default_factory=dict[str, Place])
    """By name, the cheapest first; in-memory copies apart."""
    last: str = ""
    """The level that survives most: where checkpoints go unless a policy says otherwise."""

    @property
    def memory(self) -> Place:
        """The level of copies in the memory of other machines."""
        costs = self.config.costs
        price = Price(costs.replica_stall or Constant(0.0), Constant(0.0))
        return Place(MEMORY, price, price, costs.replica_restore, SEVERITY["nothing"])

    def place(self, level: str) -> Place:
        """The level of that name."""
        return self.memory if level == MEMORY else self.places[level]


def terms(config: Config, job: Training) -> Terms:
    """The terms of a configuration's training jobs."""
    found = [_place(storage, config, job) for storage in config.storage or (Storage("storage"),)]
    last = max(found, key=lambda place: (place.severity, place.blocking.stall.mean)).name
    found.sort(key=lambda place: (place.severity, place.blocking.stall.mean))
    return Terms(config, job, {place.name: place for place in found}, last)


def _place(storage: Storage, config: Config, job: Training) -> Place:
    size = job.state_bytes if storage.shared else job.state_bytes / job.nodes
    stall = storage.stall or Constant(size / storage.write_bps)
    # Written while work goes on, a checkpoint takes as long to count as a blocking one stalls.
    persist = storage.persist or stall
    restore = storage.restore or Constant(size / storage.read_bps)
    return Place(
        storage.name,
        Price(stall, Constant(0.0)),
        Price(config.costs.async_stall or stall, persist),
        restore,
        SEVERITY[storage.lost_with],
        storage,
    )


def rates(config: Config, job: Training) -> dict[int, float]:
    """Failures a second that strike one gang, by severity: expected from means."""
    found = dict.fromkeys(range(4), 0.0)
    for failures in config.failures:
        match failures:
            case NodeFailures(law, process):
                found[0 if process else 1] += job.nodes / law.mean
            case GroupFailures(scope, law):
                touched = sum(group.start < job.nodes for group in groups(config.cluster, scope))
                found[2 if scope == "rack" else 3] += touched / law.mean
            case TraceFailures():
                own = sum(node < job.nodes for _, _, node in failures.faults)
                found[1] += own / failures.span_s
    found[1] += notice_rate(config, job.nodes)
    return found


def notice_rate(config: Config, nodes: int) -> float:
    """How often a second so many nodes stop for a spot machine taken or maintenance: expected from means."""
    rate = 0.0
    for notice in config.notices:
        match notice:
            case SpotNotice(law):
                rate += nodes / law.mean
            case Maintenance(every, drained):
                starts = config.cluster.machines - drained + 1
                rate += min(1.0, (nodes + drained - 1) / starts) / every.mean
            case Predictor():
                pass
    return rate


def first_state(terms: Terms) -> State:
    """What a policy is told when a gang begins."""
    config, job, costs = terms.config, terms.job, terms.config.costs
    by_severity = rates(config, job)
    total = math.fsum(by_severity.values())
    last = terms.places[terms.last]
    levels: list[Level] = []
    healed = 0
    for place in terms.places.values():
        rate = math.fsum(
            rate for severity, rate in by_severity.items() if healed <= severity < place.severity
        )
        levels.append(Level(place.name, place.blocking.stall.mean, rate))
        healed = max(healed, place.severity)
    return State(
        work_s=job.work_s,
        stall_s=last.blocking.stall.mean,
        async_stall_s=None if costs.async_stall is None else costs.async_stall.mean,
        persist_s=last.background.persist.mean,
        increment=costs.increment,
        step_s=job.step_s,
        mtbf_s=1 / total if total else None,
        restart_s=costs.detection.mean + costs.restart.mean + last.restore.mean,
        migrate_s=None if costs.migrate is None else costs.migrate.mean,
        levels=tuple(levels),
        nodes=job.nodes,
        spares=config.cluster.spares,
        replica_s=None if costs.replica_stall is None else costs.replica_stall.mean,
    )
