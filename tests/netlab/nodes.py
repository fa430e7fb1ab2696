"""The lab's hosts: nodes, and one for clients, joined by an underlay, each a network namespace.

Two kinds of pod network. `l2`: every node's bridge cni0 is one segment, stretched by VXLAN over the underlay;
the client host is on it too and is the pods' gateway. `routed`: each node has a pod network of its own behind
its bridge, and the hosts have routes to it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tests.netlab import room
from tests.support.containers import PREFIX, Runc, command
from tests.support.torpor import Torpor

Kind = Literal["l2", "routed"]
KINDS: tuple[Kind, ...] = ("l2", "routed")

NETNS = Path("/run/netns")
CLIENT = "client"
UNDERLAY = "underlay"
MTU = 1450  # what VXLAN leaves of 1500
POD_NETWORK = "pods"
BRIDGE = "cni0"


class Host:
    """A network namespace with a leg on the underlay. number: from 1; part of its addresses."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.netns_path = NETNS / name
        self.address, self.address6 = f"10.99.0.{number}", f"fd00:99::{number}"

    def words(self, *argv: str | Path) -> list[str]:
        """The command line that runs a program on this host."""
        return ["nsenter", f"--net={self.netns_path}", *(str(word) for word in argv)]

    def __call__(self, *argv: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a program on this host."""
        return command(*self.words(*argv), **more)

    def ip(self, *lines: str) -> None:
        """Run lines for `ip` on this host, in one process."""
        command("ip", "-n", self.name, "-batch", "-", input="\n".join(lines) + "\n")


class Node(Host):
    """A host for pods, with torpor, a runtime's state directory and CNI data of its own."""

    def __init__(self, name: str, number: int, kind: Kind, path: Path) -> None:
        super().__init__(name, number)
        self.kind = kind
        self.path = path / name
        self.torpor = Torpor(self.path / "torpor")
        self.runc = Runc(self.path / "runc")
        self.leases_path = self.path / "networks"  # host-local's store, a directory for each network
        if kind == "l2":
            # All nodes share one range, so that any of them can have a pod of any address; each begins to
            # hand out addresses at another place, since their stores do not know of each other.
            store = self.leases_path / POD_NETWORK
            store.mkdir(parents=True)
            (store / "last_reserved_ip.0").write_text(f"10.88.0.{9 + 40 * (number - 1)}")
            (store / "last_reserved_ip.1").write_text(f"fd00:88::{9 + 40 * (number - 1)}")

    @property
    def gateway(self) -> tuple[str, str]:
        """The address of the bridge in the routed network."""
        return f"10.88.{self.number}.1", f"fd00:88:{self.number}::1"

    def cni_config(self) -> dict[str, Any]:
        """The network configuration for this node's pods."""
        if self.kind == "l2":
            ranges = [
                _range("10.88.0.0/16", "10.88.0.10", "10.88.0.199", "10.88.0.200"),
                _range("fd00:88::/64", "fd00:88::10", "fd00:88::199", "fd00:88::200"),
            ]
        else:
            v4, v6 = self.gateway
            ranges = [
                _range(f"10.88.{self.number}.0/24", f"10.88.{self.number}.10", f"10.88.{self.number}.99", v4),
                _range(
                    f"fd00:88:{self.number}::/64",
                    f"fd00:88:{self.number}::10",
                    f"fd00:88:{self.number}::99",
                    v6,
                ),
            ]
        return {
            "cniVersion": "1.0.0",
            "name": POD_NETWORK,
            "type": "bridge",
            "bridge": BRIDGE,
            "isGateway": False,
            "mtu": MTU,
            "capabilities": {"mac": True, "ips": True},
            "ipam": {
                "type": "host-local",
                "dataDir": str(self.leases_path),
                "ranges": [[each] for each in ranges],
                "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
            },
        }

    def cni(
        self,
        verb: Literal["ADD", "DEL"],
        container_id: str,
        netns_path: Path,
        *,
        runtime: Mapping[str, Any] | None = None,
        ipam: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Call the CNI plugin as a runtime caller does; its result.

        runtime: the capabilities' arguments (`ips`, `mac`). ipam: in place of the node's own.
        Raises AssertionError with the plugin's message.
        """
        config = self.cni_config() | ({"runtimeConfig": dict(runtime)} if runtime else {})
        if ipam:
            config["ipam"] = dict(ipam)
        environment = {
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": container_id,
            "CNI_NETNS": str(netns_path),
            "CNI_IFNAME": "eth0",
            "CNI_PATH": str(PREFIX / "cni"),
        }
        done = self(PREFIX / "cni" / "bridge", input=json.dumps(config), env=environment, check=False)
        if done.returncode:
            raise AssertionError(f"CNI {verb} for {container_id}: {done.stdout}{done.stderr}")
        return json.loads(done.stdout) if done.stdout.strip() else {}

    def leases(self) -> dict[str, str]:
        """Reserved addresses and whose they are."""
        directory = self.leases_path / POD_NETWORK
        found: dict[str, str] = {}
        for path in directory.glob("*"):
            if path.name.startswith(("last_reserved", "torpor-")) or not {".", ":"} & set(path.name):
                continue  # the second is a lease being written
            with contextlib.suppress(FileNotFoundError, IndexError):  # released meanwhile, or still empty
                found[path.name] = path.read_text().splitlines()[0]
        return found


class Lab:
    """All hosts of one lab. n_nodes: how many for pods; they are called node1, node2 and so on."""

    def __init__(self, kind: Kind, path: Path, *, n_nodes: int = 3) -> None:
        self.kind = kind
        self.tag = room.tag()
        self.path = path
        path.mkdir(parents=True)
        self.nodes = [Node(f"node{number}", number, kind, path) for number in range(1, n_nodes + 1)]
        self.client = Host(CLIENT, n_nodes + 1)
        self.hosts: list[Host] = [*self.nodes, self.client]
        for name in (UNDERLAY, *(host.name for host in self.hosts)):
            command("ip", "netns", "add", name)
        self._join()
        for host in self.hosts:
            self._stretch(host) if kind == "l2" else self._route(host)

    def node(self, name: str) -> Node:
        """The node of a name. Raises KeyError."""
        return {node.name: node for node in self.nodes}[name]

    def cut(self, host: Host) -> None:
        """Pull the host's cable out of the underlay."""
        command("ip", "-n", UNDERLAY, "link", "set", host.name, "down")

    def heal(self, host: Host) -> None:
        """Put it back."""
        command("ip", "-n", UNDERLAY, "link", "set", host.name, "up")

    def close(self) -> None:
        """Take everything down but containers, which their pods remove."""
        for name in (*(host.name for host in self.hosts), UNDERLAY):
            command("ip", "netns", "delete", name, check=False)

    def _join(self) -> None:
        """The underlay: a bridge with a port for each host."""
        bridge = Host(UNDERLAY, 0)
        bridge.ip("link add br0 type bridge forward_delay 0 mcast_snooping 0", "link set br0 up")
        for host in self.hosts:
            host.ip(
                "link set lo up",
                f"link add eth0 type veth peer name {host.name} netns {UNDERLAY}",
                f"address add {host.address}/24 dev eth0",
                f"address add {host.address6}/64 dev eth0 nodad",
                "link set eth0 up",
            )
            bridge.ip(f"link set {host.name} master br0", f"link set {host.name} up")

    def _stretch(self, host: Host) -> None:
        """One segment for all: VXLAN that learns, its floods by multicast."""
        lines = [f"link add vx mtu {MTU} type vxlan id 42 group 239.1.1.42 dev eth0 dstport 4789"]
        if host is self.client:
            lines += ["address add 10.88.0.200/16 dev vx", "address add fd00:88::200/64 dev vx nodad"]
        else:
            lines += [
                f"link add cni0 mtu {MTU} type bridge forward_delay 0",
                "link set vx master cni0",
                "link set cni0 up",
            ]
        host.ip(*lines, "link set vx up")

    def _route(self, host: Host) -> None:
        """A pod network behind each node, and routes to the others'."""
        lines: list[str] = []
        if isinstance(host, Node):
            v4, v6 = host.gateway
            # An address of its own, as the plugin gives a gateway: else it changes as pods come and go.
            mac = f"0a:58:0a:58:{host.number:02x}:01"
            lines += [
                f"link add cni0 address {mac} mtu {MTU} type bridge forward_delay 0",
                f"address add {v4}/24 dev cni0",
                f"address add {v6}/64 dev cni0 nodad",
                "link set cni0 up",
            ]
            host("sh", "-c", "echo 1 | tee /proc/sys/net/ipv[46]/conf/all/forwarding")
        for node in self.nodes:
            if node is not host:
                lines += [
                    f"route add 10.88.{node.number}.0/24 via {node.address}",
                    f"route add fd00:88:{node.number}::/64 via {node.address6}",
                ]
        host.ip(*lines)


def _range(subnet: str, start: str, end: str, gateway: str) -> dict[str, str]:
    return {"subnet": subnet, "rangeStart": start, "rangeEnd": end, "gateway": gateway}
