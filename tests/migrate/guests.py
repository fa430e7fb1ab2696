"""A container in a pod of containerd migrates into a pod that another node's containerd makes for it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from tests.migrate.pair import Pair, Pairs, whole
from tests.netlab.kubelet import NodeContainerd, addresses
from tests.netlab.traffic import both_ways
from tests.support import leaks
from tests.support.containerd import Handler
from tests.support.containers import command, processes_with, there, tool, until
from tests.support.cri import Container, Cri, Mount, Pod

pytestmark = pytest.mark.engine

SOAK = bool(os.environ.get("TORPOR_SOAK"))
NAME = "web"
NOTES = {"torpor.dev/restore-from": NAME, "torpor.dev/network": "keep"}
ARGV = ("/beats", "/server", "1")


class Kubelets:
    """A pair of nodes, each with a containerd of its own, and a pod on the first."""

    def __init__(self, place: Pair) -> None:
        self.place = place
        os.environ[leaks.TAG_VARIABLE] = place.lab.tag
        self.daemons: list[NodeContainerd] = []
        self.cris: list[Cri] = []
        for number, agent in enumerate(place.agents):
            handlers = {"torpor": Handler(binary=agent.node.torpor.runtime)}
            daemon = NodeContainerd(Path(f"/run/k{number}"), agent.node, handlers)
            self.daemons.append(daemon)
            daemon.image("pause")
            daemon.image("busybox")
            self.cris.append(Cri(daemon.socket, agent.node.path / "kubelet", place.lab.tag))
        beats = place.path / "beats"
        command("gcc", "-O2", "-static", "-o", beats, Path(__file__).with_name("beats.c"))
        self.mounts = [
            Mount(container_path="/server", host_path=place.lower / "server", readonly=True),
            Mount(container_path="/beats", host_path=beats, readonly=True),
            Mount(container_path="/shared", host_path=place.shared),
        ]

    def run(self, pod: Pod, *, attempt: int = 0) -> Container:
        """What a kubelet does for the pod's container. Raises grpc.RpcError."""
        image = self.daemons[self.cris.index(pod.cri)].image("busybox")
        return pod.run("main", ARGV, image=image, mounts=self.mounts, attempt=attempt)

    def migrate(self, container: Container, fault: Sequence[str | Path] = ()) -> subprocess.Popen[str]:
        """`torpor migrate` of a container of the first node, which waits for its pod when this returns."""
        source, target = self.place.agents
        began = source.popen(
            *("migrate", container.id, "--to", target.node.name, "--as", NAME),
            *("--root", self.daemons[0].runc_root / "k8s.io"),
            fault=fault,
        )
        until(
            lambda: self.promise.exists() or began.poll() is not None, timeout_s=30, what="it waits for a pod"
        )
        return began

    @property
    def promise(self) -> Path:
        return self.place.agents[1].node.torpor.store_path / "promised" / "default" / NAME / "plan.json"

    def nothing_is_left(self) -> list[str]:
        """What is left of migrations, in words."""
        left: list[str] = []
        for agent in self.place.agents:
            torpor = agent.node.torpor
            for where in ("departures/*", "arrivals/*"):
                left += map(str, there(agent.state_path, where))
            for where in ("promised/*/*", "images/*/*", "staging/*"):
                left += map(str, there(torpor.store_path, where))
            for where in ("net/journal/*", "net/hold/*"):
                left += map(str, there(torpor.state_path, where))
        return left

    def residue(self, pod: Pod) -> list[str]:
        """What a migration that was called off has left in the pod that was made for it, in words."""
        words = ("nsenter", f"--net=/proc/{pod.pid}/ns/net")
        shown = command(*words, "ip", "-o", "address", "show", "dev", "eth0", "scope", "global").stdout
        left = [line for line in shown.splitlines() if not any(ip in line for ip in addresses(pod))]
        return left + command(*words, tool("nft"), "list", "tables").stdout.splitlines()

    def close(self) -> None:
        for cri in self.cris:
            cri.close()
        for daemon in self.daemons:
            daemon.close()


class Kubelet:
    """Makes the container of a pod again and again, until it runs."""

    def __init__(self, kubelets: Kubelets, pod: Pod) -> None:
        self.kubelets, self.pod = kubelets, pod
        self.said: list[str] = []
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._go)
        self._thread.start()

    def _go(self) -> None:
        attempt = 0
        while not self._enough.wait(0.1 if attempt else 0.0):
            try:
                self.kubelets.run(self.pod, attempt=attempt)
            except grpc.RpcError as error:
                self.said.append(str(error.details()))  # pyright: ignore[reportAttributeAccessIssue]
                for container in list(self.pod.containers):
                    container.remove()
                attempt += 1
            else:
                return

    def stop(self) -> list[str]:
        """No further try; what stood against those that were made."""
        self._enough.set()
        self._thread.join()
        return self.said


class Moving:
    """A container of the first node's pod that is about to move to one on the second, with a live client."""

    def __init__(self, kubelets: Kubelets) -> None:
        self.kubelets, self.place = kubelets, kubelets.place
        self.old = kubelets.cris[0].pod(NAME)
        self.source = kubelets.run(self.old)
        self.client = self.place.client(both_ways(addresses(self.old), 2))
        self.new = kubelets.cris[1].pod(NAME, annotations=NOTES)

    def settled(self) -> str:
        """Which pod it runs in, `old` or `new`, when nothing is under way any more; no byte was lost."""
        until(lambda: self.place.runs_on(0.1), timeout_s=30, what="it runs")
        until(
            lambda: not self.kubelets.nothing_is_left(),
            timeout_s=30,
            what=f"{self.kubelets.nothing_is_left()}",
        )
        self.client.goes_on()
        order = self.place.never_twice()
        assert len(order) <= 2
        found = "new" if len(order) == 2 else "old"
        if found == "old":
            until(
                lambda: not self.kubelets.residue(self.new),
                what=f"it is clean: {self.kubelets.residue(self.new)}",
            )
        (self.old if found == "new" else self.new).remove()
        self.client.goes_on()
        whole(self.client.stop())
        return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubelets]:
    with Pairs(tmp_path_factory.mktemp("pairs")) as pairs:
        made = Kubelets(pairs.fresh())
        yield made
        made.close()


@pytest.fixture
def kubelets(both: Kubelets) -> Iterator[Kubelets]:
    yield both
    for agent in both.place.agents:
        agent.kill()
        agent.start()
    for client in both.place.clients:
        client.close()
    for cri in both.cris:
        cri.close_pods()
    both.place.beats_path.write_bytes(b"")


def test_into_a_pod_of_another_kubelet(kubelets: Kubelets) -> None:
    moving = Moving(kubelets)
    migrate = kubelets.migrate(moving.source)
    moving.client.goes_on()  # it has not stood still for the other container yet
    woken = kubelets.run(moving.new)
    assert woken.state == "RUNNING"
    _, said = migrate.communicate(timeout=60)
    print(said)
    assert migrate.returncode == 0, said
    until(lambda: moving.source.state == "EXITED", what="its old containerd knows that it has ended")
    assert moving.settled() == "new"
    moving.new.remove()
    assert [agent.node.leases() for agent in kubelets.place.agents] == [{}, {}]


def test_what_cannot_be_restored_runs_on_where_it_was(kubelets: Kubelets) -> None:
    """It is never started cold either, though the pod asks for that: it would run twice."""
    moving = Moving(kubelets)
    moving.new.remove()
    cold = {**NOTES, "torpor.dev/on-restore-failure": "cold-start"}
    moving.new = kubelets.cris[1].pod(NAME, annotations=cold)
    migrate = kubelets.migrate(moving.source)
    image = kubelets.daemons[1].image("busybox")
    with pytest.raises(grpc.RpcError, match="mount"):
        moving.new.run("main", ARGV, image=image, mounts=kubelets.mounts[1:])
    _, said = migrate.communicate(timeout=60)
    print(said)
    assert migrate.returncode == 1
    assert "mount" in said.splitlines()[-1]
    until(lambda: not kubelets.nothing_is_left(), what=f"{kubelets.nothing_is_left()}")
    for container in list(moving.new.containers):
        container.remove()
    with pytest.raises(grpc.RpcError, match="is not started cold"):  # the kubelet's next try
        kubelets.run(moving.new, attempt=1)
    assert moving.settled() == "old"


@pytest.mark.skipif(not SOAK, reason="long: see ./run soak")
def test_nobody_makes_a_pod(kubelets: Kubelets) -> None:
    moving = Moving(kubelets)
    migrate = kubelets.migrate(moving.source)
    migrate.send_signal(signal.SIGTERM)
    migrate.communicate(timeout=20)
    assert moving.settled() == "old"


POINTS = [
    ("target", "after shim.promise:Promise.came"),
    ("source", "after cluster.departure:_Leaving._have_prepared"),
    ("source", "after cluster.records:Record.write=commit"),
    ("target", "after cluster.records:Record.write=prepared"),
    ("target", "after shim.promise:Promise.decide"),
    ("target", "before cluster.guest:Guest.leave"),
    ("target", "after shim.promise:Promise.remove"),
]


@pytest.mark.skipif(not SOAK, reason="long: see ./run soak")
@pytest.mark.parametrize(("side", "point"), POINTS)
def test_a_killed_agent(kubelets: Kubelets, side: str, point: str, tmp_path: Path) -> None:
    moving = Moving(kubelets)
    source, target = kubelets.place.agents
    words = (point, "kill", tmp_path)
    if side == "target":
        target.kill()
        target.start(words)
    migrate = kubelets.migrate(moving.source, words if side == "source" else ())
    kubelet = Kubelet(kubelets, moving.new)
    try:
        until((tmp_path / "reached").exists, timeout_s=60, what="the point is reached")
        victim = source if side == "source" else target
        victim.kill()
        time.sleep(0.3)
        kubelets.place.never_twice()
        victim.start()
        until(lambda: kubelets.place.runs_on(0.1), timeout_s=30, what="it runs")
        _, said = migrate.communicate(timeout=60)
    finally:
        tried = kubelet.stop()
    print(f"{side} {point}: {said.strip().splitlines()[-1:]}; {tried}")
    print(moving.settled())


@pytest.mark.skipif(not SOAK, reason="long: see ./run soak")
def test_a_start_that_is_killed_in_doubt(kubelets: Kubelets, tmp_path: Path) -> None:
    """Its caller tries again, and gets the container if it was promised; else that runs where it was."""
    moving = Moving(kubelets)
    source, target = kubelets.place.agents
    target.kill()
    target.start(("after cluster.records:Record.write=prepared", "cut", tmp_path))
    migrate = kubelets.migrate(moving.source)
    kubelet = Kubelet(kubelets, moving.new)
    try:
        until((tmp_path / "reached").exists, timeout_s=60, what="it is prepared")
        kubelets.place.lab.cut(target.node)
        (tmp_path / "go").touch()
        until(lambda: starting(target.node.torpor.runtime), what="its start waits")
        assert not kubelets.place.runs_on(0.5)
        for pid in starting(target.node.torpor.runtime):
            os.kill(pid, signal.SIGKILL)
        kubelets.place.lab.heal(target.node)
        migrate.communicate(timeout=60)
        until(lambda: kubelets.place.runs_on(0.1), timeout_s=30, what="it runs")
    finally:
        print(kubelet.stop())
    assert source.records() == []
    print(moving.settled())


def starting(runtime: Path) -> list[int]:
    """The processes that are `start` of a container by a launcher."""
    return [pid for pid, line in processes_with(str(runtime)) if " start " in line]
