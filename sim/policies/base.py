"""What a policy is: an object that is told of events and answers with actions.

A policy sees a `State` and an `Event` and returns a list of actions; whoever runs it, a simulator or a node,
carries them out. It keeps what it has learnt in itself, draws no random numbers and imports the standard
library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

EventKind = Literal["start", "checkpoint", "failure", "restart", "tick"]
"""start: work begins; checkpoint: one was taken; failure: work stopped; restart: it goes on; tick: time to
choose where to run."""

Place = Literal["none", "spot", "on-demand"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. `stall_s` is what a checkpoint cost, of the kind `checkpoint`."""

    kind: EventKind
    stall_s: float = 0.0


@dataclass(slots=True)
class State:
    """What is known of a job when an event happens. Times are seconds since the job was handed in.

    Attributes:
        now_s: the time.
        work_s: useful work the whole job needs.
        done_s: useful work done and kept.
        stall_s: what a checkpoint is expected to cost, None if nobody knows.
        mtbf_s: mean time between failures of the whole job, None if nobody knows.
        restart_s: time from a failure, or from a change of machine, to work going on.
        deadline_s: when the job must be done, None if it may take any time.
        tick_s: time between ticks.
        spot: whether spot capacity is to be had now.
        place: where the job runs; none right after its spot machine was taken.
        starting_s: what is left of the last restart.

    """

    now_s: float = 0.0
    work_s: float = 0.0
    done_s: float = 0.0
    stall_s: float | None = None
    mtbf_s: float | None = None
    restart_s: float = 0.0
    deadline_s: float | None = None
    tick_s: float = 0.0
    spot: bool = False
    place: Place = "none"
    starting_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SetInterval:
    """Take a checkpoint after every `work_s` seconds of work from here on; None takes none."""

    work_s: float | None


@dataclass(frozen=True, slots=True)
class RunOn:
    """Run there from now on; none releases what the job has."""

    place: Place


Action = SetInterval | RunOn


class Policy(Protocol):
    """Decides. `name` is what studies and reports call it."""

    @property
    def name(self) -> str: ...

    def on_event(self, state: State, event: Event) -> list[Action]:
        """Actions to take now, in this order; an empty list goes on as before.

        Raises:
            SimError: the state lacks what this policy needs.

        """
        ...
