"""What a policy is: an object that is told of events and answers with actions.

A policy sees a `State` and an `Event` and returns a list of actions; whoever runs it, a simulator or a node,
carries them out. It keeps what it has learnt in itself, draws no random numbers and imports the standard
library only. A policy that asks for something that whoever runs it cannot do is refused with a `SimError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

EventKind = Literal[
    "start", "checkpoint", "persisted", "failure", "repaired", "restart", "notice", "prediction", "tick",
    "answer", "preempt", "arrival", "idle", "resume",
]  # fmt: skip
"""What can happen.

start: work begins. checkpoint: one was taken, its stall is over. persisted: it counts from now on. failure:
work stopped. repaired: a machine is whole again. restart: work goes on after a failure. notice: a machine
will be taken (`cause`) in `lead_s`. prediction: one is said to fail in `lead_s`. tick: time to choose where
to run. answer: whether what was just asked for at a tick is to be had (`success`). preempt: a job of higher
priority wants the machines. arrival: a request came and no replica is free. idle: a replica has nothing to do
any more. resume: a session whose cache is not in memory goes on.
"""

Cause = Literal["", "process", "node", "group", "maintenance", "spot"]
"""Of a failure: only what runs on a node, the node, or several with what they share. Of a
notice: maintenance, or a spot machine."""

Place = Literal["none", "spot", "on-demand"]

MEMORY = "memory"
"""The level that `KeepReplica` makes."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        kind: what.
        stall_s: what a checkpoint cost, of the kind `checkpoint`.
        level: where that checkpoint went, "" where there is one place only.
        cause: of a failure or a notice.
        lead_s: how long until what a notice or a prediction tells of.
        replica: of a failure: whether a machine that still runs holds the whole state of the job as it was
            when work stopped (data-parallel replicas do).
        tokens: of the kind `resume`: how long the session's cache is.
        success: of the kind `answer`.

    """

    kind: EventKind
    stall_s: float = 0.0
    level: str = ""
    cause: Cause = ""
    lead_s: float = 0.0
    replica: bool = False
    tokens: int = 0
    success: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """A place for checkpoints: its name, what a checkpoint there stalls, and failures a second it heals.

    `rate` counts failures that a checkpoint there survives and one in a lesser level does not.
    """

    name: str
    stall_s: float
    rate: float


@dataclass(frozen=True, slots=True)
class Region:
    """A region, or a zone of one, as it is known now: dollars an hour.

    `area`: zones of one area share their storage. `lasts_s`: for how long there is spot capacity from now on,
    0 for none; known to an oracle only.
    """

    name: str
    area: str
    spot_price: float
    on_demand_price: float
    lasts_s: float | None = None


@dataclass(slots=True)
class Service:
    """Replicas of an inference service, and what starting one costs.

    Attributes:
        running: replicas that serve or are ready to.
        starting: replicas on their way.
        waiting: requests that no replica serves.
        least: replicas that are there whatever happens.
        most: replicas that there is room for.
        warm_s: a start from a checkpoint, None if there is none to start from.
        cold_s: a start from nothing.

    """

    running: int = 0
    starting: int = 0
    waiting: int = 0
    least: int = 0
    most: int = 1
    warm_s: float | None = None
    cold_s: float = 0.0


@dataclass(slots=True)
class State:
    """What is known of a job when an event happens. Times are seconds since the job was handed in.

    Attributes:
        now_s: the time.
        work_s: useful work the whole job needs.
        done_s: useful work done and kept.
        risk_s: useful work done and not yet kept by a checkpoint that counts.
        stall_s: what a blocking checkpoint is expected to cost, None if nobody knows.
        async_stall_s: what one stalls that is written while work goes on, None if the job cannot do that.
        persist_s: from the end of such a stall until the checkpoint counts.
        increment: stall of a checkpoint of what has changed, as a share of that of a whole one.
        step_s: one step of work; a job can stop between two only.
        mtbf_s: mean time between failures of the whole job, None if nobody knows.
        restart_s: time from a failure, or from a change of machine, to work going on.
        migrate_s: time work stops for a planned move to another machine, None if the job cannot move.
        levels: places for checkpoints, the cheapest first; empty where there is one only.
        nodes: machines of the job.
        spares: machines that stand ready for it.
        replica_s: stall of a copy into the memory of another machine, None if that is not to be had.
        deadline_s: when the job must be done, None if it may take any time.
        tick_s: time between ticks.
        spot: whether spot capacity is to be had now, where the job is.
        place: where the job runs; none right after its spot machine was taken.
        region: the region it is in, or was in last; "" before the first.
        regions: all regions, empty where there is one only.
        move_cost: dollars that taking the job's checkpoint to another area costs.
        state_bytes: size of a checkpoint.
        starting_s: what is left of the last restart.
        service: replicas, for an inference service.
        cache_restore_s: time to load a token's cache, None if it is not kept.
        cache_compute_s: time to compute it anew.

    """

    now_s: float = 0.0
    work_s: float = 0.0
    done_s: float = 0.0
    risk_s: float = 0.0
    stall_s: float | None = None
    async_stall_s: float | None = None
    persist_s: float = 0.0
    increment: float = 1.0
    step_s: float = 0.0
    mtbf_s: float | None = None
    restart_s: float = 0.0
    migrate_s: float | None = None
    levels: tuple[Level, ...] = ()
    nodes: int = 1
    spares: int = 0
    replica_s: float | None = None
    deadline_s: float | None = None
    tick_s: float = 0.0
    spot: bool = False
    place: Place = "none"
    region: str = ""
    regions: tuple[Region, ...] = ()
    move_cost: float = 0.0
    state_bytes: float = 0.0
    starting_s: float = 0.0
    service: Service | None = None
    cache_restore_s: float | None = None
    cache_compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SetInterval:
    """Take a checkpoint after every `work_s` seconds of work from here on; None takes none."""

    work_s: float | None


@dataclass(frozen=True, slots=True)
class SetMode:
    """How checkpoints are taken from here on.

    `asynchronous` ones are written while work goes on. One in `full_every` is whole, the others hold what has
    changed since the one before, and a restart reads all of them back to the last whole one.
    """

    asynchronous: bool = False
    full_every: int = 1


@dataclass(frozen=True, slots=True)
class SetLevels:
    """Where checkpoints go from here on: one in `every` to the level of that name, the cheapest level first.

    A checkpoint goes to the last level whose turn it is; the first level's count is 1.
    """

    every: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class KeepReplica:
    """Keep `copies` of the state in memory, the machine's own included, in groups of so many machines.

    From here on there is a level "memory", to which each checkpoint of the interval goes; what is there is
    gone when a whole group is (Wang et al., SOSP 2023).
    """

    copies: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Take one apart from the interval, in `delay_s`; to that level, or to the last one where it is ""."""

    level: str = ""
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveFromReplica:
    """After a failure: the machines that still run save the state they hold, so that a step is lost only."""


@dataclass(frozen=True, slots=True)
class Migrate:
    """Move what runs on the machine that a notice or a prediction is of to another one, while there is time.

    Without a free machine the job stays where it is.
    """


@dataclass(frozen=True, slots=True)
class Requeue:
    """Give all machines back and start anew as soon as there are enough: after a failure, or on a notice."""


@dataclass(frozen=True, slots=True)
class UseSpare:
    """Put a spare in the place of the machine that failed; without one wait for a repair."""


@dataclass(frozen=True, slots=True)
class Preempt:
    """Make room for a job of higher priority.

    kill: what is not kept is lost. checkpoint: save it first. none: go on, the other one waits.
    """

    how: Literal["kill", "checkpoint", "none"]


@dataclass(frozen=True, slots=True)
class Start:
    """Start `count` more replicas, from nothing or from a checkpoint."""

    how: Literal["cold", "warm"]
    count: int = 1


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the replica that the event is of if it has still nothing to do after that time."""

    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RestoreCache:
    """Load the session's KV cache from where it was kept; `overhead_s` on top of what its bytes take."""

    overhead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Recompute:
    """Compute the session's KV cache anew."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Look for spot capacity in a region, by starting a machine there for a minute: an `answer` follows."""

    region: str


@dataclass(frozen=True, slots=True)
class RunOn:
    """Run there from now on; none releases what the job has. "" is the region the job is in.

    Where there is no spot capacity the job stays as it is. An `answer` follows.
    """

    place: Place
    region: str = ""


Action = (
    SetInterval | SetMode | SetLevels | KeepReplica | Checkpoint | SaveFromReplica | Migrate | Requeue
    | UseSpare | Preempt | Start | Stop | RestoreCache | Recompute | Probe | RunOn
)  # fmt: skip


ROUTINE: frozenset[EventKind] = frozenset({"checkpoint", "persisted", "repaired"})
"""What a policy ignores that does not look at each checkpoint, and not at machines that come back."""


class Policy(Protocol):
    """Decides. `name` is what studies and reports call it.

    A policy may have `ignores`, a set of kinds of events on which it does nothing and learns nothing. The
    simulator then does not make them: it counts checkpoints instead of playing them one by one. For spot jobs
    `regional = True` says that it chooses among regions (any other is played alone in each), `oracle = True`
    that it is told how long capacity lasts.
    """

    @property
    def name(self) -> str: ...

    def on_event(self, state: State, event: Event) -> list[Action]:
        """Actions to take now, in this order; an empty list goes on as before.

        Raises:
            SimError: the state lacks what this policy needs.

        """
        ...
