"""Faults of nodes and their repairs, as in InfiniteHBD's trace of 400 servers (StepFun, Apache-2.0).

A JSON list of events: node_id, event_time (days), event_type (fault_start or fault_end), fault_type {Level,
Class, Desc}. Starts and ends of a node are paired in order.
"""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import BROKEN, SimError, why
from sim.traces.files import read_json, unusable


@dataclass(frozen=True)
class Fault:
    """One fault, in days since the start of the trace. `cause` is its class."""

    node: str
    start_d: float
    end_d: float
    cause: str


@dataclass(frozen=True)
class Faulty:
    """Nodes that are faulty at once: the mean over time, and the most. A node with two faults counts once."""

    mean: float
    most: int


def load(path: Path) -> list[Fault]:
    """Faults in order of their start.

    Raises:
        SimError: the file cannot be read, an event lacks a field, or a start has no end.

    """
    document = read_json(path)
    if not isinstance(document, list):
        raise unusable(path, "it is not a list of events")
    events: list[Any] = document  # pyright: ignore[reportUnknownVariableType]
    open_: dict[str, list[tuple[float, str]]] = defaultdict(list)
    faults: list[Fault] = []
    for number, event in enumerate(events):
        try:
            node, time_d, kind = str(event["node_id"]), float(event["event_time"]), event["event_type"]
            cause = str(event["fault_type"]["Class"])
        except BROKEN as error:
            raise unusable(path, f"event {number}: {why(error)}") from error
        if not 0 <= time_d <= 1e6:
            raise unusable(path, f"event {number} is at {time_d} days; it must be a time from 0 to 1e6")
        if kind == "fault_start":
            open_[node].append((time_d, cause))
        elif kind == "fault_end":
            if not open_[node]:
                raise unusable(path, f"event {number} ends a fault of node {node} that has not begun")
            start_d, cause = open_[node].pop(0)
            if time_d < start_d:
                raise unusable(path, f"event {number} ends a fault before it began; sort the events by time")
            faults.append(Fault(node, start_d, time_d, cause))
        else:
            raise unusable(path, f"event {number} is of type {kind!r}; it must be fault_start or fault_end")
    if still := sum(map(len, open_.values())):
        raise unusable(path, f"{still} faults have no end")
    if not faults:
        raise unusable(path, "it has no faults")
    return sorted(faults, key=lambda fault: (fault.start_d, fault.node))


def numbered(faults: Sequence[Fault]) -> dict[str, int]:
    """A number for each node: its own where all names are numbers, as in the public trace."""
    names = sorted({fault.node for fault in faults})
    if all(name.isdecimal() and name.isascii() and len(name) < 10 for name in names):
        own = {name: int(name) for name in names}
        if len(set(own.values())) == len(names):
            return own
    return {name: number for number, name in enumerate(names)}


def span_d(faults: Sequence[Fault]) -> float:
    """Days from the start of the trace to its last event."""
    return max(fault.end_d for fault in faults)


def down(faults: Sequence[Fault]) -> list[tuple[str, float, float]]:
    """When each node is down, in days: faults that overlap are one time."""
    found: list[tuple[str, float, float]] = []
    for fault in sorted(faults, key=lambda fault: (fault.node, fault.start_d)):
        if found and found[-1][0] == fault.node and fault.start_d <= found[-1][2]:
            found[-1] = (fault.node, found[-1][1], max(found[-1][2], fault.end_d))
        else:
            found.append((fault.node, fault.start_d, fault.end_d))
    return found


def faulty(faults: Sequence[Fault]) -> Faulty:
    """How many nodes are faulty at once, from day 0 to the last event."""
    marks: list[tuple[float, int]] = []
    for _, own in itertools.groupby(
        sorted(faults, key=lambda fault: fault.node), key=lambda fault: fault.node
    ):
        reached = -math.inf
        for fault in sorted(own, key=lambda fault: fault.start_d):
            start_d = max(fault.start_d, reached)
            if fault.end_d > start_d:
                marks += [(start_d, 1), (fault.end_d, -1)]
                reached = fault.end_d
    area, now, most, last = 0.0, 0, 0, 0.0
    # An end before a start of the same instant: a fault that follows on another is not a second node.
    for time_d, step in sorted(marks):
        area += now * (time_d - last)
        last = time_d
        now += step
        most = max(most, now)
    return Faulty(area / span_d(faults), most)


def gaps_d(faults: Sequence[Fault]) -> list[float]:
    """Days between faults that follow each other, without those of one instant."""
    starts = [fault.start_d for fault in faults]
    return [later - earlier for earlier, later in itertools.pairwise(starts) if later > earlier]


@dataclass(frozen=True)
class WeibullFit:
    """Shape and scale of most likelihood. A shape below 1: events come in bursts."""

    shape: float
    scale: float


def fit_weibull(times: Sequence[float]) -> WeibullFit:
    """Maximum likelihood fit to times above 0.

    Raises:
        SimError: fewer than two different times, or one that is not above 0.

    """
    if len(set(times)) < 2 or min(times) <= 0:
        raise SimError("could not fit a Weibull law: it takes two or more different times, all above 0")
    logs = [math.log(time) for time in times]
    # Powers are taken of times below 1, so that none overflows.
    top, mean = max(logs), statistics.fmean(logs)

    def slope(shape: float) -> float:
        weights = [math.exp(shape * (log - top)) for log in logs]
        return sum(map(operator.mul, weights, logs)) / sum(weights) - 1 / shape - mean

    low, high = 1e-3, 1.0
    while slope(high) < 0:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    power = statistics.fmean(math.exp(high * (log - top)) for log in logs)
    return WeibullFit(high, math.exp(top + math.log(power) / high))
