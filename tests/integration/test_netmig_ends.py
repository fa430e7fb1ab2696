"""What the node's ends of a pod's interfaces do to those around: the pod's own gateway, and its bridge."""

from __future__ import annotations

import socket
from collections.abc import Generator
from pathlib import Path

import pytest

from netmig import rtnl
from netmig.apply import apply, plug, plug_routed
from netmig.capture import capture
from netmig.identity import global_addresses, link_local
from netmig.ns import Netns
from tests.support.pods import BRIDGE, Nodes, add_veth, nodes

pytestmark = pytest.mark.engine

EVERY_END = "ee:ee:ee:ee:ee:ee"


@pytest.fixture
def made(tmp_path: Path) -> Generator[Nodes]:
    with nodes(tmp_path / "ns") as these:
        yield these


def pod_on(made: Nodes, node: Netns, end_mac: str, bridge: str | None) -> Netns:
    """A pod whose end on the node has a MAC; without a bridge, the end is its gateway."""
    pod = made.empty("pod")
    index = add_veth(pod, node, "eth0", "pod0", mac="02:00:00:00:00:0a", bridge=None)
    with node.ipr() as host, pod.ipr() as ipr:
        (end,) = host.link_lookup(ifname="pod0")
        host.link("set", index=end, address=end_mac)
        if bridge is not None:
            host.link("set", index=end, master=host.link_lookup(ifname=bridge)[0])
        ipr.addr("add", index=index, address="fd07::a", prefixlen=128)
        if bridge is None:
            gateway = link_local(end_mac)
            ipr.route("add", family=socket.AF_INET6, dst="default", gateway=gateway, oif=index)
    return pod


def test_an_end_that_is_the_pods_gateway_answers_at_once(made: Nodes) -> None:
    """As Calico's: every end on every node has the same MAC, and so the gateway's link-local address."""
    a, b, other = made.node("a"), made.node("b"), made.empty("other")
    identity = capture(pod_on(made, a, EVERY_END, None), a)
    for name, value in (("accept_dad", "1"), ("dad_transmits", "30")):  # as on a node, and for half a minute
        b.set_sysctl(f"net/ipv6/conf/default/{name}", value)
    applied = apply(identity, other, b, adopt=False, neighbours=False, routed=True)
    plug_routed(applied, b, global_addresses(identity))
    with b.inside():
        server = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    with other.inside():
        client = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    with server, client:
        server.bind(("fd00:88::1", 7777))
        server.settimeout(10)
        client.sendto(b"word", ("fd00:88::1", 7777))
        assert server.recv(100) == b"word"


def test_an_end_does_not_give_its_bridge_another_mac(made: Nodes) -> None:
    """One that nobody gave a MAC takes the lowest of its ports: the gateway of all the pods there."""
    a, b, other = made.node("a"), made.node("b", bridges=("other0",)), made.empty("other")
    identity = capture(pod_on(made, a, "00:00:00:00:00:01", BRIDGE), a)
    with b.ipr() as ipr:
        ipr.link("add", ifname=BRIDGE, kind="bridge")
        (bridge,) = ipr.link_lookup(ifname=BRIDGE)
        ipr.link("set", index=bridge, state="up")
        add_veth(made.empty("near"), b, "eth0", "near0", mac="02:00:00:00:00:0b")

        def mac() -> str:
            return str(rtnl.links(ipr, bridge)[0].attributes["IFLA_ADDRESS"])

        before = mac()
        applied = apply(identity, other, b, adopt=False)
        plug(applied, b)
        assert mac() == before
