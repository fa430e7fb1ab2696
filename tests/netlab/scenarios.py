"""What the lab plays: each scenario makes its own lab and returns rows for the report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.netlab import redis
from tests.netlab.nodes import Kind, Lab, Node
from tests.netlab.pods import Containers, Pod, build_server
from tests.netlab.report import Row
from tests.netlab.traffic import Client, both_ways, mixed


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of it. root: an empty directory; server: a root file system with the server.

    asleep_s: how long a suspended pod sleeps. rounds: of what is measured. back_and_forth: migrations in a
    row. connections: at once, in the crowd. kinds: how many kinds of traffic a suspended pod is tried with.
    load_s: how long a benchmark would run undisturbed.
    """

    root: Path
    server: Path
    asleep_s: float = 5.0
    rounds: int = 5
    back_and_forth: int = 20
    connections: int = 100
    load_s: float = 4.0
    kinds: int = 4


class Stage:
    """A lab with one pod on the first node, in which a program runs. lower: the layer that has it."""

    def __init__(self, lab: Lab, lower: Path, argv: Sequence[str]) -> None:
        self.lab = lab
        self.lower = lower
        self.argv = argv
        self.containers = Containers(lab)
        self.clients: list[Client] = []
        self.container_id = f"{lab.tag}-server"
        self.pod = Pod(lab.nodes[0], "server")
        self.pods = [self.pod]
        self.containers.run(self.node, self.container_id, self.bundle(self.pod))

    @property
    def node(self) -> Node:
        """Where the pod is now."""
        return self.pod.node

    def bundle(self, pod: Pod) -> Path:
        """A bundle for the server in a pod."""
        return self.containers.bundle(pod.node, self.container_id, self.lower, self.argv, pod.netns_path)

    def client(self, flows: Sequence[str]) -> Client:
        """A connected client on the client host."""
        client = Client(self.lab.client, flows)
        self.clients.append(client)
        return client

    def close(self) -> None:
        """Take it all down."""
        for client in self.clients:
            client.close()
        self.containers.close()
        for pod in self.pods:
            pod.close()
        self.lab.close()


@contextlib.contextmanager
def stage(
    plan: Plan,
    kind: Kind,
    name: str,
    *,
    lower: Path | None = None,
    argv: Sequence[str] = ("/bin/server", "1"),
) -> Generator[Stage]:
    """A stage in a directory of its own, taken down at the end. lower, argv: the program; by default server.c
    with a mebibyte of memory."""
    place = Stage(Lab(kind, plan.root / f"{name}-{kind}"), lower or plan.server, argv)
    try:
        yield place
    finally:
        place.close()


def suspend(plan: Plan) -> list[Row]:
    """The pod sleeps on its node for some seconds and wakes up there, by torpor's own commands."""
    rows: list[Row] = []
    crowd = f"{plan.connections} connections"
    with stage(plan, "l2", "suspend") as place:
        v4, v6 = place.pod.ips
        kinds = {
            "one connection, IPv4": both_ways([v4], 1),
            "one connection, IPv6": both_ways([v6], 1),
            crowd: both_ways([v4, v6], plan.connections),
            "every kind of flow": mixed([v4, v6]),
        }
        for name, flows in list(kinds.items())[-plan.kinds :]:
            client = place.client(flows)
            phases = sleep_and_wake(place, plan.asleep_s)
            client.goes_on()
            rows.append(
                Row(
                    scenario="suspend",
                    name=f"suspend {plan.asleep_s:g} s: {name}",
                    network="l2",
                    tally=client.stop(),
                    phases_ms=phases,
                )
            )
    return rows


def sleep_and_wake(place: Stage, asleep_s: float) -> dict[str, float]:
    """`torpor checkpoint --stop --keep-tcp`, some seconds, `torpor restore --keep-tcp`; ms of each."""
    node = place.node
    begun = time.monotonic()
    node.torpor(
        *("checkpoint", place.container_id, "--name", "asleep", "--stop", "--keep-tcp", "--replace"),
        *("--root", node.runc.root),
    )
    slept = time.monotonic()
    place.containers.remove(node, place.container_id)
    bundle = place.bundle(place.pod)
    time.sleep(asleep_s)
    waking = time.monotonic()
    node.torpor("restore", "asleep", "--bundle", bundle, "--keep-tcp", "--detach", "--root", node.runc.root)
    awake = time.monotonic()
    return {"checkpoint": (slept - begun) * 1000, "restore": (awake - waking) * 1000}


def redis_suspended(plan: Plan) -> list[Row]:
    """redis sleeps and wakes up while redis-benchmark is connected."""
    with stage(plan, "l2", "redis", lower=redis.layer(), argv=redis.ARGV) as place:
        server = redis.Redis(place.lab.client, place.pod.ips[0])
        with server.under_load(plan.load_s) as tally:
            phases = sleep_and_wake(place, plan.asleep_s)
    name = f"redis-benchmark, {redis.N_CLIENTS} clients: suspend {plan.asleep_s:g} s"
    return [Row(scenario="redis-suspended", name=name, network="l2", tally=tally, phases_ms=phases)]


SCENARIOS: dict[str, Callable[[Plan], list[Row]]] = {"suspend": suspend, "redis-suspended": redis_suspended}


def play(plan: Plan, name: str) -> list[Row]:
    """One scenario's rows. What goes wrong is a row too."""
    try:
        return SCENARIOS[name](plan)
    except Exception as error:  # the others are still worth playing
        return [Row(scenario=name, name=name, network="", problem=f"{type(error).__name__}: {error}"[:2000])]


def full(root: Path, server: Path) -> Plan:
    """All of it."""
    return Plan(root=root, server=server)


def short(root: Path, server: Path) -> Plan:
    """As much as a test suite has time for."""
    return Plan(
        root=root,
        server=server,
        asleep_s=1.0,
        rounds=1,
        back_and_forth=2,
        connections=20,
        kinds=2,
        load_s=1.5,
    )


__all__ = ["SCENARIOS", "Plan", "build_server", "full", "play", "short"]
