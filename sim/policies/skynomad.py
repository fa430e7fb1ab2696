"""SkyNomad: spot jobs with a deadline over several regions, by what an hour of progress is worth.

NSDI 2027, after its released simulator. At each tick an hour of progress has a value, 1.2 times what the rest
of the work is expected to cost; each region and kind of machine is worth that value over its expected
lifetime, less its price, its restart and the move there. The job goes to the best one, if it is better by a
margin than where the job is.
"""

from __future__ import annotations

from sim.policies.base import Place, Probe, Region, RunOn, State
from sim.policies.lifetimes import Lifetimes
from sim.policies.regions import Regional, Turn

_MARKUP = 1.2
_MARGIN, _MARGIN_GB, _MARGIN_VALUE = 0.5, 0.0002, 0.05
"""Dollars an hour that another place must be better by: at least, for each GB, as a share of the value."""

_PROBE_TICKS = 6
_PACE_S = 10 * 3600.0
"""Over which the pace of progress is taken."""


class SkyNomad(Regional):
    """Values progress by the cost of the rest, and lifetimes by what it has seen of each region."""

    name = "skynomad"

    def __init__(self, most_s: float = 7200.0) -> None:
        super().__init__()
        self._most_h = most_s / 3600
        self._lives: dict[str, Lifetimes] = {}
        self._done_s: list[float] = []  # at the start of each tick
        self._spot = ""  # where it has a spot machine
        self._left = False  # it gave that machine up itself
        self._origin = ""
        self._probing: set[str] = set()
        self._missed: set[str] = set()
        self._due: dict[str, int] = {}

    # What places are worth

    def _lasts_h(self, state: State, region: Region) -> float:
        """Expected lifetime of a spot machine there from now on."""
        lasts_h = min(self._lives[region.name].remaining_h(state.now_s), self._most_h)
        left_h = ((state.deadline_s or 0.0) - state.now_s) / 3600
        return min(lasts_h, left_h) if left_h > 0 else lasts_h

    def _lasts_within_h(self, state: State, region: Region) -> float:
        """The same, within the deadline."""
        return self._lasts_h(state, region)

    def _pace(self, state: State) -> float:
        """Progress a second, lately."""
        if state.now_s < 600:
            return state.done_s / state.now_s if state.now_s > 0 else 0.0
        from_s = max(0.0, state.now_s - _PACE_S)
        first = int(from_s / state.tick_s)
        before_s = self._done_s[first - 1] if first else 0.0
        return max(0.0, min(1.0, (state.done_s - before_s) / (state.now_s - from_s)))

    def _share_on_demand(self, state: State, deadline_s: float) -> float:
        """Share of the time left after which, at this pace, only on demand meets the deadline."""
        now_s, done_s = state.now_s, state.done_s
        if now_s <= 0:
            return 0.0
        if abs(done_s - now_s) < 1e-6:
            return 0.5
        pace = self._pace(state)
        if abs(pace - 1) < 1e-6:
            return 0.0
        spare_s = deadline_s - state.work_s - 2 * state.restart_s
        turn_s = (pace * now_s - done_s - spare_s) / (pace - 1)
        if turn_s >= deadline_s:
            return 0.0
        if turn_s <= 0:
            return 1.0
        return max(0.0, min(1.0, (deadline_s - turn_s) / (deadline_s - now_s)))

    def _value(self, state: State) -> float:
        """Dollars that an hour of progress is worth."""
        deadline_s = state.deadline_s or 0.0
        left_s, time_s = state.work_s - state.done_s, deadline_s - state.now_s
        if time_s <= 0:
            return float("inf")
        on_demand = min(region.on_demand_price for region in state.regions)
        restart_h = state.restart_s / 3600
        offers: list[tuple[float, float]] = []
        for region in state.regions:
            lasts_h = self._lasts_within_h(state, region)
            useful = (lasts_h - restart_h) / lasts_h if lasts_h > restart_h else 0.0
            seconds = self._lives[region.name].availability(state.now_s) * time_s * useful
            if seconds > 0:
                offers.append((region.spot_price / useful, seconds))
        on_demand_s = self._share_on_demand(state, deadline_s) * left_s
        wanted_s = max(0.0, left_s - on_demand_s)
        cost, taken_s, used = on_demand_s / 3600 * on_demand, 0.0, 0
        for price, seconds in sorted(offers, key=lambda offer: offer[0]):
            if taken_s >= wanted_s:
                break
            part_s = min(seconds, wanted_s - taken_s)
            cost += part_s / 3600 * price
            taken_s += part_s
            used += 1
        if taken_s < wanted_s:
            cost += (wanted_s - taken_s) / 3600 * on_demand
            on_demand_s += wanted_s - taken_s
        used += on_demand_s > 0
        cost += max(0, used - 1) * state.move_cost
        return _MARKUP * cost / max(left_s / 3600, 1e-6)

    def _spot_value(self, state: State, region: Region, value: float, *, running: bool) -> float:
        """Dollars an hour gained on a spot machine there."""
        lasts_h = self._lasts_h(state, region)
        useful_h = max(0.0, lasts_h if running else lasts_h - state.restart_s / 3600)
        if useful_h <= 0:
            return -float("inf")
        return (value * useful_h - region.spot_price * lasts_h) / lasts_h

    def _options(
        self, state: State, value: float, here: str, now_worth: float
    ) -> list[tuple[float, Place, str]]:
        """What may be done and its worth, the best first; where the job is, is no option but to stay."""
        origin = here or self._origin
        areas = {region.name: region.area for region in state.regions}
        margin = _MARGIN + _MARGIN_GB * state.state_bytes / 1e9 + _MARGIN_VALUE * value
        found: list[tuple[float, Place, str]] = [(0.0, "none", "")]

        def move(region: Region) -> float:
            return state.move_cost if origin and areas[origin] != region.area else 0.0

        for region in state.regions:
            running = state.place == "spot" and region.name == here
            worth = self._spot_value(state, region, value, running=running)
            worth -= move(region) / max(self._lasts_h(state, region), 1e-6)
            if worth >= 0 and not (here and region.name != here and worth <= now_worth + margin):
                found.append((worth, "spot", region.name))
        for region in state.regions:
            worth = value - region.on_demand_price
            if origin and origin != region.name:
                worth -= state.restart_s / 3600 * value + move(region)
            running = state.place == "on-demand" and region.name == here
            if worth >= 0 and not running and not (here and worth <= now_worth + margin):
                found.append((worth, "on-demand", region.name))
        return sorted(found, key=lambda option: -option[0])

    # What it does

    def _turn(self, state: State) -> Turn:
        for region in state.regions:
            self._lives.setdefault(region.name, Lifetimes(state.tick_s / 3600))
        self._done_s.append(state.done_s)
        here = state.region if state.place != "none" else ""
        if self._spot and not (state.place == "spot" and self._spot == here):
            self._lives[self._spot].end(state.now_s, failed=not self._left)
            self._spot, self._left = "", False
        for life in self._lives.values():
            life.update(state.now_s)
        value, worth = self._value(state), 0.0
        place = state.place
        if here:
            region = next(region for region in state.regions if region.name == here)
            self._origin = here
            worth = (
                self._spot_value(state, region, value, running=True)
                if place == "spot"
                else value - region.on_demand_price
            )
        for option, wanted, name in self._options(state, value, here, worth):
            if option <= worth:
                break
            if (wanted, name) == (place, here):
                continue
            if wanted == "none":
                self._origin = ""
                yield from self._look(state, "")
                return
            if wanted == "spot":
                success = yield from self._try(state, name)
            else:
                success = yield RunOn("on-demand", name)
            if success:
                self._origin = name
                self._left = self._left or (bool(here) and self._spot == here)
                yield from self._look(state, name)
                return
        yield from self._look(state, here)

    def _try(self, state: State, name: str) -> Turn:
        life = self._lives[name]
        if name in self._probing:
            life.end(state.now_s, failed=False)
            self._probing.discard(name)
            life.seen_h = {}
        success = yield RunOn("spot", name)
        if success:
            life.start(state.now_s, "spot")
            self._spot, self._left = name, False
            self._missed.discard(name)
        else:
            self._missed.add(name)
            life.failures += 1
        return success

    def _look(self, state: State, primary: str) -> Turn:
        """At regions nothing is known of; one with capacity is then taken to keep it for its lifetime."""
        tick = round(state.now_s / state.tick_s)
        for region in state.regions:
            name = region.name
            if name == primary or name in self._probing | self._missed or tick < self._due.get(name, 0):
                continue
            life = self._lives[name]
            if (yield Probe(name)):
                life.start(state.now_s, "probe")
                self._probing.add(name)
            else:
                life.failures += 1
            self._due[name] = tick + _PROBE_TICKS
        self._missed.clear()
        return False


class SkyNomadOracle(SkyNomad):
    """SkyNomad that knows how long the capacity of each region lasts, and therefore looks nowhere."""

    name = "skynomad-oracle"
    oracle = True

    def _lasts_h(self, state: State, region: Region) -> float:
        return (region.lasts_s or 0.0) / 3600

    def _lasts_within_h(self, state: State, region: Region) -> float:
        left_h = ((state.deadline_s or 0.0) - state.now_s) / 3600
        return min(self._lasts_h(state, region), left_h) if left_h > 0 else self._lasts_h(state, region)

    def _look(self, state: State, primary: str) -> Turn:
        yield from ()
        return False
