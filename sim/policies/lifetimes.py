"""How long spot capacity of a region lasts, learnt from runs and looks there.

SkyNomad's estimate (NSDI 2027), after its released simulator: the Nelson-Aalen estimator of the cumulated
hazard of runs, times a factor for bursts. Each tick exposes a region to a risk, the hazard that it adds to;
where failures have lately been denser than the risk says, all hazards are taken to be so much higher.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

Source = Literal["spot", "probe"]

_LEAST = 1e-8
_MOST_RISK = 8.0
"""Risk that is remembered; older ticks are forgotten."""

_SECONDS_WATCHED = 12 * 3600.0
"""Over which availability is taken."""


@dataclass
class Lifetimes:
    """What is known of one region: runs that ended, the one that is thought to go on, and recent bursts."""

    tick_h: float
    runs: list[tuple[float, float, bool]] = field(default_factory=list[tuple[float, float, bool]])
    """Start and end in seconds, and whether capacity failed; it did not where the run was left."""
    since_s: float | None = None
    source: Source | None = None
    failures: int = 0
    """Since the last update: runs that failed, and looks and starts that found nothing."""
    burst: float = 1.0
    seen_h: dict[Source, float] = field(default_factory=dict[Source, float])
    """Age of the run at the last update."""
    recent: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    """Risk and failures of past ticks."""
    _knots: tuple[int, list[tuple[float, float]]] = (-1, [])

    def start(self, now_s: float, source: Source) -> None:
        """A run begins; one that was thought to go on is forgotten."""
        self.since_s, self.source = now_s, source
        self.seen_h = {source: 0.0}

    def end(self, now_s: float, *, failed: bool) -> None:
        """The run ends: its capacity failed, or it was left."""
        if self.since_s is not None:
            self.runs.append((self.since_s, now_s, failed))
        self.since_s = self.source = None
        self.failures += failed

    def age_h(self, now_s: float) -> float:
        """Of the run that goes on, 0 without one."""
        return 0.0 if self.since_s is None else max(0.0, (now_s - self.since_s) / 3600)

    def knots(self) -> list[tuple[float, float]]:
        """Ages in hours at which runs failed, and the hazard of each: failures over runs as old as that."""
        if self._knots[0] != len(self.runs):
            ages = [((end_s - start_s) / 3600, failed) for start_s, end_s, failed in self.runs]
            steps: list[tuple[float, float]] = []
            for age in sorted({age for age, failed in ages if failed}):
                at_risk = sum(1 for other, _ in ages if other + 1e-9 >= age)
                failures = sum(1 for other, failed in ages if failed and abs(other - age) <= 1e-9)
                steps.append((age, failures / at_risk))
            self._knots = (len(self.runs), steps)
        return self._knots[1]

    def _tail(self) -> float:
        """Hazard a tick beyond the oldest age at which a run failed."""
        knots = self.knots()
        return max(knots[-1][1], _LEAST) if knots else _LEAST

    def _hazard(self, age_h: float) -> float:
        """Cumulated up to an age."""
        total, last_h = 0.0, 0.0
        for knot_h, step in self.knots():
            if knot_h >= age_h:
                break
            total, last_h = total + step, knot_h
        return total + max(0.0, age_h - last_h) * self._tail() if age_h > 0 else 0.0

    def remaining_h(self, now_s: float) -> float:
        """How long a run of the present age is expected to go on."""
        reached_h, surviving, expected_h = self.age_h(now_s), 1.0, 0.0
        for knot_h, step in self.knots():
            if knot_h > reached_h + 1e-12:
                expected_h += surviving * (knot_h - reached_h)
                surviving *= math.exp(-self.burst * step)
                reached_h = knot_h
        return expected_h + surviving * self.tick_h / -math.expm1(-self.burst * self._tail())

    def availability(self, now_s: float) -> float:
        """Share of the last hours in which there was capacity, as far as anybody looked."""
        from_s = max(0.0, now_s - _SECONDS_WATCHED)
        if now_s <= 0:
            return 0.0
        spans = [(start_s, end_s) for start_s, end_s, _ in self.runs]
        if self.since_s is not None:
            spans.append((self.since_s, now_s))
        covered_s = sum(max(0.0, end_s - max(start_s, from_s)) for start_s, end_s in spans)
        return min(1.0, covered_s / (now_s - from_s))

    def update(self, now_s: float) -> None:
        """Once a tick: what the last one has shown."""
        risk, tail = 0.0, self._tail()
        knots = self.knots()
        if self.source is not None:
            age_h = self.age_h(now_s)
            before_h = self.seen_h.get(self.source, max(age_h - self.tick_h, 0.0))
            self.seen_h = {self.source: age_h}
            risk = max(0.0, self._hazard(age_h) - self._hazard(before_h))
            if risk <= 0 and knots and before_h >= knots[-1][0]:
                risk = tail * max(0.0, age_h - before_h)
        else:
            self.seen_h = {}
        if risk <= 0 and (self.failures or (self.source is not None and not knots)):
            risk = tail * self.tick_h
        if risk > 0 or self.failures:
            self._remember(risk, self.failures)
        self.failures = 0

    def _remember(self, risk: float, failures: int) -> None:
        self.recent.append((risk, failures))
        total = sum(risk for risk, _ in self.recent)
        while total - self.recent[0][0] >= _MOST_RISK:
            total -= self.recent.popleft()[0]
        total = sum(risk for risk, _ in self.recent)
        self.burst = 1.0 if total < 1 else max(1.0, self._densest())

    def _densest(self) -> float:
        """Failures for the risk, in the last ticks with a risk of 1 at most where that is highest."""
        best: float | None = None
        risk, failures = 0.0, 0
        for number, (more, failed) in enumerate(reversed(self.recent)):
            risk, failures = risk + more, failures + failed
            if number == 0 and risk <= 1e-6 and not failures:
                continue
            if risk > 1 + 1e-9 and number:
                break
            ratio = failures / risk
            if best is None or ratio > best + 1e-9:
                best = ratio
            if risk > 1 + 1e-9:
                break
        return 0.0 if best is None else best
