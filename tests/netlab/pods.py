"""Pods of the lab: a namespace that the real CNI plugin fills, and a container that runs in it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.netlab import room
from tests.netlab.nodes import NETNS, Lab, Node
from tests.support.containers import Output, command, make_spec

SERVER = Path(__file__).with_name("server.c")


def build_server(path: Path) -> Path:
    """A root file system at path (absent) that holds the server of server.c and nothing else."""
    for name in ("bin", "proc", "dev", "sys", "tmp"):
        (path / name).mkdir(parents=True)
    command("gcc", "-O2", "-static", "-o", path / "bin" / "server", SERVER)
    return path


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A network namespace on a node, by which others know a pod. ips: IPv4 first, where it has both."""

    node: Node
    name: str
    ips: tuple[str, ...]
    mac: str

    @property
    def sandbox_id(self) -> str:
        """What CNI knows it by."""
        return sandbox_id(self.node, self.name)

    @property
    def netns_path(self) -> Path:
        """Its namespace."""
        return netns_path(self.node, self.name)

    def close(self) -> None:
        """Give the addresses back and remove the namespace."""
        self.node.cni("DEL", self.sandbox_id, self.netns_path)
        command("ip", "netns", "delete", self.netns_path.name)


def sandbox_id(node: Node, name: str) -> str:
    """What CNI knows a pod by."""
    return f"{name}-{node.name}"


def netns_path(node: Node, name: str) -> Path:
    """Where a pod's namespace is."""
    return NETNS / f"{node.name}-{name}"


def new_pod(node: Node, name: str, *, runtime: dict[str, Any] | None = None) -> Pod:
    """A pod with the addresses that CNI gives it.

    runtime: arguments for the plugin's capabilities, for example {"ips": [...], "mac": ...}.
    """
    path = netns_path(node, name)
    command("ip", "netns", "add", path.name)
    command("ip", "-n", path.name, "link", "set", "lo", "up")
    result = node.cni("ADD", sandbox_id(node, name), path, runtime=runtime)
    ips = tuple(each["address"].partition("/")[0] for each in result["ips"])
    mac = next(each["mac"] for each in result["interfaces"] if each.get("sandbox"))
    return Pod(node=node, name=name, ips=ips, mac=mac)


class Containers:
    """Containers of one lab. On each node all have the layers of the same name below them."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.made: list[tuple[Node, str, Path]] = []
        self.outputs: list[Output] = []
        self._numbers = itertools.count()

    def bundle(
        self,
        node: Node,
        container_id: str,
        lower: Path,
        argv: Sequence[str],
        netns_path: Path,
        *,
        annotations: dict[str, str] | None = None,
    ) -> Path:
        """A bundle on a node: a fresh overlay over `lower`, in a pod's namespace; a cgroup of this node's."""
        path = node.path / "bundles" / f"{container_id}-{next(self._numbers)}"
        for name in ("upper", "work", "rootfs"):
            (path / name).mkdir(parents=True)
        options = f"lowerdir={lower},upperdir={path / 'upper'},workdir={path / 'work'}"
        command("mount", "-t", "overlay", "overlay", "-o", options, path / "rootfs")
        spec = make_spec(
            argv,
            rootfs=str(path / "rootfs"),
            netns_path=netns_path,
            cgroup=f"/{self.lab.tag}/{node.name}/{container_id}",
            annotations=annotations,
        )
        (path / "config.json").write_text(json.dumps(spec))
        self.made.append((node, container_id, path))
        return path

    def run(self, node: Node, container_id: str, bundle: Path) -> None:
        """Start a container."""
        self.outputs.append(node.runc.run(bundle, container_id))

    def remove(self, node: Node, container_id: str) -> None:
        """Kill and delete a container, unmount and forget its bundles on this node."""
        node.runc.delete(container_id)
        for made in [each for each in self.made if each[:2] == (node, container_id)]:
            command("umount", "--lazy", made[2] / "rootfs", check=False)
            self.made.remove(made)

    def close(self) -> None:
        """Remove every container and the lab's cgroups."""
        for node, container_id, _ in list(self.made):
            self.remove(node, container_id)
        room.remove_cgroups(self.lab.tag)
