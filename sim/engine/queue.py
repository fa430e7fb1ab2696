"""A queue of gang jobs on a cluster: priorities, preemption, failures, maintenance.

Jobs start in order of priority, then of arrival; one that does not fit holds up those behind it. A job that
could start if lower ones made room asks their policies to, the lowest and youngest first. A failed job
queues again where it was. Checkpoints between two events of a job are counted, not played, unless jobs share
the bandwidth of their storage.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from sim.engine.hardware import Announcement, Incident, Item
from sim.engine.jobs import (
    BUCKET,
    Job,
    Nodes,
    Phase,
    Reached,
    check_ends,
    first_s,
    job_rate,
    needs_s,
    reached,
    unless_changed,
)  # fmt: skip
from sim.engine.ledger import Ledger, Outcome, Span, Status
from sim.engine.saves import SAME_S
from sim.engine.stage import Stage
from sim.engine.store import Store
from sim.engine.streams import Streams
from sim.errors import SimError
from sim.policies.asked import ask
from sim.policies.base import (
    Action,
    Checkpoint,
    Event,
    EventKind,
    Migrate,
    Policy,
    Preempt,
    Requeue,
    SetInterval,
    State,
)  # fmt: skip
from sim.studies.config import Config, JobClass, Queue

MOST_FRUITLESS = 10_000
"""Starts of one job that kept nothing after which it is taken never to end."""


class _Run(Stage):
    def __init__(self, config: Config, work: Queue, streams: Streams, policy: Policy, timeline: bool) -> None:
        super().__init__(config, streams, ("failures", "preemptions", "migrations", "checkpoints"))
        self.work, self.policy = work, policy
        self.nodes = Nodes(config.cluster.machines)
        self.ledger = Ledger()
        self.spans: list[Span] | None = [] if timeline else None
        self.queue: list[Job] = []
        self.jobs: list[Job] = []
        self.running: dict[int, Job] = {}  # those that have machines
        self.coming = 0  # classes whose next job is on its way
        self.unfinished = 0
        self.numbers = itertools.count()
        self.recoveries: list[float] = []
        self.failed_at: dict[int, float] = {}
        self.held_s = self.useful_s = 0.0  # machines had, and the work of jobs that are done
        self.before = (0.0, 0.0)  # the same at the end of the warm-up
        self.livelock = False
        self.store = Store(self, work.state_bytes)

    # Time

    def for_job(self, job: Job, delay_s: float, act: Callable[[Job], None]) -> None:
        """Do it unless the job's phase changes before."""
        self.at(delay_s, unless_changed(job, act))

    def while_there(self, job: Job, delay_s: float, act: Callable[[Job], None]) -> None:
        """Do it if the job then works, or once it is saved, and has had its machines all the while."""
        start = job.starts

        def fire() -> None:
            if job.starts == start and job.phase == "working":
                act(job)
            elif job.starts == start and job.phase == "saving":
                job.later.append(fire)

        self.at(delay_s, fire)

    # Phases of a job

    def settle(self, job: Job, now_s: float, *, done: bool = False) -> None:
        """Put the time since the last settlement, up to `now_s`, into its bucket."""
        spent_s = now_s - job.since_s
        if job.phase == "working":
            seen = reached(job, now_s)
            if job.stall_s > 0:
                self.counts["checkpoints"] += seen.taken
            if done:
                seen = Reached(job.work_s, job.work_s)
            self.ledger.add("goodput", seen.memory_s - job.base_s)
            self.ledger.add("checkpoint_stall", spent_s - (seen.memory_s - job.base_s))
            job.kept(seen.kept_s)
            job.base_s, job.kept_s, job.into_s = seen.memory_s, seen.kept_s, seen.into_s
        elif job.phase != "done":
            self.ledger.add(BUCKET[job.phase], spent_s)
        self.held_s += spent_s * len(job.nodes)
        job.since_s = now_s

    def enter(self, job: Job, phase: Phase) -> None:
        """End a phase and begin another."""
        self.close(job, self.env.now, done=phase == "done")
        job.phase, job.entered_s = phase, self.env.now
        job.version += 1
        self.store.stop(job)

    def close(self, job: Job, now_s: float, *, done: bool = False) -> None:
        """Account for a job's phase up to `now_s`, as it or watching ends."""
        self.settle(job, now_s, done=done)
        if self.spans is not None and now_s > job.entered_s:
            self.spans.append(Span(job.entered_s, now_s, f"job{job.number}", job.phase, job.kind.name))

    def tell(self, job: Job, kind: EventKind, item: Item | None = None) -> list[Action]:
        """Ask the job's policy; what it says of the interval is done here."""
        if job.phase == "working":
            self.settle(job, self.env.now)  # what was done by now was done with the old interval
        interval_s = job.interval_s
        state = State(
            now_s=self.env.now - job.arrived_s,
            work_s=job.work_s,
            done_s=job.kept_s,
            risk_s=job.base_s - job.kept_s,
            stall_s=job.stall_s,
            mtbf_s=job.mtbf_s,
            restart_s=self.config.costs.restart.mean,
            migrate_s=None if self.config.costs.migrate is None else self.config.costs.migrate.mean,
            nodes=job.kind.nodes,
            spares=len(self.nodes.usable()),
        )
        lead_s = item.lead_s if isinstance(item, Announcement) else 0.0
        event = Event(kind, cause=item.cause if item else "", lead_s=lead_s)
        actions = ask(job.policy, state, event)
        for action in actions:
            if isinstance(action, SetInterval):
                job.interval_s = math.inf if action.work_s is None else action.work_s
            elif not isinstance(action, Checkpoint | Migrate | Requeue | Preempt):
                raise SimError(
                    f"could not play a queue with policy '{job.policy.name}': it asks for "
                    f"{type(action).__name__}, which a queue does not have; use another policy"
                )
        if job.phase == "working" and job.interval_s != interval_s:
            self.plan_end(job)
        return actions

    def so_far(self, now_s: float) -> tuple[float, float]:
        """Seconds of machines that jobs had, and of work that is not lost: what is in memory goes on."""
        held_s, useful_s = self.held_s, self.useful_s
        for job in self.jobs:
            if job.phase != "done":
                done_s = reached(job, now_s).memory_s if job.phase == "working" else job.base_s
                held_s += (now_s - job.since_s) * len(job.nodes)
                useful_s += done_s * job.kind.nodes
        return held_s, useful_s

    def start(self, job: Job) -> None:
        self.enter(job, "starting")
        job.nodes = self.nodes.take(job, job.kind.nodes)
        self.running[job.number] = job
        costs = self.config.costs
        first = job.starts == 0
        job.starts += 1
        job.stall_s = self.store.save_s(job)
        starting_s = self.cost(costs.startup if first else costs.restart)
        self.store.restore(job, starting_s, self.work_on)

    def work_on(self, job: Job) -> None:
        self.tell(job, "start" if job.starts == 1 else "restart")
        if job.number in self.failed_at:
            self.recoveries.append(self.env.now - self.failed_at.pop(job.number))
        self.resume(job)

    def resume(self, job: Job) -> None:
        self.enter(job, "working")
        self.plan_end(job)

    def go_on(self, job: Job) -> None:
        """Work on after a save or a move; what had to wait for its end comes now."""
        if job.going:
            self.preempted(job)
            return
        self.resume(job)
        later, job.later = job.later, []
        for act in later:
            act()
        self.schedule()

    def plan_end(self, job: Job) -> None:
        """The work ends as its interval has it; what was planned with another one is void.

        Where jobs share bandwidth the next checkpoint comes first: how long it takes nobody knows before.
        """
        job.plan += 1
        plan, after_s, act = job.plan, needs_s(job), self.finish
        if self.store.shared and first_s(job) < job.work_s - job.base_s - SAME_S:
            after_s, act = first_s(job), self.save_and_go_on
        self.for_job(job, after_s, lambda one: act(one) if one.plan == plan else None)

    def finish(self, job: Job) -> None:
        self.enter(job, "done")
        job.ended_s = self.env.now
        self.unfinished -= 1
        self.useful_s += job.work_s * job.kind.nodes
        self.release(job)
        self.schedule()

    def release(self, job: Job) -> None:
        self.nodes.give_back(job.nodes)
        job.nodes = []
        del self.running[job.number]

    def drop(self, job: Job) -> None:
        """Lose what is not kept."""
        lost_s = job.base_s - job.kept_s
        self.ledger.move("goodput", "lost_work", lost_s)
        job.base_s, job.into_s = job.kept_s, 0.0
        job.fruitless += 1
        if job.fruitless > MOST_FRUITLESS:
            self.livelock = True

    def queue_again(self, job: Job, phase: Phase) -> None:
        self.enter(job, phase)
        job.going = False
        self.release(job)
        self.queue.append(job)
        self.queue.sort(key=lambda one: one.rank)

    def save(self, job: Job, then: Callable[[Job], None]) -> None:
        """Take a checkpoint of all there is."""
        self.enter(job, "saving")

        def saved(one: Job) -> None:
            one.kept_s, one.into_s = one.base_s, 0.0
            one.kept(one.kept_s)
            self.counts["checkpoints"] += 1
            then(one)

        self.store.save(job, saved)

    def save_and_go_on(self, job: Job) -> None:
        self.save(job, self.go_on)

    # What happens

    def arrive(self, kind: JobClass, work_s: float) -> None:
        rate = job_rate(self.config, kind.nodes)
        policy = copy.deepcopy(self.policy)
        job = Job(next(self.numbers), kind, self.env.now, work_s, policy, 1 / rate if rate else None)
        job.since_s = job.entered_s = self.env.now
        self.unfinished += 1
        self.jobs.append(job)
        self.queue.append(job)
        self.queue.sort(key=lambda one: one.rank)
        self.schedule()

    def schedule(self) -> None:
        while self.queue:
            job = self.queue[0]
            if len(self.nodes.usable()) >= job.kind.nodes:
                self.queue.pop(0)
                self.start(job)
            elif not self.make_room(job):
                return

    def make_room(self, job: Job) -> bool:
        """Ask lower jobs to go; True if machines are free at once."""
        lower = [one for one in self.running.values() if one.kind.priority < job.kind.priority]
        leaving = [one for one in lower if one.going]
        have = len(self.nodes.usable()) + sum(len(one.nodes) for one in leaving)
        if have >= job.kind.nodes:
            return False  # they are on their way
        chosen: list[tuple[Job, str]] = []
        # One that is being moved or has failed is soon where it can be asked.
        able = [one for one in lower if one.phase in ("starting", "working", "saving") and not one.going]
        for one in sorted(able, key=lambda one: one.rank)[::-1]:
            if have >= job.kind.nodes:
                break
            answers = [action for action in self.tell(one, "preempt") if isinstance(action, Preempt)]
            how = answers[-1].how if answers else "none"
            if how != "none":
                chosen.append((one, how))
                have += len(one.nodes)
        if have < job.kind.nodes:
            return False
        for one, how in chosen:
            self.counts["preemptions"] += 1
            if how == "checkpoint" and one.phase != "starting":
                one.going = True
                if one.phase == "working":
                    self.save(one, self.preempted)
            else:
                self.kill(one, "preempted")
        return len(self.nodes.usable()) >= job.kind.nodes

    def preempted(self, job: Job) -> None:
        self.queue_again(job, "preempted")
        self.schedule()

    def kill(self, job: Job, phase: Phase) -> None:
        if job.phase == "working":
            self.enter(job, "waiting")
        self.drop(job)
        self.queue_again(job, phase)

    def users(self, nodes: Sequence[int]) -> list[Job]:
        """Jobs on these machines, each once, in order of the machines."""
        found = {job.number: job for node in nodes if (job := self.nodes.user.get(node))}
        return list(found.values())

    def befall(self, item: Item) -> None:
        nodes = [node for node in item.nodes if node not in self.nodes.away]
        hit = self.users(nodes)
        if isinstance(item, Announcement):
            if item.kind == "notice":
                self.nodes.leaving.update(nodes)
            for job in hit:
                self.warn(job, item)
            return
        self.nodes.leaving.difference_update(nodes)
        if item.down_s > 0:
            for node in nodes:
                self.nodes.lose(node, self.env.now + item.down_s)
            self.at(item.down_s, lambda: self.back(nodes))
        for job in hit:
            if job.phase != "detecting":
                self.fail(job, item)
        self.schedule()

    def fail(self, job: Job, incident: Incident) -> None:
        told = incident.cause in ("maintenance", "spot")
        if not told:
            self.counts["failures"] += 1
        self.failed_at.setdefault(job.number, self.env.now)
        detection_s = 0.0 if told else self.cost(self.config.costs.detection)
        self.enter(job, "detecting")
        if self.store.lost_with(incident):
            job.kept_s = 0.0
        self.drop(job)
        self.tell(job, "failure", incident)

        def noticed(one: Job) -> None:
            self.queue_again(one, "waiting")
            self.schedule()

        self.for_job(job, detection_s, noticed)

    def back(self, nodes: list[int]) -> None:
        for node in nodes:
            self.nodes.regain(node, self.env.now)
        self.schedule()

    def warn(self, job: Job, said: Announcement) -> None:
        if job.phase == "saving":
            job.later.append(lambda: self.warn_late(job, said))
            return
        actions = self.tell(job, said.kind, said)
        wants = [type(action) for action in actions]
        saves = [action for action in actions if isinstance(action, Checkpoint)]
        if Migrate in wants:
            self.migrate(job, said)
        elif Requeue in wants:
            # Without a checkpoint it works until the machine goes.
            if saves:
                self.while_there(job, saves[0].delay_s, self.leave)
        elif saves:
            self.while_there(job, saves[0].delay_s, self.save_and_go_on)

    def warn_late(self, job: Job, said: Announcement) -> None:
        lead_s = said.at_s + said.lead_s - self.env.now
        if lead_s > 0 and any(node in said.nodes for node in job.nodes):
            self.warn(job, dataclasses.replace(said, lead_s=lead_s))

    def leave(self, job: Job) -> None:
        job.going = True
        self.save(job, self.requeue)

    def requeue(self, job: Job) -> None:
        self.queue_again(job, "waiting")
        self.schedule()

    def migrate(self, job: Job, said: Announcement) -> None:
        """Swap machines under a job that works; without free ones, or while it starts, it stays."""
        bound = [node for node in job.nodes if node in said.nodes]
        free = [node for node in self.nodes.usable() if node not in said.nodes]
        if job.phase != "working" or len(free) < len(bound) or self.config.costs.migrate is None:
            return
        self.counts["migrations"] += 1
        self.enter(job, "moving")
        keep = [node for node in job.nodes if node not in bound]
        new = free[: len(bound)]
        self.nodes.give_back(bound)
        self.nodes.free = [node for node in self.nodes.free if node not in new]
        self.nodes.user.update(dict.fromkeys(new, job))
        job.nodes = sorted([*keep, *new])
        self.for_job(job, self.cost(self.config.costs.migrate), self.go_on)

    # The whole

    def warm(self) -> None:
        """From now on machines count."""
        self.before = self.so_far(self.env.now)

    def feed_jobs(self) -> None:
        check_ends(self.config, self.work)
        for number, kind in enumerate(self.work.classes):
            self.coming += 1
            self.next_arrival(kind, self.streams.make("workload", number), 0)

    def next_arrival(self, kind: JobClass, rng: np.random.Generator, sent: int) -> None:
        """Plan a job of the class; it plans the one after it."""
        if kind.most is not None and sent >= kind.most:
            self.coming -= 1
            return
        gap_s = 0.0 if kind.gaps is None else float(kind.gaps.sample(rng, 1)[0])
        work_s = float(kind.work.sample(rng, 1)[0])

        def come() -> None:
            self.arrive(kind, work_s)
            self.next_arrival(kind, rng, sent + 1)

        self.at(gap_s, come)

    def play(self) -> Status:
        self.feed_jobs()
        self.let_happen()
        if self.config.warmup_s:
            self.at(self.config.warmup_s, self.warm)
        while not self.livelock:
            if not self.coming and self.unfinished == 0:
                return "done"
            following_s = self.env.peek()
            if math.isinf(following_s) and math.isinf(self.config.horizon_s):
                return "livelock"  # somebody waits for machines that never come back
            if following_s > self.config.horizon_s:
                return "horizon"
            self.env.step()
        return "livelock"


def run(config: Config, streams: Streams, policy: Policy, timeline: bool) -> Outcome:
    """Play a queue to its end or its horizon.

    The wall time is that of all jobs together, each from its arrival to its end: `goodput` of it is work.

    Use of machines counts from the end of the warm-up on, times of jobs those that come after it.

    Raises:
        SimError: a class of jobs does not fit the cluster or has no end, all jobs are done before the warm-up
            is over, or the policy asks for what a queue does not have.

    """
    work = config.workload
    assert isinstance(work, Queue)
    played = _Run(config, work, streams, policy, timeline)
    status = played.play()
    return _outcome(played, status)


def _outcome(played: _Run, status: Status) -> Outcome:
    config = played.config
    end_s = config.horizon_s if status == "horizon" else played.env.now
    wall_s = 0.0
    for job in played.jobs:
        if job.phase != "done":
            played.close(job, end_s)
        wall_s += min(job.ended_s, end_s) - job.arrived_s
    buckets = played.ledger.buckets()
    done = [job for job in played.jobs if job.phase == "done" and job.arrived_s >= config.warmup_s]
    machines = config.cluster.machines
    counted_s = machines * (end_s - config.warmup_s)
    if config.warmup_s and counted_s <= 0 and status == "done":
        raise SimError(
            f"could not count a queue from {config.warmup_s:g} s on: all jobs are done at {end_s:g} s; "
            "shorten study.warmup"
        )
    held_s, useful_s = (end - begin for end, begin in zip(played.so_far(end_s), played.before, strict=True))
    metrics = {
        "wall_s": wall_s,
        "goodput_s": buckets["goodput"],
        "ettr": buckets["goodput"] / wall_s if wall_s else 0.0,
        "makespan_s": end_s,
        "jobs": float(len(played.jobs)),
        "jobs_done": float(sum(job.phase == "done" for job in played.jobs)),
        **_mean("time_in_system_s", [job.ended_s - job.arrived_s for job in done]),
        **_mean("slowdown", [(job.ended_s - job.arrived_s) / job.work_s for job in done if job.work_s]),
        "node_utilisation": held_s / counted_s if counted_s > 0 else 0.0,
        "node_goodput": useful_s / counted_s if counted_s > 0 else 0.0,
        "lost_work_s": buckets["lost_work"],
        **_mean("recovery_s", played.recoveries),
        "cost_usd": machines * end_s * config.costs.node_usd_per_s,
        **played.counts,
    }
    for kind in played.work.classes:
        own = [job.ended_s - job.arrived_s for job in done if job.kind is kind]
        metrics |= _mean(f"time_in_system.{kind.name}_s", own)
    return Outcome(status, metrics, buckets, played.recoveries, played.spans or [])


def _mean(name: str, values: list[float]) -> dict[str, float]:
    """Of none there is no mean, and not one of 0."""
    return {name: math.fsum(values) / len(values)} if values else {}
