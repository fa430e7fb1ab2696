"""A node that routes to a pod whose address is of another network: packets both ways, both families."""

from __future__ import annotations

import socket
from collections.abc import Generator
from pathlib import Path

import pytest

from netmig.apply import apply, check, plug_routed
from netmig.capture import capture
from netmig.identity import diff, global_addresses
from netmig.ns import Netns
from tests.support.pods import Nodes, add_veth, bridge_network, cni, nodes

pytestmark = pytest.mark.engine

CLIENT = {4: "192.168.5.2", 6: "fd05::2"}
POD = {4: "10.88.0.10", 6: "fd00:88::10"}


@pytest.fixture
def made(tmp_path: Path) -> Generator[Nodes]:
    with nodes(tmp_path / "ns") as these:
        yield these


def routed_node(made: Nodes) -> tuple[Netns, Netns]:
    """A node without the pod's network, and a client that it is connected with."""
    node, client = made.node("b", bridges=("other0",)), made.empty("client")
    with node.ipr() as ipr:
        ipr.flush_addr(index=ipr.link_lookup(ifname="other0")[0])
    add_veth(client, node, "eth0", "uplink", mac="02:00:00:00:00:aa", bridge=None, mtu=1500)
    for netns, name, last, gateway in ((node, "uplink", 1, 2), (client, "eth0", 2, 1)):
        with netns.ipr() as ipr:
            index = ipr.link_lookup(ifname=name)[0]
            ipr.addr("add", index=index, address=f"192.168.5.{last}", prefixlen=24)
            ipr.addr("add", index=index, address=f"fd05::{last}", prefixlen=64, flags=2)  # no probe
            ipr.route("add", dst="default", gateway=f"192.168.5.{gateway}")
            ipr.route("add", family=socket.AF_INET6, dst="default", gateway=f"fd05::{gateway}")
    return node, client


def asks(asker: Netns, asked: Netns, address: str) -> str:
    """Send a question and have it answered; returns who it was seen to be from."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with asked.inside():
        server = socket.socket(family, socket.SOCK_DGRAM)
    with asker.inside():
        client = socket.socket(family, socket.SOCK_DGRAM)
    with server, client:
        server.bind((address, 7777))
        for end in (server, client):
            end.settimeout(10)
        client.sendto(b"question", (address, 7777))
        question, who = server.recvfrom(100)
        server.sendto(b"answer", who)
        assert (question, client.recvfrom(100)[0]) == (b"question", b"answer")
    return str(who[0])


@pytest.mark.parametrize("version", [4, 6])
def test_packets_go_both_ways(made: Nodes, tmp_path: Path, version: int) -> None:
    a = made.node("a")
    pod, other = made.empty("pod"), made.empty("other")
    cni(a, "ADD", "pod", pod, bridge_network(tmp_path / "a", first=10))
    identity = capture(pod, a)
    node, client = routed_node(made)
    before = capture(node, None)
    assert check(identity, other, node, routed=True, peers=list(CLIENT.values())) == []

    applied = apply(identity, other, node, adopt=False, neighbours=False, routed=True)
    plug_routed(applied, node, global_addresses(identity))

    assert asks(client, other, POD[version]) == CLIENT[version]
    assert asks(other, client, CLIENT[version]) == POD[version]
    assert diff(identity, capture(other, node)) == []
    applied.undo()
    assert diff(before, capture(node, None)) == []
