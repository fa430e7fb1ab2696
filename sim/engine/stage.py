"""What queues and services are played on: a clock whose events are counted, and what befalls machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import simpy

from sim.engine import hardware
from sim.engine.hardware import Item
from sim.engine.streams import Streams
from sim.maths.laws import Law
from sim.studies.config import Config


class Stage(ABC):
    """Acts at moments. `counts`: by name, what is counted of a replication, and `events` last."""

    def __init__(self, config: Config, streams: Streams, counts: Sequence[str]) -> None:
        self.config, self.streams = config, streams
        self.env = simpy.Environment()
        self.counts = dict.fromkeys((*counts, "events"), 0.0)

    @abstractmethod
    def befall(self, item: Item) -> None:
        """Something happens to machines, or is said of them."""
        ...

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do it in `delay_s`."""

        def fire(_: simpy.Event) -> None:
            self.counts["events"] += 1
            act()

        self.env.timeout(max(0.0, delay_s)).callbacks.append(fire)  # pyright: ignore[reportUnknownMemberType]

    def cost(self, law: Law) -> float:
        """Seconds that something takes this time."""
        return float(law.sample(self.streams.noise, 1)[0])

    def let_happen(self) -> None:
        """Let befall what happens to the machines of this replication, each at its time."""
        self._next(hardware.stream(self.config, self.streams))

    def _next(self, items: Iterator[Item]) -> None:
        item = next(items, None)
        if item is None:
            return

        def come() -> None:
            self.befall(item)
            self._next(items)

        self.at(item.at_s - self.env.now, come)
