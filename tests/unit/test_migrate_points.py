"""The list of points at which migrations are cut short names what there is: a stale name is cut nowhere."""

from __future__ import annotations

import importlib
from typing import Any, get_args

import pytest

from cluster import messages
from cluster.records import STEPS
from engines.api import Phase, Verdict
from tests.migrate import guests, routed
from tests.migrate.failing import POINT
from tests.migrate.points import ALL, SHORT

WORDS = {*STEPS, *get_args(Verdict), *get_args(Phase), *(one.__name__ for one in get_args(messages.Said))}


POINTS = [*ALL, *guests.POINTS, *routed.POINTS, *routed.BACK]


@pytest.mark.parametrize("point", [point for _, point in POINTS])
def test_a_point_names_what_there_is(point: str) -> None:
    match = POINT.fullmatch(point)
    assert match
    _, module, name, word, _ = match.groups()
    owner: Any = importlib.import_module(module)
    *parents, last = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    assert callable(getattr(owner, last))
    assert last in vars(owner)
    assert word is None or word in WORDS


def test_the_short_list_is_part_of_the_long_one() -> None:
    assert set(SHORT) <= set(ALL)
    assert len(set(ALL)) == len(ALL)
