"""Jobs of a queue and the nodes that they share."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from sim.engine import hardware
from sim.engine.link import Flow
from sim.engine.terms import notice_rate
from sim.errors import SimError
from sim.policies.base import Policy
from sim.studies.config import Config, GroupFailures, JobClass, NodeFailures, Queue, TraceFailures

Phase = Literal["waiting", "preempted", "starting", "working", "saving", "moving", "detecting", "done"]

BUCKET: dict[Phase, str] = {
    "waiting": "waiting", "preempted": "preempted", "starting": "startup", "saving": "checkpoint_stall",
    "moving": "migration", "detecting": "detection",
}  # fmt: skip
"""Where the time in a phase goes; that of work is divided by `reached`."""


@dataclass(slots=True)
class Job:
    number: int
    kind: JobClass
    arrived_s: float
    work_s: float
    policy: Policy
    mtbf_s: float | None
    phase: Phase = "waiting"
    entered_s: float = 0.0  # when the phase began
    since_s: float = 0.0  # up to when its time is accounted for
    nodes: list[int] = field(default_factory=list[int])
    kept_s: float = 0.0  # work in the last checkpoint
    base_s: float = 0.0  # work in memory when this stretch of work began
    interval_s: float = math.inf
    stall_s: float = 0.0
    into_s: float = 0.0  # how far the stall of a checkpoint had come by then
    starts: int = 0
    fruitless: int = 0
    furthest_s: float = 0.0  # the most work that a checkpoint ever held
    going: bool = False  # it gives its machines back once it is saved
    flow: Flow | None = None  # of its state, over bandwidth that jobs share
    later: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])  # once it is saved
    version: int = 0  # what was planned for an older one is void
    plan: int = 0  # the same for the end of the work
    ended_s: float = math.inf

    @property
    def rank(self) -> tuple[int, float, int]:
        """Place in the queue, the lowest first."""
        return (-self.kind.priority, self.arrived_s, self.number)

    def kept(self, work_s: float) -> None:
        """A checkpoint holds so much work."""
        if work_s > self.furthest_s:
            self.furthest_s, self.fruitless = work_s, 0


def unless_changed(job: Job, act: Callable[[Job], None]) -> Callable[[], None]:
    """Does it if the job's phase is then what it is now."""
    version = job.version
    return lambda: act(job) if job.version == version else None


@dataclass(frozen=True, slots=True)
class Reached:
    """Work in memory, what of it the last checkpoint holds, and how far the stall of the next one has come.

    `taken`: checkpoints since the last settlement.
    """

    memory_s: float
    kept_s: float
    into_s: float = 0.0
    taken: int = 0


def first_s(job: Job) -> float:
    """Work until the next checkpoint begins: none where one is under way, whatever the interval is now."""
    return 0.0 if job.into_s else max(0.0, job.interval_s - (job.base_s - job.kept_s))


def reached(job: Job, now_s: float) -> Reached:
    """How far a stretch of work has come: whole cycles of interval and stall, and a part of one."""
    spent_s = now_s - job.since_s
    ahead_s = first_s(job)
    if not job.into_s and spent_s <= ahead_s:
        return Reached(job.base_s + spent_s, job.kept_s)
    spent_s += job.into_s - ahead_s
    saved_s = job.base_s + ahead_s
    if spent_s < job.stall_s:
        return Reached(saved_s, job.kept_s, spent_s)
    cycles, rest_s = divmod(spent_s - job.stall_s, job.interval_s + job.stall_s)
    kept_s = saved_s + cycles * job.interval_s if cycles else saved_s
    into_s = max(0.0, rest_s - job.interval_s)
    return Reached(kept_s + min(rest_s, job.interval_s), kept_s, into_s, 1 + int(cycles))


def needs_s(job: Job) -> float:
    """How long the rest of the work takes with its checkpoints, the last of which is not taken."""
    left_s = job.work_s - job.base_s
    ahead_s = first_s(job)
    if left_s <= ahead_s:
        return left_s
    stalls = max(1, math.ceil((left_s - ahead_s) / job.interval_s - 1e-9))
    return left_s + job.stall_s * stalls - job.into_s


def job_rate(config: Config, nodes: int) -> float:
    """Failures and planned stops a second that a job on so many nodes meets, on average; 0 without any."""
    rate = notice_rate(config, nodes)
    for source in config.failures:
        match source:
            case NodeFailures():
                rate += nodes / source.law.mean
            case GroupFailures():
                members = hardware.groups(config.cluster, source.scope)
                rate += min(len(members), math.ceil(nodes / len(members[0]))) / source.law.mean
            case TraceFailures():
                rate += len(source.faults) / source.span_s * nodes / config.cluster.machines
    return rate


def check_ends(config: Config, work: Queue) -> None:
    """Check that the jobs fit and that they end.

    Raises:
        SimError: they do not.

    """
    for kind in work.classes:
        if kind.nodes > config.cluster.machines:
            raise SimError(
                f"could not play a queue: jobs of class '{kind.name}' need {kind.nodes} nodes and the "
                f"cluster has {config.cluster.machines}; make it larger"
            )
        if kind.gaps is None and kind.most is None:
            raise SimError(
                f"could not play a queue: class '{kind.name}' has no end; say how many jobs, or how "
                "often they come"
            )
        if kind.most is None and not math.isfinite(config.horizon_s):
            raise SimError(
                f"could not play a queue: jobs of class '{kind.name}' come for ever; give a horizon or "
                "say how many"
            )


class Nodes:
    """Machines: which are free, away, or about to go."""

    def __init__(self, machines: int) -> None:
        self.free = list(range(machines))
        self.away: dict[int, float] = {}
        self.leaving: set[int] = set()
        self.user: dict[int, Job] = {}

    def usable(self) -> list[int]:
        """Free machines that stay."""
        return [node for node in self.free if node not in self.leaving]

    def take(self, job: Job, count: int) -> list[int]:
        """Give a job so many free machines."""
        taken = self.usable()[:count]
        gone = set(taken)
        self.free = [node for node in self.free if node not in gone]
        for node in taken:
            self.user[node] = job
        return taken

    def give_back(self, nodes: list[int]) -> None:
        """Machines of a job are free again, but for those that are away."""
        for node in nodes:
            del self.user[node]
            if node not in self.away:
                heapq.heappush(self.free, node)
        self.free.sort()

    def lose(self, node: int, back_s: float) -> None:
        """A machine goes until then."""
        self.away[node] = max(back_s, self.away.get(node, 0.0))
        if node in self.free:
            self.free.remove(node)

    def regain(self, node: int, now_s: float) -> None:
        """A machine is back, unless something else keeps it away for longer."""
        if self.away.get(node, math.inf) > now_s:
            return
        del self.away[node]
        self.leaving.discard(node)
        if node not in self.user:
            self.free = sorted([*self.free, node])
