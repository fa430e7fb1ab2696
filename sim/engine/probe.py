"""What the policy of a cell would do: its answers to the start of a job and to what may happen after it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from sim.engine.terms import first_state, terms
from sim.errors import SimError
from sim.policies import registry
from sim.policies.asked import ask
from sim.policies.base import Event, Policy, SetInterval, SetLevels, SetMode, State
from sim.studies.config import Training
from sim.studies.study import Cell

TRIGGERS: dict[str, Event] = {
    "maintenance": Event("notice", cause="maintenance", lead_s=1800),
    "spot": Event("notice", cause="spot", lead_s=120),
    "prediction": Event("prediction", lead_s=600),
    "failure": Event("failure", cause="node", replica=True),
}
"""What may happen besides checkpoints, as a policy is told of it."""


@dataclass(frozen=True)
class Opening:
    """What a policy sets at the start of a training job, and the names of its actions on what may happen.

    `plain`: each checkpoint is a whole one, and work stands still while it is written.
    """

    interval_s: float | None = None
    plain: bool = True
    levels: tuple[tuple[str, int], ...] = ()
    triggers: dict[str, list[str]] = field(default_factory=dict[str, list[str]])


def opening(cell: Cell) -> Opening:
    """Ask the policy of a cell, as the engine does at its beginning; nothing for other work than training."""
    config = cell.config
    if not isinstance(config.workload, Training):
        return Opening()
    policy = registry.make(config.policy.name, config.policy.options)
    state = first_state(terms(config, config.workload))
    try:
        actions = ask(policy, state, Event("start"))
    except SimError:
        # The engine will say it, with the cell's name.
        return Opening()
    interval_s: float | None = None
    levels: tuple[tuple[str, int], ...] = ()
    plain = True
    for action in actions:
        if isinstance(action, SetInterval):
            interval_s = action.work_s
        elif isinstance(action, SetLevels):
            levels = action.every
        elif isinstance(action, SetMode):
            plain = action == SetMode()
    return Opening(interval_s, plain, levels, _triggers(policy, state))


def _triggers(policy: Policy, state: State) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, event in TRIGGERS.items():
        later = copy.deepcopy(state)
        later.now_s, later.risk_s = 7200.0, 600.0
        try:
            # A copy: what it is told here has not happened.
            actions = ask(copy.deepcopy(policy), later, event)
        except SimError:
            continue
        if names := [type(action).__name__ for action in actions if not isinstance(action, SetInterval)]:
            found[name] = names
    return found
