"""A job with a deadline on spot and on-demand machines of several regions, tick by tick.

The rules are those of the simulator released with SkyNomad (NSDI 2027), which follow "Can't Be Late". At the
start of a tick the work of the last one is credited and a spot machine whose region has no capacity any more
is gone; then the policy asks for one thing after another. A start costs one restart, also in the same region.
Ticks are paid whole, a look at a region for a minute of spot, and a checkpoint that goes to another area for
its bytes. Nothing done is lost.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from sim.errors import SimError
from sim.policies.asked import ask
from sim.policies.base import Action, Event, Place, Policy, Probe, Region, RunOn, State

PROBE_S = 60.0
MOST_ANSWERS = 10_000
"""Of a policy at one tick: more, and it goes round in circles."""


@dataclass(frozen=True)
class Market:
    """Capacity and prices of a region over time: 1 is available at a tick; dollars an hour."""

    name: str
    available: Sequence[int]
    spot_price: float
    on_demand_price: float

    @property
    def area(self) -> str:
        """The region of a zone: us-east-1 for us-east-1c, us-central1 for us-central1-a."""
        zone = self.name.partition("_")[0]
        found = re.fullmatch(r"(.*\d)-?[a-z]", zone)
        return found[1] if found else zone


@dataclass(frozen=True)
class RegionalJob:
    """A job: times in seconds, the size of its checkpoint, and what it costs to take it to another area."""

    work_s: float
    deadline_s: float
    restart_s: float = 720.0
    tick_s: float = 600.0
    state_bytes: float = 50e9
    move_usd_per_byte: float = 0.02e-9


@dataclass
class RegionalOutcome:
    """What became of a job: dollars and seconds.

    `last_tick_cost`: the part of `cost` that the last tick of the job was; SkyNomad's published figures lack
    it for every policy that chooses among regions. `held`: at each tick, where the job ran.
    """

    done: bool = False
    cost: float = 0.0
    move_cost: float = 0.0
    probe_cost: float = 0.0
    last_tick_cost: float = 0.0
    spot_held_s: float = 0.0
    on_demand_held_s: float = 0.0
    idle_s: float = 0.0
    starting_s: float = 0.0
    spot_work_s: float = 0.0
    on_demand_work_s: float = 0.0
    end_s: float = 0.0
    preemptions: int = 0
    starts: int = 0
    moves: int = 0
    held: list[tuple[Place, str]] = field(default_factory=list[tuple[Place, str]])


class _Game:
    def __init__(self, policy: Policy, job: RegionalJob, markets: Sequence[Market], start: int) -> None:
        self.policy, self.job, self.start = policy, job, start
        self.markets = {market.name: market for market in markets}
        self.out = RegionalOutcome()
        oracle = bool(getattr(policy, "oracle", False))
        self.lasting = {market.name: _lasting(market.available) for market in markets} if oracle else {}
        self.state = State(
            work_s=job.work_s,
            deadline_s=job.deadline_s,
            restart_s=job.restart_s,
            tick_s=job.tick_s,
            state_bytes=job.state_bytes,
            move_cost=job.state_bytes * job.move_usd_per_byte,
        )
        self.state.regions = self.seen(0)
        self.place: Place = "none"
        self.at = ""
        self.moving = False  # a start of this tick that takes the checkpoint along
        self.probed: set[str] = set()

    def has_spot(self, name: str, tick: int) -> bool:
        return bool(self.markets[name].available[self.start + tick])

    def credit(self) -> None:
        """What the last tick came to, and what it cost."""
        job, state, out = self.job, self.state, self.out
        paid = 0.0
        if self.place == "none":
            out.idle_s += job.tick_s
        else:
            market = self.markets[self.at]
            used_s = min(state.starting_s, job.tick_s)
            done_s = min(job.tick_s - used_s, job.work_s - state.done_s)
            state.starting_s -= used_s
            state.done_s += done_s
            out.starting_s += used_s
            if self.moving:
                out.move_cost += state.move_cost
            price = market.spot_price if self.place == "spot" else market.on_demand_price
            paid += price * job.tick_s / 3600
            if self.place == "spot":
                out.spot_held_s += job.tick_s
                out.spot_work_s += done_s
            else:
                out.on_demand_held_s += job.tick_s
                out.on_demand_work_s += done_s
            state.region = self.at
        for name in sorted(self.probed - {self.at if self.place != "none" else ""}):
            cost = self.markets[name].spot_price * PROBE_S / 3600
            out.probe_cost += cost
            paid += cost
        paid += state.move_cost if self.moving else 0.0
        out.cost += paid
        out.last_tick_cost = paid
        self.moving = False
        self.probed.clear()
        out.held.append((self.place, self.at if self.place != "none" else ""))

    def play(self, ticks: int) -> RegionalOutcome:
        for tick in range(ticks + 1):
            self.state.now_s = tick * self.job.tick_s
            if tick:
                self.credit()
            self.out.end_s = self.state.now_s
            if self.state.work_s - self.state.done_s <= 1e-3:
                self.out.done = True
                break
            if tick == ticks:
                break
            if self.place == "spot" and not self.has_spot(self.at, tick):
                self.place = "none"
                self.out.preemptions += 1
            self.tell(tick)
        return self.out

    def tell(self, tick: int) -> None:
        state = self.state
        state.place = self.place
        state.spot = self.has_spot(state.region or next(iter(self.markets)), tick)
        if self.lasting:
            state.regions = self.seen(tick)
        actions = ask(self.policy, state, Event("tick"))
        for turn in itertools.count():
            if not actions:
                return
            if turn == MOST_ANSWERS:
                raise SimError(
                    f"could not run a job with '{self.policy.name}': at one tick it answers {turn} times; "
                    "answer nothing once it is where you want it"
                )
            success = False
            for action in actions:
                success = self.do(action, tick)
            state.place = self.place
            actions = ask(self.policy, state, Event("answer", success=success))

    def seen(self, tick: int) -> tuple[Region, ...]:
        """The regions; to an oracle, with how long their capacity lasts from now on."""
        return tuple(
            Region(
                market.name,
                market.area,
                market.spot_price,
                market.on_demand_price,
                self.lasting[market.name][self.start + tick] * self.job.tick_s if self.lasting else None,
            )
            for market in self.markets.values()
        )

    def do(self, action: Action, tick: int) -> bool:
        match action:
            case Probe(name):
                success = self.has_spot(name, tick)
                if success:
                    self.probed.add(name)
                return success
            case RunOn("none"):
                self.place = "none"
                return True
            case RunOn(place, name):
                name = name or self.state.region or next(iter(self.markets))
                if place == "spot" and not self.has_spot(name, tick):
                    return False
                if (place, name) != (self.place, self.at):
                    self.begin(place, name)
                return True
            case _:
                raise SimError(
                    f"could not run a job with '{self.policy.name}': at a tick it says {action}, not where "
                    "to run"
                )

    def begin(self, place: Place, name: str) -> None:
        home = self.state.region
        self.place, self.at = place, name
        self.probed.discard(name)
        self.state.starting_s = self.job.restart_s
        self.out.starts += 1
        self.moving = bool(home) and self.markets[home].area != self.markets[name].area
        self.out.moves += self.moving


def _lasting(available: Sequence[int]) -> list[int]:
    """For each tick, for how many ticks from there on there is capacity."""
    lasting = [0] * (len(available) + 1)
    for tick in range(len(available) - 1, -1, -1):
        lasting[tick] = lasting[tick + 1] + 1 if available[tick] else 0
    return lasting


def run(policy: Policy, job: RegionalJob, markets: Sequence[Market], start: int = 0) -> RegionalOutcome:
    """Run a job to its end, or to its deadline if it is not done by then.

    Args:
        policy: asked at each tick. One that has `oracle` set is told how long capacity lasts.
        job: the job.
        markets: the regions, in the order in which policies see them.
        start: the tick at which the job is handed in.

    Raises:
        SimError: capacity is not given until the deadline, or the policy's answer is not a place.

    """
    ticks = math.ceil(job.deadline_s / job.tick_s - 1e-9)
    if not markets or any(start + ticks > len(market.available) for market in markets):
        raise SimError(
            f"could not run a job: capacity is not given for {ticks} ticks from tick {start} on; use a "
            "shorter deadline or an earlier start"
        )
    return _Game(policy, job, markets, start).play(ticks)
