"""A job with a deadline on spot and on-demand machines, tick by tick.

The rules are those of the simulator released with "Can't Be Late" (NSDI 2024). At the start of a tick the
work of the last one is credited, less what the restart took; a spot machine whose zone has no capacity any
more is gone; then the policy says where to run. A change to another machine costs one restart, which replaces
what was left of an earlier one. Ticks are paid whole. Nothing done is lost: the job is taken to save its
state as a machine goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.errors import SimError
from sim.policies.asked import ask
from sim.policies.base import Event, Place, Policy, RunOn, State

_TICK = Event("tick")


@dataclass(frozen=True)
class SpotJob:
    """A job and what machines cost: times in seconds, prices in dollars an hour."""

    work_s: float = 48 * 3600
    deadline_s: float = 60 * 3600
    restart_s: float = 720.0
    tick_s: float = 600.0
    spot_price: float = 0.9731
    on_demand_price: float = 3.06

    def __post_init__(self) -> None:
        for name, value in (("work", self.work_s), ("tick", self.tick_s), ("deadline", self.deadline_s)):
            if not value > 0:
                raise SimError(f"could not make a spot job: its {name} is {value:g} s; it must be above 0")
        if self.work_s + self.restart_s > self.deadline_s:
            raise SimError(
                f"could not make a spot job: {self.work_s:g} s of work and a start of {self.restart_s:g} s "
                f"do not fit before its deadline of {self.deadline_s:g} s; allow more time"
            )


@dataclass(frozen=True)
class SpotOutcome:
    """What became of a job: dollars and seconds. A machine is held while it starts, too."""

    cost: float
    spot_work_s: float
    on_demand_work_s: float
    spot_held_s: float
    on_demand_held_s: float
    idle_s: float
    end_s: float
    preemptions: int


def run(policy: Policy, job: SpotJob, available: Sequence[int]) -> SpotOutcome:
    """Run a job to its end.

    Args:
        policy: asked at each tick.
        job: the job.
        available: for each tick, whether the zone has spot capacity: 1 or 0.

    Raises:
        SimError: the capacity ends before the job, or the policy's answer is not one place.

    """
    state = State(
        work_s=job.work_s,
        deadline_s=job.deadline_s,
        restart_s=job.restart_s,
        tick_s=job.tick_s,
    )
    held: dict[Place, int] = {"none": 0, "spot": 0, "on-demand": 0}
    worked: dict[Place, float] = {"spot": 0.0, "on-demand": 0.0}
    preemptions = 0
    for tick, capacity in enumerate(available):
        state.now_s = tick * job.tick_s
        if state.place != "none":
            used_s = min(state.starting_s, job.tick_s)
            state.starting_s -= used_s
            done_s = min(job.tick_s - used_s, job.work_s - state.done_s)
            state.done_s += done_s
            worked[state.place] += done_s
        if state.done_s >= job.work_s:
            return _outcome(job, held, worked, state.now_s, preemptions)
        state.spot = bool(capacity)
        if state.place == "spot" and not state.spot:
            state.place = "none"
            preemptions += 1
        chosen = _choice(policy, state)
        if chosen == "spot" and not state.spot:
            chosen = "none"
        if chosen not in ("none", state.place):
            state.starting_s = job.restart_s
        state.place = chosen
        held[chosen] += 1
    raise SimError(
        f"could not run a job with '{policy.name}': the capacity ends after {len(available)} ticks, before "
        "the job does; give more of it"
    )


def _choice(policy: Policy, state: State) -> Place:
    actions = ask(policy, state, _TICK)
    if len(actions) == 1 and isinstance(actions[0], RunOn):
        return actions[0].place
    raise SimError(f"could not run a job with '{policy.name}': at a tick it says {actions}, not where to run")


def _outcome(
    job: SpotJob, held: dict[Place, int], worked: dict[Place, float], end_s: float, preemptions: int
) -> SpotOutcome:
    spot_s, on_demand_s = held["spot"] * job.tick_s, held["on-demand"] * job.tick_s
    return SpotOutcome(
        cost=(spot_s * job.spot_price + on_demand_s * job.on_demand_price) / 3600,
        spot_work_s=worked["spot"],
        on_demand_work_s=worked["on-demand"],
        spot_held_s=spot_s,
        on_demand_held_s=on_demand_s,
        idle_s=held["none"] * job.tick_s,
        end_s=end_s,
        preemptions=preemptions,
    )
