"""Zones with prices, as in SkyNomad's H100 traces (NSDI 2027): a tar.gz with ZONE/full.json for each.

A full.json holds `metadata` (gap_seconds, price_info with on_demand_price), `data` and `prices`, dollars an
hour. Here 1 stands for preempted, as in all files of that simulator; what is loaded says 1 for available.
"""

from __future__ import annotations

import json
import lzma
import math
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sim.errors import BROKEN, why
from sim.traces.files import unusable


@dataclass(frozen=True)
class PricedZone:
    """A zone: 1 is available at a tick; dollars an hour, the same all the time."""

    name: str
    tick_s: float
    available: list[int]
    spot_price: float
    on_demand_price: float


def load(path: Path) -> dict[str, PricedZone]:
    """Zones by name.

    Raises:
        SimError: the file is no such archive, or a zone in it is malformed or has a price that changes.

    """
    zones: dict[str, PricedZone] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                inside = PurePosixPath(member.name)
                file = archive.extractfile(member) if inside.name == "full.json" else None
                if file is not None:
                    zones[inside.parent.name] = _zone(path, inside.parent.name, json.load(file))
    except OSError as error:
        raise unusable(path, f"{why(error)}; check the path") from error
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise unusable(path, f"it is not a tar archive: {error}") from error
    except BROKEN as error:
        raise unusable(path, f"a full.json in it: {why(error)}") from error
    if not zones:
        raise unusable(path, "it holds no full.json")
    return zones


def _zone(path: Path, name: str, document: Any) -> PricedZone:
    try:
        preempted, prices = list(document["data"]), [float(price) for price in document["prices"]]
        on_demand = float(document["metadata"]["price_info"]["on_demand_price"])
        tick_s = float(document["metadata"]["gap_seconds"])
    except BROKEN as error:
        raise unusable(path, f"zone {name}: {why(error)}") from error
    if not preempted or any(type(state) is not int or state not in (0, 1) for state in preempted):
        raise unusable(path, f"the data of zone {name} must be 0 and 1, and some of it")
    if not all(0 < one < math.inf for one in (tick_s, on_demand, *prices)):
        raise unusable(path, f"the tick and the prices of zone {name} must be numbers above 0")
    if len(set(prices)) != 1:
        raise unusable(path, f"zone {name} must have one spot price, the same all the time")
    return PricedZone(name, tick_s, [1 - state for state in preempted], prices[0], on_demand)
