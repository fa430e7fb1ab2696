"""Policies that act when something is announced, predicted, or has just failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from sim.errors import SimError
from sim.maths import theory
from sim.policies.around import Around, known
from sim.policies.base import (
    ROUTINE,
    Action,
    Checkpoint,
    Event,
    Migrate,
    Policy,
    Requeue,
    SaveFromReplica,
    SetInterval,
    State,
    UseSpare,
)  # fmt: skip
from sim.policies.interval import LEAST_STALL_S, Never

Trigger = Literal["maintenance", "spot", "prediction"]

_ROOM, _CLOCK_S = 0.1, 1.0
"""Begun earlier than a stall ahead by this share of it and this time: none takes exactly what is expected."""


def _last_moment(state: State, lead_s: float) -> list[Action]:
    """A checkpoint that ends just before the machine goes; none where there is too little time for one."""
    stall_s = state.stall_s or 0.0
    if stall_s > lead_s:
        return []
    return [Checkpoint(delay_s=max(0.0, lead_s - stall_s - _ROOM * stall_s - _CLOCK_S))]


def _triggered(event: Event, on: Sequence[str]) -> bool:
    what = event.cause if event.kind == "notice" else event.kind
    return event.kind in ("notice", "prediction") and what in on


class OnEvent(Around):
    """Takes a checkpoint, as late as it may, when a machine is about to go."""

    name = "event"

    def __init__(
        self,
        on: Sequence[Trigger] = ("maintenance", "spot", "prediction"),
        base: Policy | None = None,
        interval_s: float | None = None,
    ) -> None:
        super().__init__(base, interval_s)
        for trigger in on:
            if trigger not in get_args(Trigger):
                raise SimError(
                    f"could not make policy '{self.name}': it cannot act on '{trigger}'; "
                    f"it can on {', '.join(get_args(Trigger))}"
                )
        self._on = tuple(on)

    def _more(self, state: State, event: Event) -> list[Action]:
        return _last_moment(state, event.lead_s) if _triggered(event, self._on) else []


class Migration(Around):
    """Moves what runs on a machine that is about to go, while there is time."""

    name = "migrate"

    def _more(self, state: State, event: Event) -> list[Action]:
        if event.kind not in ("notice", "prediction"):
            return []
        if state.migrate_s is None or state.migrate_s > event.lead_s:
            return _last_moment(state, event.lead_s)
        return [Migrate()]


class Requeueing(Around):
    """Saves and gives its machines back when one is about to go or has failed, and queues again."""

    name = "requeue"

    def _more(self, state: State, event: Event) -> list[Action]:
        if event.kind == "failure":
            return [Requeue()]
        if event.kind == "notice":
            return [*_last_moment(state, event.lead_s), Requeue()]
        return []


class Predicted:
    """Checkpoints on prediction, and rarer ones in between: every `sqrt(2 mtbf stall / (1 - recall))`.

    Aupy, Robert, Vivien, Zaidouni: JPDC 74(2), 2014. Their period holds the checkpoint; the interval here
    does not.
    """

    name = "predicted"
    ignores = ROUTINE

    def __init__(self, recall: float) -> None:
        if not 0 <= recall < 1:
            raise SimError(
                f"could not make policy '{self.name}': recall is {recall:g}; it must be 0 or more and below 1"
            )
        self._recall = recall

    def on_event(self, state: State, event: Event) -> list[Action]:
        if event.kind == "prediction":
            return _last_moment(state, event.lead_s)
        if event.kind != "start":
            return []
        stall_s = max(known(self.name, "the cost of a checkpoint", state.stall_s), LEAST_STALL_S)
        period_s = theory.prediction_period(stall_s, known(self.name, "the MTBF", state.mtbf_s), self._recall)
        return [SetInterval(max(period_s - stall_s, stall_s))]


class JustInTime(Around):
    """Saves after a failure, from the machines that still run and hold the whole state.

    Gupta et al., EuroSys 2024. What no machine holds any more comes from the checkpoints of `base`, which
    takes none unless told so.
    """

    name = "just-in-time"

    def __init__(self, base: Policy | None = None, interval_s: float | None = None) -> None:
        super().__init__(base or (None if interval_s else Never()), interval_s)

    def _more(self, state: State, event: Event) -> list[Action]:
        return [SaveFromReplica()] if event.kind == "failure" and event.replica else []


class HotSpares(Around):
    """Puts a machine that stands ready in the place of one that failed."""

    name = "hot-spares"

    def _more(self, state: State, event: Event) -> list[Action]:
        return [UseSpare()] if event.kind == "failure" and state.spares > 0 else []
