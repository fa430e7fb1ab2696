"""`torpor restore --network`: a bundle's container gets its address back; a killed call is taken back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from netmig import hold, nft
from netmig.capture import capture
from netmig.identity import diff, global_addresses
from tests.support.containers import SEARCH_PATH, Lab, lab, live, tool, until
from tests.support.network import Echo
from tests.support.segment import Member, Segment, segment
from tests.support.torpor import CONF_VARIABLE, Torpor

pytestmark = pytest.mark.engine

PORT = 7000


class Node:
    """A segment's node with a torpor of its own, a container that sleeps, and a client that waits for it."""

    def __init__(self, place: Lab, made: Segment, path: Path) -> None:
        self.place, self.segment = place, made
        self.torpor = Torpor(path / "torpor")
        self.pods: dict[str, Member] = {"old": made.add("old", 10), "client": made.add("client", 30)}
        self.container_id = place.new_id()
        bundle = self.bundle("old")
        with made.node.inside():
            output = place.runc.run(bundle, self.container_id)
        until(lambda: output.last_tick() > 3, what="it runs")
        self.client = Echo(self.pods["old"].ip4, PORT, self.pods["client"].netns)
        self.call(
            *("checkpoint", self.container_id, "--name", "web", "--root", place.runc.root),
            *("--stop", "--keep-tcp", "--full-copy"),
        )
        made.unplug(self.pods["old"])
        place.runc.delete(self.container_id)

    def bundle(self, pod: str) -> Path:
        return self.place.bundle(pod, live("--port", str(PORT)), netns_path=self.pods[pod].netns.path)

    def call(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run torpor on the node."""
        with self.segment.node.inside():
            return self.torpor(*words, check=check)

    def restore(self, pod: str) -> list[str | Path]:
        where = ("--bundle", self.bundle(pod), "--root", self.place.runc.root)
        return ["restore", "web", *where, "--network", "keep", "--detach", "--use", "clone"]

    def close(self) -> None:
        self.client.close()
        self.place.runc("kill", self.container_id, "KILL", check=False)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    nft.use_program(tool("nft"))
    with segment(tmp_path / "ns") as made, lab(tmp_path / "lab") as place:
        found = Node(place, made, tmp_path)
        yield found
        found.close()
    nft.use_program(None)


def test_a_client_goes_on_with_a_container_in_a_pod_of_another_address(node: Node) -> None:
    new = node.pods["new"] = node.segment.add("new", 11)
    node.call(*node.restore("new"))
    node.client.goes_on()
    now = capture(new.netns, node.segment.node)
    assert [one.ip for one in global_addresses(now)] == ["10.77.0.10", "fd77::a"]
    assert hold.tables(new.netns) == ()
    (line,) = [entry for entry in node.torpor.audit() if entry["event"] == "restore"]
    assert "gave the pod 10.77.0.11" in line["warnings"][0]


def test_a_killed_restore_is_taken_back_and_done_again(node: Node) -> None:
    new = node.pods["new"] = node.segment.add("new", 11)
    before = capture(new.netns, node.segment.node)
    with node.segment.node.inside():
        call = subprocess.Popen(
            [Path(sys.executable).parent / "torpor", *node.restore("new")],
            env={**os.environ, CONF_VARIABLE: str(node.torpor.conf_path), "PATH": SEARCH_PATH},
            stderr=subprocess.DEVNULL,
        )

    def at_work() -> bool:
        """CRIU has begun, in a namespace that has the addresses."""
        assert call.poll() is None, "it was over before it could be killed"
        return bool(list(node.torpor.state_path.glob("containers/*/*/work/restore.log")))

    until(at_work, what="CRIU restores")
    call.send_signal(signal.SIGKILL)
    call.wait()
    until(lambda: not list(node.torpor.state_path.glob("containers/*/*/*-call.json")), what="CRIU is undone")
    assert hold.tables(new.netns), "it is held until somebody looks"
    node.call("net", "recover")
    assert diff(before, capture(new.netns, node.segment.node)) == []
    assert hold.tables(new.netns) == ()
    node.call(*node.restore("new"))
    node.client.goes_on()
    assert hold.tables(new.netns) == ()
