"""Network namespaces as pods have them, on nodes that are namespaces, too."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from socket import AF_INET6
from typing import Any

from netmig import nft, rtnl
from netmig.identity import NTF_PROXY, NUD_PERMANENT, Identity, LinkAddress, Neighbour, Route, Rule, diff
from netmig.messages import address_to, neighbour_to, route_to, rule_to
from netmig.ns import Netns
from tests.support.containers import tool
from tests.support.network import until_up

BRIDGE = "cni0"
CNI_PATHS = (
    Path(tool("containerd")).resolve().parents[1] / "cni",
    Path("/opt/cni/bin"),
    Path("/usr/lib/cni"),
)


class Nodes:
    """Namespaces in a directory, removed at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made: list[Netns] = []

    def empty(self, name: str) -> Netns:
        """A namespace that has only a loopback device, and that down."""
        netns = Netns.create(self.path / name)
        self._made.append(netns)
        return netns

    def node(self, name: str, *, mtu: int = 1500, bridges: tuple[str, ...] = (BRIDGE,)) -> Netns:
        """A node with bridges; each is the pod's gateway 10.88.0.1 and fd00:88::1."""
        node = self.empty(name)
        node.set_sysctl("net/ipv4/ip_forward", "1")
        node.set_sysctl("net/ipv6/conf/all/forwarding", "1")
        # A link that still probes for its own address asks for no neighbour; a node's are past that.
        node.set_sysctl("net/ipv6/conf/default/accept_dad", "0")
        with node.ipr() as ipr:
            ipr.link("set", index=1, state="up")
            for bridge in bridges:
                # With a MAC of its own, as the plugin has it: else it takes the lowest of its ports.
                mac = f"02:88:00:00:00:{len(self._made):02x}"
                ipr.link("add", ifname=bridge, kind="bridge", mtu=mtu, address=mac)
                index = ipr.link_lookup(ifname=bridge)[0]
                # Nor an address of its own that comes with the first port: tests compare nodes.
                node.set_sysctl(f"net/ipv6/conf/{bridge}/addr_gen_mode", "1")
                ipr.link("set", index=index, state="up")
            index = ipr.link_lookup(ifname=bridges[0])[0]
            ipr.addr("add", index=index, address="10.88.0.1", prefixlen=16)
            ipr.addr("add", index=index, address="fd00:88::1", prefixlen=64)
        return node

    def close(self) -> None:
        """Take all of them away, the last first."""
        for netns in reversed(self._made):
            netns.remove()


@contextmanager
def nodes(path: Path) -> Generator[Nodes]:
    """Nodes and pods that are gone afterwards."""
    path.mkdir(parents=True, exist_ok=True)
    made = Nodes(path)
    try:
        yield made
    finally:
        made.close()


def add_veth(
    pod: Netns, node: Netns, name: str, end: str, *, mac: str, bridge: str | None = BRIDGE, mtu: int = 1450
) -> int:
    """An interface of a pod, whose other end is in a bridge; returns its number."""
    with pod.ipr() as ipr, node.ipr() as host:
        peer = {"ifname": end, "mtu": mtu, "net_ns_fd": node.fileno()}
        ipr.link("add", ifname=name, kind="veth", address=mac, mtu=mtu, peer=peer)
        index = ipr.link_lookup(ifname=name)[0]
        far = host.link_lookup(ifname=end)[0]
        if bridge is not None:
            host.link("set", index=far, master=host.link_lookup(ifname=bridge)[0])
        host.link("set", index=far, state="up")
        pod.set_sysctl(f"net/ipv6/conf/{name}/accept_dad", "0")
        ipr.link("set", index=index, state="up")
        until_up(ipr, index)
        until_up(host, far)
    return int(index)


def rich_pod(made: Nodes, node: Netns, name: str = "pod") -> Netns:
    """A pod with two interfaces and something of everything that an identity can hold."""
    pod = made.empty(name)
    with pod.ipr() as ipr:
        ipr.link("set", index=1, state="up")
        one = add_veth(pod, node, "eth0", f"{name}0", mac="0a:58:0a:58:00:0a")
        two = add_veth(pod, node, "net1", f"{name}1", mac="0a:58:0a:59:00:0a", mtu=1400)
        ipr.link("set", index=one, ifalias="the pod's first")
        ipr.link("property_add", index=two, altname="storage-network")
        ipr.link("set", index=two, txqlen=77, flags=0x100, change=0x100)
        for address, index in _addresses(one, two):
            rtnl.change(
                ipr, "address", address_to(address, index), "replace" if ":" in address.ip else "create"
            )
        indexes = {"eth0": one, "net1": two, "lo": 1}
        for route in _routes():
            rtnl.change(ipr, "route", route_to(route, indexes), "append")
        for rule in _rules():
            rtnl.change(ipr, "rule", rule_to(rule), "create")
        for near in _neighbours():
            rtnl.change(ipr, "neighbour", neighbour_to(near, indexes[near.interface]), "replace")
    for sysctl, value in SYSCTLS.items():
        pod.set_sysctl(sysctl, value)
    nft.run(pod, RULES)
    _shape_traffic(pod, one)
    return pod


SYSCTLS = {
    "net/ipv4/ip_local_port_range": "20000\t40000",
    "net/ipv4/tcp_keepalive_time": "99",
    "net/ipv4/ip_unprivileged_port_start": "0",
    "net/ipv4/conf/all/rp_filter": "2",
    "net/ipv4/conf/eth0/arp_notify": "1",
    "net/ipv4/conf/net1/accept_local": "1",
    "net/ipv4/neigh/eth0/gc_stale_time": "33",
    "net/ipv6/conf/default/accept_ra": "0",
    "net/ipv6/conf/eth0/keep_addr_on_down": "1",
    "net/core/somaxconn": "1234",
}

RULES = """
table inet pod {
  set blocked { type ipv4_addr; flags interval; elements = { 192.0.2.0/24 }; }
  map verdicts { type inet_service : verdict; elements = { 25 : drop, 8080 : accept }; }
  counter seen { packets 0 bytes 0; }
  chain input {
    type filter hook input priority 10; policy accept;
    ip saddr @blocked counter drop
    tcp dport vmap @verdicts
    counter name seen
  }
  chain helper {
    ip daddr 10.88.0.10 tcp dport 99 reject
  }
  chain output {
    type filter hook output priority 10; policy accept;
    jump helper
  }
}
table ip nat {
  chain pre {
    type nat hook prerouting priority -100; policy accept;
    tcp dport 81 redirect to :8080
  }
}
"""


def _addresses(one: int, two: int) -> list[tuple[LinkAddress, int]]:
    def eth0(ip: str, prefix: int, **more: Any) -> tuple[LinkAddress, int]:
        return LinkAddress(interface="eth0", ip=ip, prefix=prefix, scope=0, **more), one

    def net1(ip: str, prefix: int, **more: Any) -> tuple[LinkAddress, int]:
        return LinkAddress(interface="net1", ip=ip, prefix=prefix, scope=0, **more), two

    return [
        eth0("10.88.0.10", 16, broadcast="10.88.255.255"),
        eth0("10.88.0.9", 16, label="eth0:two"),
        eth0("10.200.0.1", 32, peer="10.200.0.2"),
        eth0("fd00:88::a", 64),
        eth0("fd00:88::b", 64, lifetime=(3000, 4000)),
        net1("10.89.0.10", 24, flags=0x200),
        net1("10.90.0.1", 24, metric=500),
        net1("fd00:89::a", 64),
        (LinkAddress(interface="lo", ip="10.255.0.1", prefix=32, scope=0), 1),
    ]


def _routes() -> list[Route]:
    def route(destination: str, scope: int = 0, kind: int = 1, table: int = 254, **more: Any) -> Route:
        attributes = {
            f"RTA_{name.upper()}": value for name, value in more.items() if name not in {"flags", "tos"}
        }
        rest = {name: value for name, value in more.items() if name in {"flags", "tos"}}
        return Route(
            destination=destination,
            table=table,
            protocol=4,
            scope=scope,
            kind=kind,
            attributes=attributes,
            **rest,
        )

    metrics = {"attrs": [["RTAX_LOCK", 1 << 2], ["RTAX_MTU", 1300], ["RTAX_INITCWND", 20]]}
    hops = [
        {"hops": 0, "oif": "eth0", "flags": 0, "attrs": [["RTA_GATEWAY", "10.88.0.2"]]},
        {"hops": 2, "oif": "eth0", "flags": 0, "attrs": [["RTA_GATEWAY", "10.88.0.3"]]},
    ]
    hops6 = [
        {"hops": 0, "oif": "eth0", "flags": 0, "attrs": [["RTA_GATEWAY", f"fd00:88::{last}"]]}
        for last in (2, 3)
    ]
    return [
        route("10.89.0.0/24", scope=253, oif="net1"),
        route("0.0.0.0/0", gateway="10.88.0.1", oif="eth0", prefsrc="10.88.0.10"),
        route("0.0.0.0/0", gateway="10.89.0.1", oif="net1", priority=0, tos=8),
        route("10.1.0.0/16", gateway="10.88.0.1", oif="eth0", priority=50, metrics=metrics),
        route("10.2.0.0/16", multipath=hops),
        route("10.3.0.0/16", kind=6),
        route("10.4.0.0/16", kind=7, table=1000),
        route("10.5.0.0/16", gateway="172.31.0.1", oif="eth0", flags=4),
        route("10.6.0.0/16", via={"family": AF_INET6, "addr": "fd00:88::1"}, oif="eth0"),
        route("0.0.0.0/0", gateway="10.89.0.1", oif="net1", table=100),
        route("::/0", gateway="fd00:88::1", oif="eth0", priority=1024),
        route("fd01::/48", multipath=hops6, priority=1024),
        route("fd02::/48", gateway="fd00:89::1", oif="net1", priority=77),
        route("fd03::/48", kind=7, oif="lo", priority=1024),
    ]


def _rules() -> list[Rule]:
    def rule(priority: int, table: int, family: int = 2, **more: Any) -> Rule:
        return Rule(family=family, table=table, action=1, priority=priority, **more)

    return [
        rule(100, 100, source="10.89.0.0/24"),
        rule(101, 1000, attributes={"FRA_FWMARK": 0x10, "FRA_FWMASK": 0xFF}),
        rule(102, 100, attributes={"FRA_IIFNAME": "net1"}),
        rule(103, 100, attributes={"FRA_IP_PROTO": 6, "FRA_DPORT_RANGE": "80:90"}),
        rule(104, 254, destination="10.9.0.0/16", attributes={"FRA_SUPPRESS_PREFIXLEN": 0}),
        rule(100, 100, family=AF_INET6, source="fd00:89::/64"),
    ]


def _neighbours() -> list[Neighbour]:
    permanent = NUD_PERMANENT
    return [
        Neighbour(interface="eth0", ip="10.88.0.77", mac="02:00:00:00:00:77", state=permanent),
        Neighbour(interface="eth0", ip="fd00:88::77", mac="02:00:00:00:00:77", state=permanent),
        Neighbour(interface="eth0", ip="10.88.0.78", mac=None, state=permanent, flags=NTF_PROXY),
        Neighbour(interface="eth0", ip="fd00:88::78", mac=None, state=permanent, flags=NTF_PROXY),
    ]


def _shape_traffic(pod: Netns, index: int) -> None:
    """A token bucket below a class below a hierarchy."""
    with pod.ipr() as ipr:
        ipr.tc("add", "htb", index, 0x10000, default=0x20)
        ipr.tc("add-class", "htb", index, 0x10010, parent=0x10000, rate="256kbit", prio=0)
        ipr.tc("add-class", "htb", index, 0x10020, parent=0x10000, rate="1mbit", prio=3)
        ipr.tc("add", "tbf", index, 0x200000, parent=0x10020, rate="500kbit", latency="50ms", burst=4096)


def same(before: Identity, after: Identity) -> bool:
    """Equal, host ends included, but for what is learned and the seconds that pass."""
    assert diff(before, after) == []
    ends = [
        {link.name: link.host and (link.host.name, link.host.bridge, link.host.port) for link in one.links}
        for one in (before, after)
    ]
    assert ends[0] == ends[1]
    return True


def cni(
    node: Netns, command: str, container: str, pod: Netns, conf: dict[str, Any], interface: str = "eth0"
) -> Any:
    """Run a real plugin on a node, as a container runtime does."""
    directory = next(path for path in CNI_PATHS if (path / conf["type"]).exists())
    environment = {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": container,
        "CNI_NETNS": str(pod.path),
        "CNI_IFNAME": interface,
        "CNI_PATH": str(directory),
        "PATH": os.environ["PATH"],
    }
    with node.inside():
        done = subprocess.run(
            [directory / conf["type"]],
            input=json.dumps(conf),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout.strip() else {}


def bridge_network(data: Path, *, first: int, mtu: int = 1450, bridge: str = BRIDGE) -> dict[str, Any]:
    """The bridge plugin with addresses by host-local from 10.88.0.FIRST and fd00:88::FIRST on."""
    ranges = [
        [{"subnet": "10.88.0.0/16", "rangeStart": f"10.88.0.{first}", "gateway": "10.88.0.1"}],
        [{"subnet": "fd00:88::/64", "rangeStart": f"fd00:88::{first}", "gateway": "fd00:88::1"}],
    ]
    routes = [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
    ipam = {"type": "host-local", "dataDir": str(data), "ranges": ranges, "routes": routes}
    return {
        "cniVersion": "1.0.0",
        "name": "pods",
        "type": "bridge",
        "bridge": bridge,
        "mtu": mtu,
        "hairpinMode": True,
        "ipam": ipam,
    }
