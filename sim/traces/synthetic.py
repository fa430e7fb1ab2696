"""Small made-up traces in the formats of the real ones, for examples and tests on a machine that has none."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def fault_events(
    nodes: int, days: float, faults_per_node_day: float, repair_d: float, seed: int
) -> list[dict[str, Any]]:
    """Faults with exponential gaps and repairs, as the list of events that `sim.traces.faults` reads."""
    rng = random.Random(seed)  # noqa: S311  # a simulation
    events: list[dict[str, Any]] = []
    for node in range(nodes):
        time_d = rng.expovariate(faults_per_node_day)
        while time_d < days:
            end_d = time_d + rng.expovariate(1 / repair_d)
            for kind, when in (("fault_start", time_d), ("fault_end", end_d)):
                events.append(
                    {
                        "node_id": f"node{node}",
                        "event_time": when,
                        "event_type": kind,
                        "fault_type": {"Level": "Hardware Failure", "Class": "GPU", "Desc": "made up"},
                    }
                )
            time_d = end_d + rng.expovariate(faults_per_node_day)
    return sorted(events, key=lambda event: (event["event_time"], event["event_type"] == "fault_start"))


def zone(ticks: int, mean_up: float, mean_down: float, seed: int | str) -> list[int]:
    """A zone with and without capacity in stretches of geometric length, means in ticks; 1 is available."""
    rng = random.Random(seed)  # noqa: S311  # a simulation

    def states() -> Iterator[int]:
        up = rng.random() < mean_up / (mean_up + mean_down)
        while True:
            yield int(up)
            if rng.random() < 1 / (mean_up if up else mean_down):
                up = not up

    source = states()
    return [next(source) for _ in range(ticks)]
