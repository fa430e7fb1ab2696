"""Uniform Progress for a job with a deadline that may run in several regions.

The policies that SkyNomad (NSDI 2027) is compared with, after its released simulator. They differ in the
order in which they try regions for spot capacity. At each tick they may ask for several things, one after the
other: each is an action whose `answer` decides on the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Generator, Iterable

from sim.errors import SimError
from sim.policies.base import Action, Event, Place, Probe, Region, RunOn, State
from sim.policies.spot import room_s, ticks_s

Turn = Generator[Action, bool, bool | None]
"""What a policy does at a tick: it yields an action and is sent whether that was to be had."""


class Regional(ABC):
    """Asks for one thing after another, until only a machine that nobody takes away meets the deadline.

    From then on it stays on demand, where it is, or where the rest of the work costs least.
    """

    name: str
    regional = True
    """It chooses among regions, and is not to be confined to one."""

    def __init__(self) -> None:
        self._late = False
        self._asking: Turn | None = None

    @abstractmethod
    def _turn(self, state: State) -> Turn: ...

    def on_event(self, state: State, event: Event) -> list[Action]:
        if event.kind == "answer":
            return self._next(event.success) if self._asking else []
        if event.kind != "tick":
            return []
        if not state.regions:
            raise SimError(f"could not use policy '{self.name}': it needs regions to choose from; give some")
        needed_s = ticks_s(state, state.work_s - state.done_s + state.restart_s)
        if not self._late and needed_s < room_s(state):
            self._asking = self._turn(state)
            return self._next(None)
        begins, self._late = not self._late, True
        if state.place == "none":
            return [RunOn("on-demand", self._cheapest(state))]
        return [RunOn("on-demand", state.region)] if begins and state.place == "spot" else []

    def _next(self, answer: bool | None) -> list[Action]:
        assert self._asking is not None
        try:
            # A generator takes None first, and answers from then on.
            return [next(self._asking) if answer is None else self._asking.send(answer)]
        except StopIteration:
            self._asking = None
            return []

    def _cheapest(self, state: State) -> str:
        """The region where the rest of the work costs least on demand, with the move there."""
        left_h = (state.work_s - state.done_s) / 3600
        area = next((region.area for region in state.regions if region.name == state.region), None)

        def cost(region: Region) -> float:
            return region.on_demand_price * left_h + (
                state.move_cost if area not in (None, region.area) else 0
            )

        return min(state.regions, key=cost).name


class _Uniform(Regional):
    """Uniform Progress: spot where there is any, on demand where the job is behind a straight line."""

    def __init__(self) -> None:
        super().__init__()
        self._hopeful = False  # left on demand only to look for spot capacity

    def _want(self, state: State, place: Place, spot: bool) -> Place:
        if state.deadline_s is None:
            raise SimError(f"could not use policy '{self.name}': the job has no deadline; give it one")
        pace = state.work_s / state.deadline_s
        behind = state.done_s - state.now_s * pace < 0
        ahead = (state.now_s + 2 * state.restart_s) * pace - state.done_s < 0
        left_s, room = state.work_s - state.done_s, room_s(state)
        self._hopeful = False
        want: Place = "spot" if spot else ("on-demand" if behind else "none")
        if place == "on-demand" and not (spot and ahead):
            want = "on-demand"
        if ticks_s(state, left_s + 2 * state.restart_s) > room and place != "spot":
            want = "on-demand"
        if ticks_s(state, left_s + state.restart_s) >= room:
            want = "spot" if place == "spot" and state.starting_s < 1e-3 else "on-demand"
        if place == "on-demand" and spot and want == "on-demand" and ahead:
            want, self._hopeful = "spot", True
        return want

    def _fall_back(self, state: State, region: str) -> Turn:
        """No region has spot capacity: on demand if the job must, nothing if it may wait."""
        if self._want(state, "none", spot=False) == "on-demand":
            yield RunOn("on-demand", region)


def _home(state: State) -> str:
    """Where the job's state is, or the first region."""
    return state.region or state.regions[0].name


class Failover(_Uniform):
    """Uniform Progress that tries the cheapest region first, and last the area it was taken from."""

    name = "up-failover"

    def __init__(self) -> None:
        super().__init__()
        self._left = ""

    def _order(self, state: State) -> Iterable[Region]:
        cheapest = sorted(state.regions, key=lambda region: region.spot_price)
        areas = {region.name: region.area for region in state.regions}
        return sorted(cheapest, key=lambda region: region.area == areas.get(self._left))

    def _turn(self, state: State) -> Turn:
        place = state.place
        if place != "none":
            self._left = state.region
        want = self._want(state, place, spot=True)
        if want == place:
            return
        if place != "none":
            yield RunOn("none")
        if want == "spot":
            for region in self._order(state):
                if (yield RunOn("spot", region.name)):
                    return
            if not self._hopeful:
                yield from self._fall_back(state, _home(state))
        else:
            yield RunOn("on-demand", _home(state))


class _Probing(_Uniform):
    """Uniform Progress that scores each region by launches and probes, and goes to the best one."""

    def __init__(self, probe_s: float) -> None:
        super().__init__()
        if not probe_s > 0:
            raise SimError(f"could not make policy '{self.name}': probe is {probe_s:g}; it must be above 0")
        self._probe_s = probe_s
        self._main = ""
        self._due: defaultdict[str, int] = defaultdict(int)
        """The tick from which on a region is to be looked at again."""

    @abstractmethod
    def _record(self, region: str, success: bool) -> None: ...

    @abstractmethod
    def _score(self, region: Region) -> float: ...

    @abstractmethod
    def _good_enough(self, current: float, best: float) -> bool: ...

    @abstractmethod
    def _heartbeat(self, tick: int, every: int) -> None:
        """Count a region that the job runs in as one that has capacity, now and then."""
        ...

    @abstractmethod
    def _launched(self, region: str, next_tick: int) -> None: ...

    @abstractmethod
    def _look(self, state: State, tick: int, every: int) -> Turn: ...

    @abstractmethod
    def _refuge(self, state: State) -> str:
        """The region to run in on demand when none has spot capacity."""
        ...

    def _turn(self, state: State) -> Turn:
        tick = round(state.now_s / state.tick_s)
        every = max(1, round(self._probe_s / state.tick_s))
        if self._main and not (state.place == "spot" and state.region == self._main):
            self._record(self._main, success=False)
            self._main = ""
        if state.place == "spot" and not self._main:
            self._main = state.region
        self._heartbeat(tick, every)
        place = state.place
        want = self._want(state, place, spot=True)
        if want == "on-demand":
            if place != "on-demand":
                yield RunOn("on-demand", state.region if place != "none" else self._refuge(state))
                self._main = ""
            return
        ranked = sorted(state.regions, key=lambda region: -self._score(region))
        if place == "spot":
            current = next(region for region in ranked if region.name == state.region)
            if not (current is ranked[0] or self._good_enough(self._score(current), self._score(ranked[0]))):
                place = "none"
        if place != "spot":
            if state.place != "none":
                yield RunOn("none")
                self._main = ""
            for region in ranked:
                success = yield RunOn("spot", region.name)
                self._record(region.name, success)
                if success:
                    self._main = region.name
                    self._launched(region.name, tick + every)
                    break
            else:
                if not (self._waits and self._hopeful):
                    yield from self._fall_back(state, self._refuge(state))
                if self._waits:
                    return
        yield from self._look(state, tick, every)

    _waits = True
    """Without spot capacity anywhere it looks no further, nor goes back on demand that it left for a look."""


class Availability(_Probing):
    """Uniform Progress in the region where the last `window` looks found spot capacity most often."""

    name = "up-availability"

    def __init__(self, probe_s: float = 7200.0, window: int = 5) -> None:
        super().__init__(probe_s)
        self._window = window
        self._seen: dict[str, deque[bool]] = {}
        self._beat: defaultdict[str, int] = defaultdict(int)

    def _record(self, region: str, success: bool) -> None:
        self._seen.setdefault(region, deque(maxlen=self._window)).append(success)

    def _score(self, region: Region) -> float:
        seen = self._seen.get(region.name)
        return sum(seen) / len(seen) if seen else 0.5

    def _good_enough(self, current: float, best: float) -> bool:
        return current >= best - 1e-6

    def _heartbeat(self, tick: int, every: int) -> None:
        if self._main and tick >= self._beat[self._main]:
            self._record(self._main, success=True)
            self._beat[self._main] = tick + every

    def _launched(self, region: str, next_tick: int) -> None:
        self._beat[region] = next_tick

    def _refuge(self, state: State) -> str:
        return _home(state)

    def _look(self, state: State, tick: int, every: int) -> Turn:
        """At one region: the one that was looked at least."""
        names = [region.name for region in state.regions if region.name != self._main]
        due = [name for name in names if tick >= self._due[name]]
        if due:
            name = min(due, key=lambda name: len(self._seen.get(name, ())))
            self._record(name, (yield Probe(name)))
            self._due[name] = tick + every


class AvailabilityPrice(_Probing):
    """Uniform Progress in the region with the best share of good looks for its spot price."""

    name = "up-availability-price"
    _waits = False

    def __init__(self, probe_s: float = 3600.0) -> None:
        super().__init__(probe_s)
        self._looks: defaultdict[str, int] = defaultdict(int)
        self._good: defaultdict[str, int] = defaultdict(int)

    def _record(self, region: str, success: bool) -> None:
        self._looks[region] += 1
        self._good[region] += success

    def _score(self, region: Region) -> float:
        looks = self._looks[region.name]
        return (self._good[region.name] / looks if looks else 0.5) / region.spot_price

    def _good_enough(self, current: float, best: float) -> bool:
        return current >= best * 0.9

    def _heartbeat(self, tick: int, every: int) -> None:
        if self._main and tick >= self._due[self._main]:
            self._record(self._main, success=True)
            self._due[self._main] = tick + every

    def _launched(self, region: str, next_tick: int) -> None:
        self._due[region] = next_tick

    def _refuge(self, state: State) -> str:
        return state.regions[0].name

    def _look(self, state: State, tick: int, every: int) -> Turn:
        """At every region whose turn it is."""
        for region in state.regions:
            if region.name != self._main and tick >= self._due[region.name]:
                self._record(region.name, (yield Probe(region.name)))
                self._due[region.name] = tick + every
