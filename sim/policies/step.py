"""Spot policies in the form of the simulator released with "Can't Be Late": one method of two arguments.

    class Patient(StepPolicy):
        name = "patient"

        def _step(self, last_cluster_type, has_spot):
            return ClusterType.SPOT if has_spot else ClusterType.NONE

`_step` may look at `env.elapsed_seconds`, `env.gap_seconds`, `task_duration`, `task_done_time` (a list whose
sum is the work done), `deadline`, `restart_overhead` and `remaining_restart_overhead`, all in seconds. As
there, the deadline is met whatever it answers: once it asks for it, the job runs on demand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from sim.policies.base import Action, Event, Place, RunOn, State
from sim.policies.spot import room_s, ticks_s


class ClusterType(Enum):
    """Where a job runs."""

    NONE = "none"
    SPOT = "spot"
    ON_DEMAND = "on-demand"


@dataclass
class Clock:
    """Time since the job was handed in, and between two ticks."""

    elapsed_seconds: float = 0.0
    gap_seconds: float = 0.0


_PLACES: dict[ClusterType, Place] = {
    ClusterType.NONE: "none", ClusterType.SPOT: "spot", ClusterType.ON_DEMAND: "on-demand",
}  # fmt: skip


class StepPolicy(ABC):
    """Asks `_step` at each tick."""

    name: str

    def __init__(self) -> None:
        self.env = Clock()
        self.task_duration = self.deadline = self.restart_overhead = self.remaining_restart_overhead = 0.0
        self.task_done_time: list[float] = []
        self._last = ClusterType.NONE

    @abstractmethod
    def _step(self, last_cluster_type: ClusterType, has_spot: bool) -> ClusterType:
        """Where to run until the next tick.

        Args:
            last_cluster_type: where the job ran until now; spot although its machine has just been taken.
            has_spot: whether there is spot capacity.

        """
        ...

    def on_event(self, state: State, event: Event) -> list[Action]:
        if event.kind != "tick":
            return []
        self.env = Clock(state.now_s, state.tick_s)
        self.task_duration, self.deadline = state.work_s, state.deadline_s or 0.0
        self.restart_overhead, self.remaining_restart_overhead = state.restart_s, state.starting_s
        self.task_done_time.append(state.done_s - sum(self.task_done_time))
        chosen = self._step(self._last, state.spot)
        left_s = state.work_s - state.done_s
        if ticks_s(state, left_s + state.restart_s) >= room_s(state):
            safe = state.place == "spot" and state.starting_s < 1e-3
            chosen = ClusterType.SPOT if safe else ClusterType.ON_DEMAND
        if chosen is ClusterType.SPOT and not state.spot:
            chosen = ClusterType.NONE
        self._last = chosen
        return [RunOn(_PLACES[chosen])]
