"""What policies share that add something to another one, which chooses the interval."""

from __future__ import annotations

from sim.errors import SimError
from sim.policies.asked import ask
from sim.policies.base import Action, Event, EventKind, Policy, State
from sim.policies.interval import Daly, Periodic


class Around:
    """Does what `base` does, and more. `interval_s` without a base: periodic; neither: Daly's higher one."""

    name: str

    def __init__(self, base: Policy | None = None, interval_s: float | None = None) -> None:
        if base is not None and interval_s is not None:
            raise SimError(
                f"could not make policy '{self.name}': it has both a base and an interval; give one of them"
            )
        self._base: Policy = base or (Daly() if interval_s is None else Periodic(interval_s))

    @property
    def ignores(self) -> frozenset[EventKind]:
        """What the base ignores of checkpoints: nothing is added on them."""
        return getattr(self._base, "ignores", frozenset[EventKind]())

    def on_event(self, state: State, event: Event) -> list[Action]:
        return [*ask(self._base, state, event), *self._more(state, event)]

    def _more(self, state: State, event: Event) -> list[Action]:
        raise NotImplementedError


_KEYS = {
    "the MTBF": "failures",
    "the cost of a checkpoint": "storage or costs.stall",
    "the stall of a checkpoint that is written later": "costs.async_stall",
    "the stall of a copy into another machine's memory": "costs.replica_stall",
}
"""Where a study says what a policy needs to know."""


def known(policy: str, what: str, value: float | None) -> float:
    """The value, if anybody knows it. `what`: one of `_KEYS`.

    Raises:
        SimError: nobody does.

    """
    if value is None:
        raise SimError(f"could not use policy '{policy}': {what} is not known; give a study {_KEYS[what]}")
    return value


def above_0(policy: str, **values: float | None) -> None:
    """Check options that must be above 0 where they are given.

    Raises:
        SimError: one is not.

    """
    for name, value in values.items():
        if value is not None and not value > 0:
            raise SimError(f"could not make policy '{policy}': {name} is {value:g}; it must be above 0")
