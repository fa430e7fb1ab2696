"""The long counts: how many they are, and what came of them, told at the end of a run.

Short without TORPOR_SOAK=1, which `./run soak` sets.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pytest

SOAK = os.environ.get("TORPOR_SOAK") == "1"
CYCLES = 200 if SOAK else 5
POINTS = 20 if SOAK else 4
_PROPERTY = "soak"

Part = Literal["cycles", "kills", "workloads"]


@dataclass(frozen=True, kw_only=True)
class Count:
    """What a test of long counts came to.

    n: how many cycles, kills or workloads. outcomes: how many of them ended how. note: the rest, in words.
    """

    engine: str
    part: Part
    n: int
    outcomes: Mapping[str, int]
    note: str = ""


def tell(request: pytest.FixtureRequest, count: Count) -> None:
    """Have a test's count told at the end of the run. Called when the test has nothing left to check."""
    request.node.user_properties.append((_PROPERTY, json.dumps(vars(count))))


def tell_kills(request: pytest.FixtureRequest, engine: str, outcomes: Mapping[str, int]) -> None:
    """Have a test's kills told, after each of which it has looked for what was left."""
    count = Count(
        engine=engine, part="kills", n=sum(outcomes.values()), outcomes=outcomes, note="nothing left"
    )
    tell(request, count)


def tell_workloads(request: pytest.FixtureRequest, engine: str, results: Sequence[str]) -> None:
    """Have the results of workloads told, each on one course."""
    tell(request, Count(engine=engine, part="workloads", n=len(results), outcomes=Counter(results)))


def moments() -> list[float]:
    """Random moments of a call, as parts of its whole time: one in each of `POINTS` equal parts."""
    return [(point + random.random()) / POINTS for point in range(POINTS)]


def summary(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """Lines for the end of a run: counts of the same engine and part together."""
    counts: dict[tuple[str, str], list[Count]] = {}
    for report in reports:
        for name, value in report.user_properties:
            if name == _PROPERTY and report.when == "call":
                count = Count(**json.loads(str(value)))
                counts.setdefault((count.engine, count.part), []).append(count)
    for (engine, part), found in sorted(counts.items()):
        outcomes: Counter[str] = Counter()
        for count in found:
            outcomes.update(count.outcomes)
        parts = [", ".join(f"{number} {word}" for word, number in outcomes.most_common())]
        parts += sorted({count.note for count in found if count.note})
        total = sum(count.n for count in found)
        yield f"{engine:10} {part:9} {total:4}: " + "; ".join(text for text in parts if text)
