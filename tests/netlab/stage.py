"""A stage for scenarios: a lab with one pod on the first node, in which a program runs, and its clients."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.netlab.nodes import KINDS, Kind, Lab, Node
from tests.netlab.pods import Containers, Pod, netns_path, new_pod, sandbox_id
from tests.netlab.traffic import Client

POD = "server"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of it. root: an empty directory; server: a root file system with the server.

    asleep_s: how long a suspended pod sleeps. rounds: of what is measured. back_and_forth: migrations in a
    row. connections: at once, in the crowd. kinds: how many kinds of traffic a suspended pod is tried with.
    mebibytes: of memory, of what is moved and measured. networks: those that `torpor migrate` is played on.
    """

    root: Path
    server: Path
    asleep_s: float = 5.0
    rounds: int = 9
    back_and_forth: int = 20
    connections: int = 100
    mebibytes: int = 64
    kinds: int = 4
    networks: tuple[Kind, ...] = KINDS


class Stage:
    """A lab with one pod on the first node, in which a program runs. lower: the layer that has it."""

    def __init__(self, lab: Lab, lower: Path, argv: Sequence[str]) -> None:
        self.lab = lab
        self.lower = lower
        self.argv = argv
        self.containers = Containers(lab)
        self.clients: list[Client] = []
        self.container_id = f"{lab.tag}-server"
        self.pod = new_pod(lab.nodes[0], POD)
        self.bundle_path = self.bundle(self.pod)
        self.containers.run(self.node, self.container_id, self.bundle_path)

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
        self.pod.close()
        home = self.lab.nodes[0]
        home.cni("DEL", sandbox_id(home, POD), netns_path(home, POD))  # the lease, if it ended elsewhere
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
