"""One job step by step through given failures: what policies and the array model are held against."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from sim.errors import SimError
from sim.policies.asked import ask
from sim.policies.base import Event, EventKind, Policy, SetInterval, State


@dataclass(frozen=True)
class Costs:
    """What things cost a job, in seconds.

    Attributes:
        stall_s: time a checkpoint stops the job.
        restart_s: from the end of an outage to work going on.
        persist_s: after the stall until the checkpoint counts; work goes on meanwhile.
        final_checkpoint: whether the job ends in a checkpoint that counts.

    """

    stall_s: float
    restart_s: float = 0.0
    persist_s: float = 0.0
    final_checkpoint: bool = False


@dataclass
class Ledger:
    """Where the time went: every second is in one of the five. `done`: the job reached its end."""

    kept_s: float = 0.0
    lost_s: float = 0.0
    stall_s: float = 0.0
    restart_s: float = 0.0
    outage_s: float = 0.0
    failures: int = 0
    checkpoints: int = 0
    done: bool = False

    @property
    def wall_s(self) -> float:
        return self.kept_s + self.lost_s + self.stall_s + self.restart_s + self.outage_s


@dataclass
class _Run:
    policy: Policy
    state: State
    costs: Costs
    limit_s: float
    ledger: Ledger = field(default_factory=Ledger)
    interval_s: float = math.inf
    pending: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    worked_s: float = 0.0  # in memory: kept or not

    def tell(self, kind: EventKind, stall_s: float = 0.0) -> None:
        for action in ask(self.policy, self.state, Event(kind, stall_s)):
            if not isinstance(action, SetInterval):
                raise SimError(
                    f"could not replay policy '{self.policy.name}': it asks for {action}, which moves a job"
                )
            self.interval_s = math.inf if action.work_s is None else action.work_s

    def settle(self) -> None:
        """What counts by now is kept."""
        while self.pending and self.pending[0][0] <= self.state.now_s:
            self.state.done_s = self.pending.pop(0)[1]


def replay(
    policy: Policy,
    work_s: float,
    costs: Costs,
    outages: Iterable[tuple[float, float]],
    *,
    mtbf_s: float | None = None,
    limit_s: float = math.inf,
) -> Ledger:
    """Play a job to its end, or to `limit_s`.

    Args:
        policy: sets the interval between checkpoints.
        work_s: useful work, in seconds.
        costs: of checkpoints and restarts.
        outages: when each failure strikes and how long the job then has no machine, in order of time. One
            that strikes while there is no machine does nothing more.
        mtbf_s: what the policy is told.
        limit_s: a job that is not done by then ends with `done` False: without checkpoints it may never be.

    Raises:
        SimError: the policy asks for what a replay cannot do, or the outages are not in order.

    """
    state = State(work_s=work_s, stall_s=costs.stall_s, mtbf_s=mtbf_s, restart_s=costs.restart_s)
    run = _Run(policy, state, costs, limit_s)
    run.tell("start")
    last = -math.inf
    for at_s, lasting_s in outages:
        if at_s < last:
            raise SimError(
                f"could not replay outages: one at {at_s:g} s follows one at {last:g} s; sort them"
            )
        last = at_s
        if at_s < state.now_s:
            continue
        if _work_until(run, min(at_s, limit_s)):
            return run.ledger
        _fail(run, lasting_s)
        if state.now_s >= limit_s:
            return run.ledger
    _work_until(run, limit_s)
    if not run.ledger.done:
        _fail(run, 0.0)
    return run.ledger


def _fail(run: _Run, lasting_s: float) -> None:
    """Lose what does not count, and wait for a machine."""
    state, ledger = run.state, run.ledger
    run.settle()
    ledger.lost_s += run.worked_s - state.done_s
    ledger.kept_s = state.done_s
    run.worked_s = state.done_s
    run.pending.clear()
    if state.now_s >= run.limit_s:
        return
    ledger.failures += 1
    run.tell("failure")
    waited_s = min(lasting_s, run.limit_s - state.now_s)
    ledger.outage_s += waited_s
    state.now_s += waited_s
    state.starting_s = run.costs.restart_s


def _work_until(run: _Run, end_s: float) -> bool:
    """Restart, work and take checkpoints until `end_s`, when a failure strikes; True once the job is done."""
    state, ledger, costs = run.state, run.ledger, run.costs

    def spend(seconds: float) -> tuple[float, bool]:
        # What ends as the failure strikes has ended.
        room = end_s - state.now_s
        if seconds <= room:
            state.now_s += seconds
            return seconds, True
        state.now_s = end_s
        return room, False

    if state.starting_s:
        spent, whole = spend(state.starting_s)
        ledger.restart_s += spent
        if not whole:
            return False
        state.starting_s = 0.0
        run.tell("restart")
    while True:
        spent, whole = spend(min(run.interval_s, state.work_s - run.worked_s))
        run.worked_s += spent
        if not whole:
            return False
        last = run.worked_s >= state.work_s * (1 - 1e-12)
        if not last or costs.final_checkpoint:
            spent, whole = spend(costs.stall_s + (costs.persist_s if last else 0.0))
            ledger.stall_s += spent
            if not whole:
                return False
            ledger.checkpoints += 1
            if not last:
                run.settle()
                run.pending.append((state.now_s + costs.persist_s, run.worked_s))
                run.settle()
                run.tell("checkpoint", costs.stall_s)
        if last:
            ledger.kept_s = run.worked_s
            ledger.done = True
            return True
