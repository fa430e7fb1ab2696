"""Which engine plays which kind of work."""

from __future__ import annotations

import importlib
from typing import Protocol

from sim.engine.ledger import Outcome
from sim.engine.streams import Streams
from sim.policies import registry
from sim.policies.base import Policy
from sim.studies.config import Config, Inference, Queue, SpotWork, Training
from sim.studies.study import Cell


class Run(Protocol):
    """Plays a replication to its end."""

    def __call__(self, config: Config, streams: Streams, policy: Policy, timeline: bool) -> Outcome: ...


_ENGINES: dict[type[object], str] = {
    Training: "sim.engine.training",
    Queue: "sim.engine.queue",
    Inference: "sim.engine.inference",
    SpotWork: "sim.engine.spotjob",
}


def simulate(cell: Cell, replication: int, *, timeline: bool = False) -> Outcome:
    """Play one replication of a cell: the same cell and number give the same outcome anywhere.

    Args:
        cell: of a study.
        replication: its number, from 0.
        timeline: whether to keep who was in which state when.

    Raises:
        SimError: the policy asks for what this kind of work cannot do.

    """
    config = cell.config
    policy = registry.make(config.policy.name, config.policy.options)
    # An engine loads when its kind of work is played: each brings modules of its own.
    run: Run = importlib.import_module(_ENGINES[type(config.workload)]).run
    return run(config, Streams(config.seed, replication), policy, timeline)
