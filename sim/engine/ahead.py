"""How long a gang goes on before anything must be decided."""

from __future__ import annotations

import math

from sim.engine.orders import Orders
from sim.engine.progress import Progress
from sim.engine.schedule import Schedule, Stretch


def ahead(progress: Progress, orders: Orders, left_s: float, *, played: bool) -> tuple[float, Schedule]:
    """How long to go on, and by which schedule.

    Args:
        progress: so far.
        orders: of the policy.
        left_s: work to do.
        played: whether each checkpoint is an event; else they are counted.

    """
    bare = Stretch(progress.since_s)
    if played or clashes(progress, orders):
        # Without any checkpoint: the next one is an event.
        next_s = orders.regime.interval_s - progress.since_s
        until_s, schedule = min(left_s, next_s if next_s > 0 else math.inf), bare
    else:
        schedule = orders.plan().schedule(progress.number, progress.since_s)
        until_s = schedule.finish_s(left_s)
    if not orders.due:
        return until_s, schedule
    due_s = orders.due_in_s
    if orders.due[0].what == "checkpoint" and schedule is not bare:
        # One of the interval that would still be under way then is left out.
        if count := schedule.ended(due_s):
            due_s = min(due_s, schedule.end_s(count))
        else:
            until_s, schedule = left_s, bare
    return min(until_s, due_s), schedule


def clashes(progress: Progress, orders: Orders) -> bool:
    """Whether a checkpoint of the interval would be under way when another one is due."""
    if not orders.due or orders.due[0].what != "checkpoint":
        return False
    return orders.stall_s(progress.number + 1) > orders.due_in_s
