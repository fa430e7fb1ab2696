"""Policies that choose between spot and on-demand machines for a job with a deadline.

Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", NSDI 2024, in the form of the
released simulator, which differs from the paper in detail. A policy is asked at each tick.
"""

from __future__ import annotations

import math

from sim.errors import SimError
from sim.policies.base import Action, Event, Place, RunOn, State


def ticks_s(state: State, work_s: float) -> float:
    """Time for work, in whole ticks."""
    return math.ceil(work_s / state.tick_s) * state.tick_s


def room_s(state: State) -> float:
    """Whole ticks until the deadline."""
    if state.deadline_s is None:
        raise SimError("could not choose a machine: the job has no deadline; give it one")
    return math.floor((state.deadline_s - state.now_s) / state.tick_s) * state.tick_s


def _safe(state: State, want: Place) -> Place:
    """What is wanted, unless only a machine that nobody takes away still meets the deadline."""
    room, left_s = room_s(state), state.work_s - state.done_s
    # Two restarts: the job would have to start once more on demand after a start on spot that fails.
    if ticks_s(state, left_s + 2 * state.restart_s) >= room and state.place != "spot":
        want = "on-demand"
    if ticks_s(state, left_s + state.restart_s) >= room:
        want = "spot" if state.place == "spot" and state.starting_s < 1e-3 else "on-demand"
    return want


class Greedy:
    """Spot whenever there is any, nothing otherwise, on demand once the deadline asks for it."""

    name = "greedy"

    def on_event(self, state: State, event: Event) -> list[Action]:
        if event.kind != "tick":
            return []
        return [RunOn(_safe(state, "spot" if state.spot else "none"))]


class UniformProgress:
    """Greedy while the job is ahead of a straight line to its deadline, on demand where it is behind.

    It stays on demand until it is ahead by two restarts, so that it does not flap.
    """

    name = "uniform-progress"

    def on_event(self, state: State, event: Event) -> list[Action]:
        if event.kind != "tick":
            return []
        if state.deadline_s is None:
            raise SimError("could not use policy 'uniform-progress': the job has no deadline; give it one")
        pace = state.work_s / state.deadline_s
        want: Place = "spot" if state.spot else "none"
        if state.done_s < state.now_s * pace and not state.spot:
            want = "on-demand"
        if state.place == "on-demand":
            ahead_s = state.done_s - (state.now_s + 2 * state.restart_s) * pace
            if not state.spot or ahead_s <= 0:
                want = "on-demand"
        return [RunOn(_safe(state, want))]


class OnDemand:
    """On demand from the start: what the savings of others are measured against."""

    name = "on-demand"

    def on_event(self, state: State, event: Event) -> list[Action]:
        return [RunOn("on-demand")] if event.kind == "tick" else []
