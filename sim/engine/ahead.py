"""How long a gang goes on before anything must be decided."""

from __future__ import annotations

import math

from sim.engine.orders import Orders
from sim.engine.progress import Progress
from sim.engine.saves import SAME_S
from sim.engine.schedule import Schedule, Stretch


def ahead(
    progress: Progress, orders: Orders, now_s: float, left_s: float, *, played: bool
) -> tuple[float, Schedule]:
    """How long to go on, and by which schedule.

    Args:
        progress: so far.
        orders: of the policy.
        now_s: the time.
        left_s: work to do.
        played: whether each checkpoint is an event; else they are counted.

    """
    bare = Stretch(progress.since_s)
    if played or clashes(progress, orders):
        # Without any checkpoint: the next one is an event.
        next_s = math.inf if late(progress, orders, now_s) else orders.regime.interval_s - progress.since_s
        # None is taken just as the work is done, whatever the last digit of a sum says.
        until_s, schedule = left_s if left_s <= next_s + SAME_S else next_s, bare
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


def late(progress: Progress, orders: Orders, now_s: float) -> bool:
    """Whether a checkpoint of the interval is due: until it nothing is left that the clock can tell."""
    interval_s = orders.regime.interval_s
    left_s = interval_s - progress.since_s
    return progress.since_s >= interval_s * (1 - 1e-12) or now_s + left_s <= now_s


def clashes(progress: Progress, orders: Orders) -> bool:
    """Whether a checkpoint of the interval would be under way when another one is due."""
    if not orders.due or orders.due[0].what != "checkpoint":
        return False
    return orders.stall_s(progress.number + 1) > orders.due_in_s
