"""Where time goes: every second is in one bucket, and a run whose buckets do not add up is refused."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from sim.errors import SimError

Status = Literal["done", "horizon", "livelock"]
"""done: the work reached its end. horizon: watching ended first. livelock: it would never end."""

BUCKETS = (
    "goodput", "startup", "checkpoint_stall", "lost_work", "detection", "save_after_failure",
    "restart", "restore", "waiting", "preempted", "migration", "idle",
)  # fmt: skip
"""Useful work that is kept, and what time is otherwise spent on."""


@dataclass(slots=True)
class Span:
    """Somebody was in one state for a while, and why. `who`: job0, node17, replica3."""

    t0_s: float
    t1_s: float
    who: str
    state: str
    cause: str = ""


@dataclass(frozen=True)
class Outcome:
    """What one replication came to.

    Attributes:
        status: how it ended.
        metrics: figures by name, the unit in it (`_s`, `_usd`) unless it is a share or a count.
        buckets: seconds; they add up to `metrics["wall_s"]`.
        recoveries_s: from each failure to work being where it was, or going on.
        spans: a timeline, where asked for.

    """

    status: Status
    metrics: dict[str, float]
    buckets: dict[str, float]
    recoveries_s: list[float] = field(default_factory=list[float])
    spans: list[Span] = field(default_factory=list[Span])

    def __post_init__(self) -> None:
        wall_s = self.metrics["wall_s"]
        total_s = math.fsum(self.buckets.values())
        if not abs(total_s - wall_s) <= 1e-9 * max(1.0, wall_s):
            raise SimError(
                f"could not account for a run: its buckets hold {total_s!r} s of {wall_s!r} s; this is a "
                "bug of the simulator"
            )
        if least := [name for name, seconds in self.buckets.items() if seconds < -1e-9 * max(1.0, wall_s)]:
            raise SimError(
                f"could not account for a run: bucket {least[0]} is below 0; this is a bug of the simulator"
            )


class Ledger:
    """Seconds by bucket, of everything that runs in a replication."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, bucket: str, seconds: float) -> None:
        """Put seconds into a bucket."""
        self._seconds[bucket] += seconds

    def move(self, bucket: str, other: str, seconds: float) -> None:
        """Move seconds from one bucket to another: work that was kept and turns out lost."""
        self._seconds[bucket] -= seconds
        self._seconds[other] += seconds

    def buckets(self) -> dict[str, float]:
        """All buckets in a fixed order, those of nobody at 0."""
        extra = sorted(set(self._seconds) - set(BUCKETS))
        return {name: self._seconds.get(name, 0.0) for name in (*BUCKETS, *extra)}
