"""What a policy orders when told of events: how checkpoints are taken, what is done at once or later."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sim.engine.clock import Clock
from sim.engine.schedule import Planner, Regime
from sim.engine.terms import Terms, first_state
from sim.errors import SimError
from sim.policies import base
from sim.policies.asked import ask
from sim.policies.base import MEMORY, Action, Event, EventKind, Policy


@dataclass(frozen=True, slots=True)
class Due:
    """Something a policy asked for at a later time."""

    at_s: float
    order: int
    what: Literal["checkpoint", "persisted", "requeue"]
    level: str = ""


class Orders:
    """What a gang's policy has ordered so far.

    Attributes:
        regime: how checkpoints are taken.
        due: what is to be done later, in order of time.
        after: what is to be done after the failure: requeue, spare, replica.

    """

    def __init__(self, clock: Clock, terms: Terms, policy: Policy, rng: np.random.Generator) -> None:
        self.regime = Regime(every=((terms.last, 1),))
        self.due: list[Due] = []
        self.after: set[str] = set()
        self.ignores: frozenset[EventKind] = getattr(policy, "ignores", frozenset())
        self._clock, self._terms, self._policy, self._rng = clock, terms, policy, rng
        self._state = first_state(terms)
        self._planner: Planner | None = None
        self._numbers = itertools.count()

    def plan(self) -> Planner:
        """Makes schedules of the regime."""
        if self._planner is None:
            regime = self.regime
            prices = {name: self._terms.place(name).price(regime.asynchronous) for name, _ in regime.every}
            self._planner = Planner(regime, prices, self._terms.config.costs.increment, self._rng)
        return self._planner

    @property
    def due_in_s(self) -> float:
        """How long until the next thing is due; of something."""
        return self.due[0].at_s - self._clock.now

    def stall_s(self, number: int) -> float:
        """What a checkpoint of this number stalls on average."""
        place = self._terms.place(self.regime.level(number))
        return place.price(self.regime.asynchronous).stall.mean

    def later(
        self, at_s: float, what: Literal["checkpoint", "persisted", "requeue"], level: str = ""
    ) -> None:
        """Do it at that time."""
        self.due.append(Due(at_s, next(self._numbers), what, level))
        self.due.sort(key=lambda due: (due.at_s, due.order))

    def tell(self, event: Event, kept_s: float, risk_s: float, spares: int, *, working: bool) -> list[Action]:
        """Tell the policy, and do what it says as far as that takes no time.

        Args:
            event: what happened.
            kept_s: work that a checkpoint holds.
            risk_s: work that none does.
            spares: machines that stand ready.
            working: whether the gang is at work; else there is nothing to save or to move.

        Raises:
            SimError: it asks for what a training job cannot do.

        """
        if event.kind in self.ignores:
            return []
        state = self._state
        state.now_s, state.done_s, state.risk_s, state.spares = self._clock.now, kept_s, risk_s, spares
        actions = ask(self._policy, state, event)
        saves = [action.delay_s for action in actions if isinstance(action, base.Checkpoint)]
        for action in actions:
            self._act(action, event, max(saves, default=0.0), working)
        return actions

    def _act(self, action: Action, event: Event, saved_in_s: float, working: bool) -> None:
        """Carry out what can be at once; `saved_in_s`: when the last checkpoint beside it begins."""
        now_s = self._clock.now
        match action:
            case base.SetInterval(work_s):
                self._change(replace(self.regime, interval_s=math.inf if work_s is None else work_s))
            case base.SetMode(asynchronous, full_every):
                self._change(replace(self.regime, asynchronous=asynchronous, full_every=full_every))
            case base.SetLevels(every):
                self._set_levels(every)
            case base.KeepReplica(copies):
                if self._terms.config.costs.replica_stall is None:
                    raise self.refused("copies in memory, for which costs.replica_stall says no time")
                self._change(replace(self.regime, copies=copies, every=((MEMORY, 1),)))
            case base.Checkpoint(level, delay_s):
                if level and level != MEMORY and level not in self._terms.places:
                    raise self.refused(f"a checkpoint at level '{level}', which is no storage")
                if working:
                    self.later(now_s + delay_s, "checkpoint", level)
            case base.Requeue():
                if event.kind == "failure":
                    self.after |= {"requeue"}
                elif working:
                    self.later(now_s + saved_in_s, "requeue")
            case base.UseSpare():
                self.after |= {"spare"}
            case base.SaveFromReplica():
                if event.replica:
                    self.after |= {"replica"}
            case base.Migrate():
                pass  # whoever told the policy moves, as that takes time
            case _:
                raise self.refused(f"{action}, which no training job can do")

    def _set_levels(self, every: tuple[tuple[str, int], ...]) -> None:
        known = [*self._terms.places, *([MEMORY] if self.regime.copies else [])]
        for name, count in every:
            if name not in known or count < 1:
                raise self.refused(
                    f"one checkpoint in {count} at level '{name}'; there are {', '.join(known)}"
                )
        if not every or every[0][1] != 1:
            raise self.refused("levels of which the first does not get each checkpoint")
        self._change(replace(self.regime, every=every))

    def _change(self, regime: Regime) -> None:
        if regime != self.regime:
            self.regime, self._planner = regime, None

    def refused(self, what: str) -> SimError:
        """The error of a policy that asks for what is not to be had."""
        return SimError(f"could not use policy '{self._policy.name}': it asks for {what}; use another one")
