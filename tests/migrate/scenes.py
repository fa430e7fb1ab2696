"""What migrations promise, on two nodes with real containers. Run in a room by
tests/integration/test_migrate.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from tests.migrate.pair import Pair, Pairs, whole
from tests.migrate.points import ALL, SHORT
from tests.netlab.traffic import both_ways
from tests.support.containers import until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    with Pairs(tmp_path_factory.mktemp("pairs")) as made:
        yield made


@pytest.fixture
def place(pairs: Pairs) -> Pair:
    """Two nodes with nothing on them: those of the test before, if it has tidied up."""
    return pairs.fresh()


def test_there_and_back(place: Pair) -> None:
    pod = place.start("web")
    client = place.client(both_ways(pod.ips, 2))
    one, two = place.agents
    for source, target in ((one, two), (two, one)):
        report = place.migrate(source, target)
        print(report)
        place.settles_on(target.node.name)
        client.goes_on()
        assert place.leftovers(target, source) == []
    whole(client.stop())
    assert place.never_twice() == ["node1", "node2", "node1"]
    place.forget()


@pytest.mark.skipif(not os.environ.get("TORPOR_SOAK"), reason="long: see ./run soak")
def test_a_plain_directory_comes_along(place: Pair) -> None:
    pod = place.start("web", plain=True)
    (place.bundles[-1] / "rootfs" / "data" / "note").write_text("kept")
    client = place.client(both_ways(pod.ips, 2))
    one, two = place.agents
    place.migrate(one, two)
    (note,) = two.state_path.glob("arrivals/*/bundle/rootfs/data/note")
    assert note.read_text() == "kept"
    client.goes_on()
    whole(client.stop())
    assert place.leftovers(two, one) == []
    place.forget()


# --- faults --------------------------------------------------------------------------------------------

POINTS = ALL if os.environ.get("TORPOR_SOAK") else SHORT


class Fault:
    """A migration with a fault at one point, on the source or on the target."""

    def __init__(
        self, place: Pair, side: str, point: str, action: Literal["kill", "cut"], path: Path
    ) -> None:
        self.place, self.path = place, path
        self.source, self.target = place.agents
        words = (point, action, path)
        if side == "target":
            self.target.kill()
            self.target.start(words)
        self.migrate = self.source.popen(
            *("migrate", place.container_id, "--to", self.target.node.name),
            *("--root", self.source.node.runc.root),
            fault=words if side == "source" else (),
        )

    def reached(self) -> None:
        """Wait until it is at its point."""

        def there() -> bool:
            over = self.migrate.poll() is not None and not (self.path / "reached").exists()
            assert not over, f"the migration ended before: {self.migrate.communicate()}"
            return (self.path / "reached").exists()

        until(there, timeout_s=60, what="the point is reached")

    def end(self) -> str:
        """Wait for the end of `torpor migrate`; what it said."""
        try:
            _, said = self.migrate.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.migrate.kill()
            raise
        return said

    def healed(self) -> float:
        """From now on all is well: how long it takes until a copy runs, seconds."""
        begun = time.monotonic()
        while not self.place.runs_on(0.05):
            assert time.monotonic() < begun + 30, f"nobody runs: {self.logs()}"
        return time.monotonic() - begun

    def logs(self) -> str:
        """What the agents have said, and what they know."""
        said = [agent.log_path.read_text()[-2000:] for agent in self.place.agents]
        return "; ".join([*said, *(str(agent.records()) for agent in self.place.agents)])


def settled(place: Pair, fault: Fault) -> str:
    """Where it runs, once nothing is under way any more. Fails if anything is left of the other place."""

    def left() -> list[str]:
        where = place.runs_on(0.1)
        home, away = place.agents if where == "node1" else reversed(place.agents)
        return place.leftovers(home, away) if where else ["nobody runs"]

    until(lambda: not left(), timeout_s=30, what=f"nothing is left: {left()}; {fault.logs()}")
    order = place.never_twice()
    assert order in (["node1"], ["node1", "node2"])
    return order[-1]


@pytest.mark.soak
@pytest.mark.parametrize(("side", "point"), POINTS)
def test_a_killed_agent(place: Pair, side: str, point: str, tmp_path: Path) -> None:
    pod = place.start("web")
    client = place.client(both_ways(pod.ips, 2))
    fault = Fault(place, side, point, "kill", tmp_path)
    fault.reached()
    victim = fault.source if side == "source" else fault.target
    victim.kill()
    time.sleep(0.3)
    place.never_twice()
    if side == "source":
        fault.migrate.wait(10)
    victim.start()
    took_s = fault.healed()
    said = fault.end()
    where = settled(place, fault)
    print(f"{side} {point}: runs on {where} after {took_s:.2f} s; {said.strip().splitlines()[-1:]}")
    client.goes_on()
    whole(client.stop())
    place.forget()


def test_somebody_takes_its_id_meanwhile(place: Pair, tmp_path: Path) -> None:
    """The migration is called off, and the container that was not it is left alone."""
    place.start("web")
    fault = Fault(place, "target", "before cluster.records:Record.write=preparing", "cut", tmp_path)
    fault.reached()
    states = [agent.node.runc.root / place.container_id / "state.json" for agent in place.agents]
    states[1].parent.mkdir(parents=True)
    states[1].write_bytes(states[0].read_bytes())
    (tmp_path / "go").touch()
    assert "already; delete that one" in fault.end()
    assert states[1].exists()
    shutil.rmtree(states[1].parent)
    assert settled(place, fault) == "node1"
    place.forget()
    fault.target.kill()
    fault.target.start()


@pytest.mark.soak
@pytest.mark.parametrize(("side", "point"), POINTS[::2] if POINTS is SHORT else POINTS)
def test_a_cut_link(place: Pair, side: str, point: str, tmp_path: Path) -> None:
    pod = place.start("web")
    client = place.client(both_ways(pod.ips, 2))
    fault = Fault(place, side, point, "cut", tmp_path)
    fault.reached()
    place.lab.cut(fault.target.node)
    (tmp_path / "go").touch()
    time.sleep(2.0)
    place.never_twice()
    place.lab.heal(fault.target.node)
    took_s = fault.healed()
    said = fault.end()
    where = settled(place, fault)
    print(f"{side} {point}: runs on {where} after {took_s:.2f} s; {said.strip().splitlines()[-1:]}")
    client.goes_on()
    whole(client.stop())
    place.forget()
    if side == "target":
        fault.target.kill()
        fault.target.start()
