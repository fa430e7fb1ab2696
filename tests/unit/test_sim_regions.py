"""A job over regions comes to the same bytes whatever the hash seed of the process."""

from __future__ import annotations

from sim.models import regions
from sim.policies.base import Action, Event, Probe, State


class Name(str):
    """A text whose place in a set is its number."""

    __slots__ = ("number",)
    number: int

    def __hash__(self) -> int:
        return self.number


class Curious:
    """Looks at every region and runs nowhere."""

    name = "curious"

    def __init__(self, names: list[Name]) -> None:
        self.names = names

    def on_event(self, state: State, event: Event) -> list[Action]:
        return [Probe(name) for name in self.names] if event.kind == "tick" else []


def looked(numbers: tuple[int, ...]) -> float:
    names = [Name(letter) for letter in "abc"]
    for name, number in zip(names, numbers, strict=True):
        name.number = number
    markets = [
        regions.Market(name, [1] * 20, price * 60, 9.0)
        for name, price in zip(names, (0.1, 0.2, 0.3), strict=True)
    ]
    return regions.run(Curious(names), regions.RegionalJob(600.0, 1800.0), markets).probe_cost


def test_looks_are_paid_in_the_same_order_whatever_a_set_has_them_in() -> None:
    assert looked((0, 1, 2)) == looked((2, 1, 0)) == looked((1, 2, 0))
