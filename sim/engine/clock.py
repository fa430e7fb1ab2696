"""Simpy's clock, which counts the events that were made: what a replication costs, whatever the machine."""

from __future__ import annotations

from typing import Any

import simpy
from simpy.events import Event, EventPriority

MOST_EVENTS = 2_000_000
"""Events of a replication, beside those that work is worth, after which it is not going to end."""

EVENTS_PER_S = 10.0
"""Events that a second of work is worth: ten years with a checkpoint every few seconds are no livelock."""


class LivelockError(Exception):
    """The work would never end."""


class Clock(simpy.Environment):
    """An environment that counts. `done_s`: the most work that jobs got to, added up by them."""

    def __init__(self) -> None:
        super().__init__()
        self.events = 0
        self.done_s = 0.0

    @property
    def worn_out(self) -> bool:
        """Whether there were more events than a replication that ends would have."""
        return self.events > MOST_EVENTS + EVENTS_PER_S * self.done_s

    def schedule(self, event: Event, priority: EventPriority = EventPriority(1), delay: Any = 0) -> None:  # noqa: B008
        self.events += 1
        super().schedule(event, priority, delay)
