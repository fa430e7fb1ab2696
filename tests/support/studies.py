"""Small studies made in Python, for tests and benchmarks of sweeps."""

from __future__ import annotations

import math

from sim.maths.laws import Constant, Exponential
from sim.studies.config import (
    Cluster,
    Config,
    Costs,
    NodeFailures,
    PolicySpec,
    Replications,
    Storage,
    Training,
)
from sim.studies.study import Cell, Study


def grid(intervals: int, stalls: int, replications: int, *, hours: float = 24.0) -> Study:
    """A job of 16 nodes that fails about twice an hour, over intervals and stalls."""
    cells: list[Cell] = []
    for i in range(intervals):
        for j in range(stalls):
            interval_s, stall_s = 60.0 * (i + 1), 1.0 + 5 * j
            config = Config(
                Cluster(16),
                Training(16, work_s=math.inf),
                PolicySpec("periodic", {"interval": interval_s}),
                failures=(NodeFailures(Exponential(16 * 1800.0)),),
                storage=(Storage("remote", stall=Constant(stall_s), restore=Constant(10.0)),),
                costs=Costs(restart=Constant(50.0)),
                horizon_s=hours * 3600,
                replications=Replications(replications, replications, 0.0),
                seed=2026,
            )
            name = f"interval {interval_s:g}, stall {stall_s:g}"
            params = {"policy": "periodic", "policy.interval": interval_s, "costs.stall": stall_s}
            cells.append(Cell(name, params, config))
    return Study(f"grid {intervals} x {stalls}", "", tuple(cells), {"policy.interval": "s"}, repr(cells))
