"""SkyNomad's published studies on its H100 traces (NSDI 2027), played again.

Six zones, two on each continent, six windows of 311 ticks, a restart of 0.2 h. The released harness puts a
window's start into hours and back, and rounds up: the sixth begins a tick late. It reports of every policy
that chooses among regions what the job has cost before its last tick; the figures here follow it.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sim.errors import BROKEN, why
from sim.models.optimal import Plan, plan
from sim.models.regions import Market, RegionalJob, run
from sim.policies.base import Policy
from sim.policies.regions import Availability, AvailabilityPrice, Failover
from sim.policies.skynomad import SkyNomad, SkyNomadOracle
from sim.policies.spot import UniformProgress
from sim.traces.files import unusable
from sim.traces.priced import PricedZone

ZONES = (
    "us-central1-a", "us-west1-a", "europe-west1-c", "europe-west3-c", "asia-southeast1-b", "asia-south2-b",
)  # fmt: skip
TICKS = 311
TICK_S = 600.0
STARTS = tuple(math.ceil(window * TICKS * TICK_S / 3600 * 3600 / TICK_S) for window in range(6))

Maker = Callable[[RegionalJob, Sequence[Market], int], Policy]

_BITS_PER_S = {"same continent": 8200e6, "other continent": 3590e6}
"""Measured between regions; within one it is 9720e6, which a restart holds already."""


def longer_s(state_bytes: float, source: Market, target: Market) -> float:
    """How much longer a restart takes with a checkpoint from another region. The optimum allows for it."""
    if source.area == target.area:
        return 0.0
    same = source.area.partition("-")[0] == target.area.partition("-")[0]
    bits = state_bytes * 8 * 1.024  # a GB is 1024 Mbit there
    return bits / _BITS_PER_S["same continent" if same else "other continent"] - bits / 9720e6


def _optimal(job: RegionalJob, markets: Sequence[Market], start: int) -> Policy:
    return Plan(plan(job, markets, start, functools.partial(longer_s, job.state_bytes)))


POLICIES: Mapping[str, Maker] = {
    "Optimal": _optimal,
    "SkyNomad": lambda job, markets, start: SkyNomad(),
    "SkyNomad(o)": lambda job, markets, start: SkyNomadOracle(),
    "UP(S)": lambda job, markets, start: Failover(),
    "UP(A)": lambda job, markets, start: Availability(),
    "UP(AP)": lambda job, markets, start: AvailabilityPrice(),
}
"""Policies that choose among regions, by their published names."""


def markets(zones: Mapping[str, PricedZone]) -> list[Market]:
    """The six zones of the studies."""
    return [
        Market(zone, found.available, found.spot_price, found.on_demand_price)
        for zone in ZONES
        for found in (zones[f"{zone}_h100_16"],)
    ]


def mean_cost(name: str, zones: Sequence[Market], ratio: float, state_bytes: float = 50e9) -> float:
    """Mean cost in dollars over the windows, as published.

    Args:
        name: one of `POLICIES`, or UP: Uniform Progress alone in each zone.
        zones: as `markets` gives them.
        ratio: the deadline over the work.
        state_bytes: size of the checkpoint.

    """
    job = RegionalJob(TICKS * TICK_S / ratio, TICKS * TICK_S, tick_s=TICK_S, state_bytes=state_bytes)
    if name == "UP":
        alone = [run(UniformProgress(), job, [zone], start).cost for zone in zones for start in STARTS]
        return math.fsum(alone) / len(alone)
    costs: list[float] = []
    for start in STARTS:
        out = run(POLICIES[name](job, zones, start), job, zones, start)
        costs.append(out.cost - out.last_tick_cost)
    return math.fsum(costs) / len(costs)


def expected(path: Path, column: str) -> dict[tuple[str, float], float]:
    """Published means by policy and by the value of the column.

    Raises:
        SimError: the file is no such table.

    """
    try:
        with path.open(encoding="utf-8") as file:
            return {(row["strategy"], float(row[column])): float(row["mean"]) for row in csv.DictReader(file)}
    except BROKEN as error:
        raise unusable(path, f"it is no table of strategy, {column} and mean ({why(error)})") from error


def furthest(name: str, zones: Sequence[Market], path: Path, column: str) -> float:
    """The largest relative difference from what was published, over all points of a policy.

    `column`: deadline_ratio or checkpoint_size (GB, deadline 1.2 of the work). A ratio of 1 is left out: such
    a job cannot be done in time, and is not simulated there either.
    """
    worst = 0.0
    for (strategy, value), mean in expected(path, column).items():
        if strategy != name or (column == "deadline_ratio" and value <= 1):
            continue
        ratio, size = (value, 50e9) if column == "deadline_ratio" else (1.2, value * 1e9)
        worst = max(worst, abs(mean_cost(name, zones, ratio, size) / mean - 1))
    return worst
