"""Nodes that join and leave: rows `milliseconds,add or remove,node`, as in Bamboo's and Parcae's traces."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sim.traces.files import read_rows, unusable


@dataclass(frozen=True)
class Change:
    """A node joins, or leaves, `time_s` seconds after the start."""

    time_s: float
    joins: bool
    node: str


@dataclass(frozen=True)
class Summary:
    """Nodes from the first to the last change, and removals for each hour of a node."""

    hours: float
    mean_nodes: float
    most_nodes: int
    removals: int
    removals_per_node_hour: float


def load(path: Path) -> list[Change]:
    """Changes in order.

    Raises:
        SimError: a row is malformed or out of order, or removes a node that is not there, or adds one that
        is.

    """
    changes: list[Change] = []
    there: set[str] = set()
    for number, row in enumerate(read_rows(path), 1):
        try:
            milliseconds, verb, node = (field.strip() for field in row)
            time_s = float(milliseconds) / 1000
            if not math.isfinite(time_s):
                raise ValueError(milliseconds)
        except ValueError as error:
            raise unusable(path, f"row {number} is not 'milliseconds,add or remove,node'") from error
        if verb not in ("add", "remove"):
            raise unusable(path, f"row {number} says {verb!r}; it must be add or remove")
        if changes and time_s < changes[-1].time_s:
            raise unusable(path, f"row {number} is earlier than the one before; sort the rows by time")
        if (verb == "add") == (node in there):
            state = "is there already" if verb == "add" else "is not there"
            raise unusable(path, f"row {number} would {verb} {node}, which {state}")
        there ^= {node}
        changes.append(Change(time_s, verb == "add", node))
    return changes


def summary(changes: list[Change]) -> Summary:
    """Figures of a trace; zeros where it has no length."""
    nodes, most, area, last = 0, 0, 0.0, changes[0].time_s
    for change in changes:
        area += nodes * (change.time_s - last)
        last = change.time_s
        nodes += 1 if change.joins else -1
        most = max(most, nodes)
    length_s = last - changes[0].time_s
    removals = sum(not change.joins for change in changes)
    return Summary(
        hours=length_s / 3600,
        mean_nodes=area / length_s if length_s else 0.0,
        most_nodes=most,
        removals=removals,
        removals_per_node_hour=3600 * removals / area if area else 0.0,
    )
