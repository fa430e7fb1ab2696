"""Spot capacity over time, tick by tick.

Two kinds of JSON file, which say 1 for opposite things in the wild; every loader here answers 1 for
available.

zones: {"meta": {"gap_seconds", "polarity", "start_indexes", "window_ticks"}, "zones": {name: {"first_tick",
"data"}}}. `polarity` begins with "1 = AVAILABLE" or "1 = PREEMPTED". The data of "Can't Be Late" (NSDI 2024)
in one file: window n of a zone begins at tick start_indexes[n].

counts: {"metadata": {"gap_seconds"}, "data": [...]}, how many machines there are, or 0 and 1. What 1 stands
for is not in the file: 1 is available in the spot-traces repository, and preempted in the files of simulators
that were derived from it.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from sim.errors import BROKEN, why
from sim.traces.files import read_json, unusable

Polarity = Literal["available", "preempted"]


@dataclass(frozen=True)
class Zone:
    """Capacity of one zone: 1 is available, in ticks from `first_tick` on."""

    name: str
    first_tick: int
    available: list[int]

    @property
    def availability(self) -> float:
        """Share of ticks with capacity."""
        return sum(self.available) / len(self.available)

    def window(self, start: int, ticks: int) -> list[int]:
        """`ticks` ticks from tick `start` on."""
        return self.available[start - self.first_tick : start - self.first_tick + ticks]


@dataclass(frozen=True)
class Windows:
    """Zones, and the windows of them that a study uses."""

    tick_s: float
    zones: list[Zone]
    starts: list[int]
    window_ticks: int


@dataclass(frozen=True)
class Counts:
    """Machines available at each tick."""

    tick_s: float
    counts: list[int]


def _whole(path: Path, where: str, values: Any, most: int = 10**9) -> list[int]:
    """A list of whole numbers from 0 to `most`, without any other thing in it."""
    if not isinstance(values, list) or not values:
        raise unusable(path, f"{where} is not a list with values")
    numbers: list[Any] = values  # pyright: ignore[reportUnknownVariableType]
    for value in numbers:
        if type(value) is not int or not 0 <= value <= most:
            raise unusable(
                path, f"{where} holds {reprlib.repr(value)}; it must hold whole numbers, 0 to {most}"
            )
    return numbers


def _tick_s(path: Path, meta: Any) -> float:
    tick: Any = cast("Mapping[str, Any]", meta).get("gap_seconds") if isinstance(meta, Mapping) else None
    if not isinstance(tick, int | float) or not 0 < tick <= sys.float_info.max:
        raise unusable(path, f"gap_seconds is {reprlib.repr(tick)}; it must be the seconds of a tick")
    return float(tick)


def load_windows(path: Path) -> Windows:
    """Zones and windows of a file of the first kind.

    Raises:
        SimError: the file is not of that kind, says no polarity, or a window reaches out of a zone.

    """
    document = read_json(path)
    try:
        meta, zones = document["meta"], dict(document["zones"])
        polarity = str(meta["polarity"]).upper()
        window_ticks = int(meta["window_ticks"])
        starts = _whole(path, "start_indexes", meta["start_indexes"])
        raw = {str(name): (int(zone["first_tick"]), zone["data"]) for name, zone in zones.items()}
    except KeyError as error:
        raise unusable(path, why(error)) from error
    except BROKEN as error:
        raise unusable(path, "it is not an object with meta and zones of capacity") from error
    if not polarity.startswith(("1 = AVAILABLE", "1 = PREEMPTED")):
        raise unusable(path, f"polarity is '{polarity}'; it must begin with 1 = AVAILABLE or 1 = PREEMPTED")
    flip = polarity.startswith("1 = PREEMPTED")
    loaded: list[Zone] = []
    for name, (first, data) in raw.items():
        values = _whole(path, f"zone {name}", data, most=1)
        loaded.append(Zone(name, first, [1 - value for value in values] if flip else values))
    for zone in loaded:
        last = zone.first_tick + len(zone.available) - window_ticks
        for start in starts:
            if not zone.first_tick <= start <= last:
                raise unusable(path, f"the window at tick {start} reaches out of zone {zone.name}")
    if not loaded:
        raise unusable(path, "it has no zones")
    return Windows(_tick_s(path, meta), loaded, starts, window_ticks)


def load_counts(path: Path, one_is: Polarity = "available") -> Counts:
    """Machines over time from a file of the second kind.

    Args:
        path: the file.
        one_is: what 1 stands for, which the file does not say; preempted only where all is 0 and 1.

    Raises:
        SimError: the file is not of that kind.

    """
    document = read_json(path)
    if not isinstance(document, dict) or not {"metadata", "data"} <= document.keys():  # pyright: ignore[reportUnknownMemberType]
        raise unusable(path, "it is not an object with metadata and data")
    counts = _whole(path, "data", document["data"], most=1 if one_is == "preempted" else 10**9)
    flipped = [1 - value for value in counts] if one_is == "preempted" else counts
    return Counts(_tick_s(path, document["metadata"]), flipped)
