"""Policies that choose how much work goes between two checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sim.errors import SimError
from sim.maths import theory
from sim.policies.base import ROUTINE, Action, Event, EventKind, SetInterval, State

LEAST_STALL_S = 1e-3
"""What a checkpoint that seems free is taken to cost: an interval of 0 would do nothing but checkpoints."""


class Never:
    """Takes no checkpoint: each failure loses everything."""

    name = "none"
    ignores = ROUTINE

    def on_event(self, state: State, event: Event) -> list[Action]:
        return [SetInterval(None)] if event.kind == "start" else []


class Periodic:
    """Takes a checkpoint after every `interval_s` seconds of work."""

    name = "periodic"
    ignores = ROUTINE

    def __init__(self, interval_s: float) -> None:
        if not interval_s > 0:
            raise SimError(
                f"could not make policy 'periodic': interval is {interval_s} s; it must be above 0"
            )
        self._interval_s = interval_s

    def on_event(self, state: State, event: Event) -> list[Action]:
        return [SetInterval(self._interval_s)] if event.kind == "start" else []


class _Formula(ABC):
    """Takes the interval of a closed form, from the stall and the MTBF that are known at the start."""

    name: str
    ignores = ROUTINE

    @abstractmethod
    def _interval_s(self, stall_s: float, mtbf_s: float, restart_s: float) -> float: ...

    def on_event(self, state: State, event: Event) -> list[Action]:
        if event.kind != "start":
            return []
        if state.stall_s is None or state.mtbf_s is None:
            lacking, keys = (
                ("the cost of a checkpoint", "storage or costs.stall")
                if state.stall_s is None
                else ("the MTBF", "failures")
            )
            raise SimError(
                f"could not use policy '{self.name}': {lacking} is not known; give a study {keys}, or use "
                "'adaptive'"
            )
        stall_s = max(state.stall_s, LEAST_STALL_S)
        return [SetInterval(self._interval_s(stall_s, state.mtbf_s, state.restart_s))]


class Young(_Formula):
    """Young's interval, 1974."""

    name = "young"

    def _interval_s(self, stall_s: float, mtbf_s: float, restart_s: float) -> float:
        return theory.young(stall_s, mtbf_s)


class DalyFirst(_Formula):
    """Daly's first-order interval, 2006."""

    name = "daly-first"

    def _interval_s(self, stall_s: float, mtbf_s: float, restart_s: float) -> float:
        return theory.daly_first(stall_s, mtbf_s, restart_s)


class Daly(_Formula):
    """Daly's higher-order interval, 2006."""

    name = "daly"

    def _interval_s(self, stall_s: float, mtbf_s: float, restart_s: float) -> float:
        return theory.daly_higher(stall_s, mtbf_s)


class Exact(_Formula):
    """The interval that keeps most work under exponential failures."""

    name = "exact"

    def _interval_s(self, stall_s: float, mtbf_s: float, restart_s: float) -> float:
        return theory.exact_interval(stall_s, mtbf_s)


class Adaptive:
    """Learns the stall and the MTBF as it goes, and takes the exact optimum for what it believes.

    The MTBF is the time watched over the failures seen, after a prior of `prior_failures` failures in as many
    `guess_mtbf_s`; a stall is an exponential average, new values weighing `weight`.
    """

    name = "adaptive"
    ignores: frozenset[EventKind] = frozenset({"persisted", "repaired"})

    def __init__(
        self, guess_stall_s: float, guess_mtbf_s: float, prior_failures: float = 1.0, weight: float = 0.2
    ) -> None:
        for label, value in (
            ("stall", guess_stall_s),
            ("MTBF", guess_mtbf_s),
            ("prior", prior_failures),
        ):
            if not value > 0:
                raise SimError(
                    f"could not make policy 'adaptive': the guessed {label} is {value}; it must be above 0"
                )
        if not 0 < weight <= 1:
            raise SimError(f"could not make policy 'adaptive': weight is {weight}; it must be in (0, 1]")
        self._stall_s = guess_stall_s
        self._prior_s = guess_mtbf_s * prior_failures
        self._failures = prior_failures
        self._weight = weight

    def on_event(self, state: State, event: Event) -> list[Action]:
        if event.kind == "checkpoint":
            self._stall_s += self._weight * (event.stall_s - self._stall_s)
        elif event.kind == "failure":
            self._failures += 1
            return []
        elif event.kind not in ("start", "restart"):
            return []
        mtbf_s = (self._prior_s + state.now_s) / self._failures
        return [SetInterval(theory.exact_interval(max(self._stall_s, LEAST_STALL_S), mtbf_s))]
