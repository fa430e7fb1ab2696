"""The link is down between `prepared` and the decision: nobody runs, until somebody decides or it is back."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.channel import SILENCE_S
from cluster.records import Record
from shim.state import make_private
from tests.migrate.pair import Pair, Pairs, whole
from tests.migrate.scenes import Fault, settled
from tests.netlab.traffic import Client, both_ways
from tests.support.containers import until

pytestmark = pytest.mark.engine

long = pytest.mark.skipif(not os.environ.get("TORPOR_SOAK"), reason="long: see ./run soak")
IN_DOUBT = "after cluster.records:Record.write=prepared"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    with Pairs(tmp_path_factory.mktemp("pairs")) as made:
        yield made


class Doubt:
    """A migration in doubt: the target is prepared and cannot be reached."""

    def __init__(self, place: Pair, path: Path, *, later: bool = False) -> None:
        self.place = place
        pod = place.start("web")
        self.client: Client = place.client(both_ways(pod.ips, 2))
        self.fault = Fault(place, "target", IN_DOUBT, "cut", path)
        self.fault.reached()
        place.lab.cut(place.agents[1].node)
        (path / "go").touch()
        (self.row,) = place.agents[0].records()
        if later:  # the source has given the connection up: what still is in it will not be heard
            time.sleep(SILENCE_S + 1)
        until(lambda: place.agents[1].records()[0]["state"] == "in doubt", what="the target is prepared")

    def nobody_runs(self) -> None:
        assert self.place.runs_on(0.5) == ""

    def cannot_be_deleted(self) -> None:
        """Not even by force: it may be that it must run on."""
        agent = self.place.agents[0]
        done = agent.node(
            *(agent.node.torpor.runtime, "--root", agent.node.runc.root),
            *("delete", "--force", self.place.container_id),
            env=agent.environment,
            check=False,
        )
        assert done.returncode == 1
        assert "decide with torpor migrate --resolve" in done.stderr
        assert self.place.status(agent)

    def lets_nobody_start_it(self) -> None:
        """Not by the runtime's own verbs either, on both nodes."""
        for number, verb in ((1, "start"), (1, "resume"), (0, "resume")):
            agent = self.place.agents[number]
            done = agent.node(
                *(agent.node.torpor.runtime, "--root", agent.node.runc.root, verb, self.place.container_id),
                env=agent.environment,
                check=False,
            )
            assert done.returncode == 1
            assert "decide with torpor migrate --resolve" in done.stderr

    def resolve(self, node: int, answer: str) -> str:
        return self.place.agents[node]("migrate", "--resolve", answer, self.row["migration"]).stdout

    def runs_on(self, node: str) -> None:
        until(lambda: self.place.runs_on(0.1) == node, timeout_s=20, what=f"it runs on {node}")

    def end(self, *where: str) -> None:
        """The link comes back: one copy, at one of these, and the client has lost nothing.

        The target's agent may just be looking at its record when the source asks.
        """
        record = Record(self.place.agents[1].state_path / "arrivals", self.row["migration"])
        with record.locked(wait=True) if record.exists() else contextlib.nullcontext():
            self.place.lab.heal(self.place.agents[1].node)
            time.sleep(1.0)
        took_s = self.fault.healed()
        said = self.fault.end()
        found = settled(self.place, self.fault)
        assert found in where
        print(f"runs on {found} {took_s:.2f} s after the link is back; {said.strip().splitlines()[-1:]}")
        self.client.goes_on()
        whole(self.client.stop())
        self.place.forget()
        self.fault.target.kill()
        self.fault.target.start()


@long
def test_it_waits_for_the_link(pairs: Pairs, tmp_path: Path) -> None:
    doubt = Doubt(pairs.fresh(), tmp_path)
    doubt.nobody_runs()
    doubt.end("node2")


@pytest.mark.parametrize(
    ("node", "answer"),
    [
        pytest.param(0, "source", marks=long),
        pytest.param(0, "target", marks=long),
        (1, "source"),
        pytest.param(1, "target", marks=long),
    ],
)
def test_an_operator_decides(pairs: Pairs, tmp_path: Path, node: int, answer: str) -> None:
    doubt = Doubt(pairs.fresh(), tmp_path, later=True)
    doubt.lets_nobody_start_it()
    doubt.nobody_runs()
    doubt.resolve(node, answer)
    if (node, answer) == (0, "source"):
        doubt.runs_on("node1")
    elif (node, answer) == (1, "target"):
        doubt.runs_on("node2")
    else:
        doubt.nobody_runs()  # who was asked does not run it, and the other has yet to hear
    doubt.end("node1" if answer == "source" else "node2")


@long
@pytest.mark.parametrize("node", [0, 1], ids=["asked-source", "asked-target"])
@pytest.mark.parametrize("answer", ["source", "target"])
def test_an_operator_decides_early(pairs: Pairs, tmp_path: Path, node: int, answer: str) -> None:
    """The target's promise is still under way to the source, which may decide by it: one decision holds."""
    doubt = Doubt(pairs.fresh(), tmp_path)
    doubt.nobody_runs()
    doubt.resolve(node, answer)
    doubt.end(*(("node1", "node2") if answer == "source" else ("node2",)))


@pytest.mark.parametrize("answer", [pytest.param("source", marks=long), "target"])
def test_the_source_died_in_doubt(pairs: Pairs, tmp_path: Path, answer: str) -> None:
    place = pairs.fresh()
    doubt = Doubt(place, tmp_path)
    doubt.cannot_be_deleted()
    assert doubt.fault.migrate.poll() is None
    doubt.fault.migrate.kill()
    place.agents[0].kill()
    place.agents[0].start()
    time.sleep(1.0)
    doubt.nobody_runs()
    doubt.cannot_be_deleted()
    doubt.resolve(0, answer)
    doubt.end("node1" if answer == "source" else "node2")


@long
def test_what_the_source_called_off_may_leave_for_another_node(pairs: Pairs, tmp_path: Path) -> None:
    """Also while the first node, which may hold it, cannot hear that."""
    place = pairs.fresh()
    one = place.agents[0]
    doubt = Doubt(place, tmp_path)
    doubt.fault.migrate.kill()
    doubt.resolve(0, "source")
    doubt.runs_on("node1")
    until(lambda: one.records()[0]["state"] == "staying", what="it is called off")
    words = ("migrate", place.container_id, "--to", "node2", "--root", one.node.runc.root, "--dry-run")
    told = one(*words, check=False).stderr
    assert "is under way" not in told
    assert "could not reach node 'node2'" in told
    doubt.end("node1")


@long
def test_the_image_of_one_that_left_for_a_node_which_never_returns(pairs: Pairs, tmp_path: Path) -> None:
    """As README says."""
    place = pairs.fresh()
    one, two = place.agents
    doubt = Doubt(place, tmp_path)
    two.kill()
    doubt.fault.migrate.kill()
    doubt.resolve(0, "target")
    until(lambda: one.records()[0]["state"] == "leaving", what="it is decided")
    departure = one.state_path / "departures" / doubt.row["migration"]
    images = one.node.torpor.store_path / "images" / "_"
    make_private(images)
    (departure / "image").rename(images / "web")
    shutil.rmtree(departure)
    runtime = (one.node.torpor.runtime, "--root", one.node.runc.root)
    one.node(*runtime, "delete", "--force", place.container_id, env=one.environment)
    words = ("restore", "web", "--bundle", place.bundles[-1], "--root", one.node.runc.root)
    one(*words, "--detach", "--log", tmp_path / "output.log")
    doubt.runs_on("node1")
    assert one.records() == []


@long
def test_it_is_not_decided_after_the_engines_deadline(pairs: Pairs, tmp_path: Path) -> None:
    """The engine's guardian lets the source run on while its image still travels: then it may not leave."""
    place = pairs.fresh()
    settings = place.agents[0].node.torpor.path / "config.toml"
    settings.write_text("checkpoint_timeout_s = 3.0\n")
    pod = place.start("web")
    client = place.client(both_ways(pod.ips, 2))
    fault = Fault(place, "source", "after cluster.cargo:send_rest", "cut", tmp_path)
    fault.reached()
    until(lambda: place.runs_on(0.2), timeout_s=30, what="the guardian lets it run on")
    (tmp_path / "go").touch()
    assert "checkpoint_timeout_s" in fault.end()
    assert settled(place, fault) == "node1"
    settings.unlink()
    client.goes_on()
    whole(client.stop())
    place.forget()


def test_what_is_not_in_doubt_is_not_resolved(pairs: Pairs) -> None:
    one = pairs.fresh().agents[0]
    done = one("migrate", "--resolve", "source", "0" * 16, check=False)
    assert "this node knows none of this name" in done.stderr
    done = one("migrate", "--resolve", "source", "../../etc", check=False)
    assert "a name has sixteen hex digits" in done.stderr
