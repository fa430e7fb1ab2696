"""Who is behind the best: equal policies are no oftener than the confidence says; unequal ones are found."""

from __future__ import annotations

import math
import random

import pytest

from sim.results import judge
from sim.results.tables import Cell, Results


def group(values: list[list[float]]) -> judge.Group:
    cells = [
        Cell(f"p{number}", f"p{number}", {"policy": f"p{number}"}, values={"ettr": each})
        for number, each in enumerate(values)
    ]
    (found,) = judge.groups(Results("x", "", "", 0, "training", "", cells))
    return found


@pytest.mark.parametrize("policies", [2, 12])
def test_equal_policies_are_behind_in_a_twentieth_of_groups_at_most(policies: int) -> None:
    rng, rounds, behind = random.Random(policies), 400, 0
    for _ in range(rounds):
        # What all of them met, and what each made of it.
        common = [rng.gauss(0.9, 0.02) for _ in range(20)]
        found = group([[each + rng.gauss(0, 0.01) for each in common] for _ in range(policies)])
        behind += not all(one.tied for one in found.ranked[1:])
    assert behind / rounds < 0.05 + 3 * math.sqrt(0.05 * 0.95 / rounds)


def test_a_policy_that_is_worse_is_behind_among_many_and_its_interval_says_so() -> None:
    rng = random.Random(7)
    common = [rng.gauss(0.9, 0.02) for _ in range(40)]
    worse = [0.0] * 11 + [0.02]
    found = group([[each - loss + rng.gauss(0, 0.01) for each in common] for loss in worse])
    last = found.ranked[-1]
    assert last.name == "p11" and not last.tied
    assert last.behind is not None and last.behind.p < 0.05
    assert last.behind.mean - last.behind.ci95 < 0.02 < last.behind.mean + last.behind.ci95
