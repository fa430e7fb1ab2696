"""What migrations promise, on two nodes with real containers. Run in a room by
tests/integration/test_migrate.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.migrate.pair import Pair, pair, whole
from tests.netlab.traffic import both_ways

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(tmp_path_factory.mktemp("pair")) as made:
        yield made


def test_there_and_back(place: Pair) -> None:
    pod = place.start("web")
    client = place.client(both_ways(pod.ips, 2))
    one, two = place.agents
    for source, target in ((one, two), (two, one)):
        report = place.migrate(source, target)
        print(report)
        assert place.runs_on() == target.node.name
        client.goes_on()
        assert place.leftovers(target, source) == []
    whole(client.stop())
    assert place.never_twice() == ["node1", "node2", "node1"]
    place.forget()
