"""How many node-hours a second the simulator plays on one core: 2,048 nodes for 54 days, as Llama 3 had."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from sim.engine.dispatch import simulate
from sim.maths import theory
from sim.maths.laws import Constant, Exponential, Fixed, Lognormal
from sim.models import renewal
from sim.studies.config import (
    Cluster,
    Config,
    Costs,
    Maintenance,
    NodeFailures,
    PolicySpec,
    Storage,
    Training,
)
from sim.studies.study import Cell
from tests.perf.figures import Figure, Series, in_turns

NODES, DAY = 2048, 86400.0
NODE_HOURS = NODES * 54 * 24
RATE = 3.7887e-3 / DAY
EVENT_BOUND, ARRAY_BOUND = 5e7, 1e10
"""Node-hours a second that the event engine and the array path are to play."""


def job() -> Config:
    """With repairs, spares, a maintenance a day, and a policy that hears of all and acts on notices."""
    return Config(
        Cluster(NODES, spares=32),
        Training(NODES),
        PolicySpec("event", {"base": "daly"}),
        (NodeFailures(Exponential(1 / RATE)),),
        Lognormal(DAY, 1.5),
        (Maintenance(Fixed(DAY), 1, 1800.0, Constant(7200.0)),),
        (Storage("remote", stall=Constant(30.0), restore=Constant(60.0)),),
        Costs(detection=Constant(30.0), restart=Constant(300.0)),
        horizon_s=54 * DAY,
    )


def _processor_s(action: Callable[[], object]) -> float:
    """Seconds of the processor, which neighbours on the machine do not add to as they do to the clock's."""
    start = time.process_time()
    action()
    return time.process_time() - start


def measure(*, rounds: int, replications: int = 1000) -> list[Figure]:
    """Both paths in turns. The peer is the rate that is asked for: a ratio above 1 meets it."""
    cell = Cell("54 days", {}, job())
    mtti_s = theory.job_mttf(NODES, RATE)
    model = renewal.Job(theory.exact_interval(30, mtti_s), 30, 300)

    def arrays() -> None:
        gaps = Exponential(mtti_s).sample(np.random.default_rng(1), (replications, 550))
        renewal.kept(model, gaps).sum(axis=1)

    series = Series()
    simulate(cell, 0)
    for number in range(rounds):
        for name in in_turns(["events", "arrays"], number):
            if name == "events":
                spent_s = _processor_s(lambda: simulate(cell, number, timeline=True))
                series.add(name, NODE_HOURS / spent_s / 1e6)
            else:
                series.add(name, NODE_HOURS * replications / _processor_s(arrays) / 1e6)
            series.add("event bound", EVENT_BOUND / 1e6)
            series.add("array bound", ARRAY_BOUND / 1e6)
    unit = "M node-h/s"
    return [
        series.figure(f"simulator, {what}", ours, peer, peer_name=peer_name, unit=unit)
        for what, ours, peer, peer_name in (
            ("event engine", "events", "event bound", "what is asked"),
            ("array path", "arrays", "array bound", "what is asked"),
            ("array path", "arrays", "events", "event engine"),
        )
    ]
