"""What cannot work on a node is told before anything is touched, one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import pytest

from netmig.apply import Problem, Refused, apply, check
from netmig.capture import capture
from netmig.identity import Identity, Link
from netmig.ns import Netns
from tests.support.pods import BRIDGE, Nodes, add_veth, bridge_network, cni, nodes, rich_pod

pytestmark = pytest.mark.engine


@pytest.fixture
def made(tmp_path: Path) -> Generator[Nodes]:
    with nodes(tmp_path / "ns") as these:
        yield these


@pytest.fixture
def identity(made: Nodes) -> Identity:
    a = made.node("a")
    return capture(rich_pod(made, a), a)


def change_link(node: Netns, name: str, **what: object) -> None:
    with node.ipr() as ipr:
        ipr.link("set", index=ipr.link_lookup(ifname=name)[0], **what)


def no_bridge(node: Netns) -> None:
    with node.ipr() as ipr:
        ipr.link("del", index=ipr.link_lookup(ifname=BRIDGE)[0])


def another_kind(node: Netns) -> None:
    no_bridge(node)
    with node.ipr() as ipr:
        ipr.link("add", ifname=BRIDGE, kind="veth", peer={"ifname": "other"})


def narrow_uplink(node: Netns) -> None:
    with node.ipr() as ipr:
        ipr.link(
            "add", ifname="vx", kind="vxlan", vxlan_id=7, vxlan_local="10.88.0.1", vxlan_port=4789, mtu=1300
        )
        index = ipr.link_lookup(ifname=BRIDGE)[0]
        ipr.link("set", index=ipr.link_lookup(ifname="vx")[0], master=index)
        ipr.link("set", index=index, mtu=1500)


def taken_name(node: Netns) -> None:
    with node.ipr() as ipr:
        ipr.link("add", ifname="pod0", kind="veth", peer={"ifname": "other"})


def down(node: Netns) -> None:
    change_link(node, BRIDGE, state="down")


def narrow(node: Netns) -> None:
    change_link(node, BRIDGE, mtu=1380)


def looks_for_loops(node: Netns) -> None:
    change_link(node, BRIDGE, kind="bridge", br_stp_state=1)


def no_ipv6(node: Netns) -> None:
    node.set_sysctl("net/ipv6/conf/all/disable_ipv6", "1")


def no_gateway(node: Netns) -> None:
    with node.ipr() as ipr:
        ipr.flush_addr(index=ipr.link_lookup(ifname=BRIDGE)[0])


@pytest.mark.parametrize(
    ("spoil", "code", "sentence"),
    [
        (no_bridge, "bridge", "bridge 'cni0' is not on this node; create it"),
        (another_kind, "bridge", "'cni0' is no bridge on this node"),
        (down, "bridge", "bridge 'cni0' is down; set it up"),
        (looks_for_loops, "bridge", "bridge 'cni0' runs STP, and forwards nothing of a new port for 30 s"),
        (narrow, "mtu", "bridge 'cni0' carries 1380 bytes here and the pod's 'eth0' 1450"),
        (narrow_uplink, "mtu", "port 'vx' of bridge 'cni0' carries 1300 bytes here"),
        (no_ipv6, "ipv6", "IPv6 is off here and the pod has fd00:88::"),
        (taken_name, "name", "this node has an interface 'pod0' already"),
        (no_gateway, "route", "nobody on bridge 'cni0' answers for the pod's gateway 10.88.0.1"),
    ],
)
def test_a_node_that_cannot(
    made: Nodes, identity: Identity, spoil: Callable[[Netns], None], code: str, sentence: str
) -> None:
    b, other = made.node("b"), made.empty("other")
    answerable = only(identity, "eth0")
    assert check(answerable, None, b) == check(answerable, other, b) == []
    spoil(b)
    before = capture(other, b)

    found = check(answerable, None, b)

    assert found[0].code == code
    assert found[0].sentence.startswith(sentence)
    assert "; " in found[0].sentence
    assert all(problem.code == code for problem in found)
    if code != "route":  # of which only the segment knows
        with pytest.raises(Refused, match="could not give network namespace") as refused:
            apply(answerable, other, b, adopt=False)
        assert refused.value.problems == tuple(found)
    assert capture(other, b) == before


def test_a_gateway_that_is_somebody_elses(made: Nodes, identity: Identity) -> None:
    """Of two nodes on one segment only one needs to have it."""
    b, neighbour = made.node("b"), made.empty("neighbour")
    no_gateway(b)
    add_veth(neighbour, b, "eth0", "neighbour", mac="02:00:00:00:00:01", mtu=1500)
    with neighbour.ipr() as ipr:
        index = ipr.link_lookup(ifname="eth0")[0]
        for address, length in (("10.88.0.1", 16), ("10.88.0.2", 16), ("10.88.0.3", 16), ("fd00:88::1", 64)):
            ipr.addr("add", index=index, address=address, prefixlen=length)
        for address in ("fd00:88::2", "fd00:88::3", "172.31.0.1"):
            ipr.addr("add", index=index, address=address, prefixlen=128 if ":" in address else 32)
    assert check(only(identity, "eth0"), None, b) == []


def test_a_peer_without_a_way(made: Nodes, identity: Identity) -> None:
    b = made.node("b")
    pod = replace(only(identity, "eth0"), routes=())
    assert check(pod, None, b, peers=["10.88.3.4", "fd00:88::99"]) == []
    found = check(pod, None, b, peers=["10.88.3.4", "192.0.2.1"])
    assert [problem.sentence for problem in found] == [
        "there is no route to 192.0.2.1, which the pod is connected to; choose a node on the pod's network"
    ]


def test_a_node_that_is_to_route(made: Nodes, identity: Identity) -> None:
    b, client = made.node("b"), made.empty("client")
    no_bridge(b)
    eth0 = only(identity, "eth0")
    add_veth(client, b, "eth0", "uplink", mac="02:00:00:00:00:01", bridge=None)
    assert [one.sentence for one in check(eth0, None, b, routed=True)] == [
        "this node has no route to the pod's gateway 10.88.0.1, so it cannot answer for it; "
        "choose a node on the pod's network"
    ]
    with b.ipr() as ipr:
        ipr.route("add", dst="10.88.0.0/16", oif=ipr.link_lookup(ifname="uplink")[0])
    assert check(eth0, None, b, routed=True) == []
    assert [one.code for one in check(eth0, None, b, routed=True, peers=["10.1.2.3"])] == ["route"]
    b.set_sysctl("net/ipv4/ip_forward", "0")
    b.set_sysctl("net/ipv6/conf/default/forwarding", "0")  # as the pod's host end will have it
    assert [one.sentence for one in check(eth0, None, b, routed=True)] == [
        f"this node does not forward packets to the pod; set net.{name}=1"
        for name in ("ipv4.ip_forward", "ipv6.conf.default.forwarding")
    ]


def test_what_a_plugin_made_must_fit(made: Nodes, identity: Identity, tmp_path: Path) -> None:
    b, other = made.node("b"), made.empty("other")
    network = bridge_network(tmp_path / "b", first=20, mtu=1300)
    cni(b, "ADD", "other", other, network)
    assert codes(check(only(identity, "eth0"), other, b)) == ["mtu", "name"]
    assert codes(check(only(identity, "eth0"), other, b, adopt=True)) == ["mtu"]
    cni(b, "ADD", "other2", other, {**network, "mtu": 1500}, "net9")
    assert codes(check(only(identity, "eth0"), other, b, adopt=True)) == ["interface", "mtu"]
    assert codes(check(only(identity, "eth0"), other, made.empty("elsewhere"), adopt=True)) == [
        "interface",
        "interface",
        "mtu",
    ]


def test_what_cannot_be_made(made: Nodes, identity: Identity) -> None:
    b = made.node("b")
    strange = Link(name="eth0", index=2, kind="macvlan", mac=None, mtu=1500, queue_length=0, flags=1)
    assert codes(check(Identity(links=(strange,)), None, b)) == ["kind"]
    blind = replace(identity.links[1], host=None)
    assert codes(check(Identity(links=(blind,)), None, b)) == ["interface"]


def codes(problems: list[Problem]) -> list[str]:
    return sorted(problem.code for problem in problems)


def only(identity: Identity, name: str) -> Identity:
    """The identity with one of its networks, and those of its gateways that every node has."""
    routes = [one for one in identity.routes if one.attributes.get("RTA_OIF") in {name, "lo"}]
    return replace(
        identity,
        links=tuple(link for link in identity.links if link.name in {"lo", name}),
        addresses=tuple(one for one in identity.addresses if one.interface in {"lo", name}),
        routes=tuple(one for one in routes if one.attributes.get("RTA_GATEWAY") != "172.31.0.1"),
        neighbours=(),
    )
