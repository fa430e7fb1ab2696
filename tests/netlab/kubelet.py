"""A pod made over CRI, as the kubelet does, by a containerd on one of the lab's nodes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from netmig.ns import Netns
from tests.netlab import room
from tests.netlab.nodes import POD_NETWORK, Lab, Node
from tests.netlab.report import Row
from tests.netlab.stage import Plan
from tests.netlab.traffic import Client, mixed
from tests.support import leaks
from tests.support.containerd import Containerd, Handler
from tests.support.containers import tool, until
from tests.support.cri import Cri, Mount, Pod

IMAGE = "asleep"
CONTAINER = "main"


class NodeContainerd(Containerd):
    """A containerd in a node's network namespace, whose pods are in the node's pod network."""

    def __init__(self, path: Path, node: Node, handlers: Mapping[str, Handler]) -> None:
        self.node = node
        super().__init__(path, room.tag(), handlers)

    def _start(self) -> Any:
        network = {"cniVersion": "1.0.0", "name": POD_NETWORK, "plugins": [self.node.cni_config()]}
        (self.path / "cni" / "10-torpor.conflist").write_text(json.dumps(network))
        with Netns.open(self.node.netns_path) as netns, netns.inside():
            return super()._start()


def sleeps(plan: Plan) -> list[Row]:
    """The container sleeps, its pod is removed, and it wakes up in a new pod with the old address."""
    lab = Lab("l2", plan.root / "kubelet")
    node = lab.nodes[0]
    os.environ[leaks.TAG_VARIABLE] = lab.tag
    handlers = {"runc": Handler(binary=tool("runc")), "torpor": Handler(binary=node.torpor.runtime)}
    daemon = NodeContainerd(node.path / "c", node, handlers)
    cri = Cri(daemon.socket, node.path / "kubelet", lab.tag)
    client: Client | None = None
    try:
        daemon.image("pause")
        image = daemon.image("busybox")
        mounts = [Mount(container_path="/server", host_path=plan.server / "bin" / "server", readonly=True)]
        old = cri.pod("old")
        source = old.run(CONTAINER, ["/server", "1"], image=image, mounts=mounts)
        ips = addresses(old)
        client = Client(lab.client, mixed(ips))
        begun = time.monotonic()
        node.torpor(
            *("checkpoint", source.id, "--root", daemon.runc_root / "k8s.io", "--name", IMAGE),
            *("--stop", "--keep-tcp"),
        )
        slept = time.monotonic()
        until(lambda: source.state == "EXITED", what="containerd knows that it has ended")
        old.remove()
        time.sleep(plan.asleep_s)
        waking = time.monotonic()
        notes = {f"torpor.dev/restore-from.{CONTAINER}": IMAGE, f"torpor.dev/network.{CONTAINER}": "keep"}
        new = cri.pod("new", annotations=notes)
        new.run(CONTAINER, ["/server", "1"], image=image, mounts=mounts)
        awake = time.monotonic()
        client.goes_on()
        row = Row(
            scenario="kubelet",
            name=f"a pod of containerd: sleep {plan.asleep_s:g} s, wake up in another pod",
            network="l2",
            tally=client.stop(),
            phases_ms={"checkpoint": (slept - begun) * 1000, "new pod": (awake - waking) * 1000},
        )
    finally:
        if client is not None:
            client.close()
        cri.close()
        daemon.close()
        lab.close()
    return [row]


def addresses(pod: Pod) -> list[str]:
    """All addresses that the plugin gave a pod."""
    network = pod.info()[0].network
    return [network.ip, *(each.ip for each in network.additional_ips)]
