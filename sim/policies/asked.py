"""Asking a policy, which may be somebody else's: what it does wrong is said in a sentence."""

from __future__ import annotations

import math
import typing
from typing import Any, cast

from sim.errors import SimError
from sim.policies.base import Action, Checkpoint, Event, Policy, SetInterval, State

_ACTIONS = typing.get_args(Action)


def ask(policy: Policy, state: State, event: Event) -> list[Action]:
    """Tell a policy of an event.

    Raises:
        SimError: the state lacks what it needs, it fails, or what it answers is no list of actions.

    """
    try:
        answer: Any = policy.on_event(state, event)
    except SimError:
        raise
    except (Exception, SystemExit) as error:
        raise _unusable(policy, event, f"raises {type(error).__name__}: {error}") from error
    if not isinstance(answer, list | tuple):
        raise _unusable(policy, event, f"answers {answer!r}, which is no list of actions")
    actions = cast("list[Any]", answer)
    for action in actions:
        if not isinstance(action, _ACTIONS):
            raise _unusable(policy, event, f"answers {action!r}, which is no action")
        if isinstance(action, Checkpoint) and not _is_time(action.delay_s):
            raise _unusable(policy, event, f"asks for a checkpoint in {action.delay_s!r} s")
        if isinstance(action, SetInterval):
            work_s: Any = action.work_s
            if work_s is not None and not (isinstance(work_s, int | float) and work_s > 0):
                raise _unusable(policy, event, f"asks for a checkpoint every {work_s!r} s of work")
    return actions


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def _unusable(policy: Policy, event: Event, why: str) -> SimError:
    name = getattr(policy, "name", type(policy).__name__)
    return SimError(f"could not use policy '{name}': told of '{event.kind}' it {why}; correct the policy")
