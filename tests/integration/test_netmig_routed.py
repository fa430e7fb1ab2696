"""A node that routes to a pod whose address is of another network: packets both ways, both families; and the
home of two such pods, when one comes back.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from cluster import agent, config, wiring
from cluster.away import Absence, Absent, keep_passing
from cluster.here import Here
from netmig import nft, rtnl
from netmig.apply import MAIN, PROTOCOL, apply, attach, check, plug_routed
from netmig.capture import capture
from netmig.identity import Identity, diff, encode, global_addresses
from netmig.ns import Netns
from tests.support.pods import BRIDGE, Nodes, add_veth, bridge_network, cni, nodes

pytestmark = pytest.mark.engine

CLIENT = {4: "192.168.5.2", 6: "fd05::2"}
POD = {4: "10.88.0.10", 6: "fd00:88::10"}
VIA = ("192.168.5.1", "fd05::1")


@pytest.fixture
def made(tmp_path: Path) -> Generator[Nodes]:
    with nodes(tmp_path / "ns") as these:
        yield these


def routed_node(made: Nodes, client: Netns) -> Netns:
    """A node without the pod's network, connected with a client; by `VIA` it is reached."""
    node = made.node("b", bridges=("other0",))
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
    # A pod's host end, made after this, asks for nobody until its own address is proved: half a minute.
    for name, value in (("all/accept_dad", "1"), ("default/dad_transmits", "30")):
        node.set_sysctl(f"net/ipv6/conf/{name}", value)
    node.set_sysctl("net/ipv4/conf/default/forwarding", "0")  # nor does it forward, as the node's others do
    return node


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


def connects(caller: Netns, called: Netns, address: str) -> None:
    """Connect by TCP and have a word sent back."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with called.inside():
        listener = socket.create_server((address, 7777), family=family)
    with caller.inside():
        client = socket.socket(family)
    with listener, client:
        listener.settimeout(10)
        client.settimeout(10)
        client.connect((address, 7777))
        with listener.accept()[0] as server:
            server.sendall(b"word")
            assert client.recv(100) == b"word"


def ways(pod: Netns) -> set[tuple[str, int]]:
    """Where it has IPv6 routes to, and who made them: `capture` leaves out what is no part of an identity."""
    with pod.ipr() as ipr:
        listed = rtnl.routes(ipr, socket.AF_INET6, MAIN)
    return {(one.attributes.get("RTA_DST", "::"), one.header["proto"]) for one in listed}


@pytest.mark.parametrize("version", [4, 6])
def test_packets_go_both_ways(made: Nodes, tmp_path: Path, version: int) -> None:
    a = made.node("a")
    pod, other = made.empty("pod"), made.empty("other")
    cni(a, "ADD", "pod", pod, bridge_network(tmp_path / "a", first=10))
    identity = capture(pod, a)
    client = made.empty("client")
    node = routed_node(made, client)
    before = capture(node, None)
    assert check(identity, other, node, routed=True, peers=list(CLIENT.values())) == []

    applied = apply(identity, other, node, adopt=False, neighbours=False, routed=True)
    unplugged = ways(other)
    attached = attach(other, node)
    plug_routed(attached, node, global_addresses(identity))
    assert ways(other) > unplugged
    attached.undo()
    assert ways(other) == unplugged
    plug_routed(applied, node, global_addresses(identity))

    assert asks(client, other, POD[version]) == CLIENT[version]
    assert asks(other, client, CLIENT[version]) == POD[version]
    assert diff(identity, capture(other, node)) == []
    applied.undo()
    assert diff(before, capture(node, None)) == []


def moved(
    made: Nodes, home: Netns, node: Netns, name: str, network: dict[str, Any]
) -> tuple[Netns, Identity]:
    """A pod that has left its home for a node that routes to it; the home knows nothing of that yet."""
    old, new = made.empty(f"{name}-old"), made.empty(name)
    cni(home, "ADD", name, old, network)
    identity = capture(old, home)
    with old.ipr() as ipr:
        rtnl.link(ipr, "del", index=ipr.link_lookup(ifname="eth0")[0])
    applied = apply(identity, new, node, adopt=False, neighbours=False, routed=True)
    plug_routed(applied, node, global_addresses(identity))
    return new, identity


def test_what_is_away_and_its_old_neighbours_reach_each_other(made: Nodes, tmp_path: Path) -> None:
    home, network = made.node("a"), bridge_network(tmp_path / "a", first=10)
    node, near = routed_node(made, home), made.empty("near")
    cni(home, "ADD", "near", near, network)
    stays = global_addresses(capture(near, home))
    here = Here(config=config.Config(node="a", state=tmp_path / "state"), node=cast("Any", None))
    away: list[tuple[Netns, Identity]] = []
    for name in ("0" * 16, "1" * 16):
        pod, identity = moved(made, home, node, name, network)
        absent = Absent(migration=name, owner=name, identity=encode(identity), peer="b", via=VIA)
        with home.inside():
            Absence.begin(here, absent).send_on()
        away.append((pod, identity))
        for one, its in away:
            for there in global_addresses(its):
                connects(near, one, there.ip)
            for there in stays:
                connects(one, near, there.ip)
            assert diff(its, capture(one, node)) == []  # what it takes home
    connects(away[0][0], away[1][0], next(one.ip for one in global_addresses(away[1][1]) if one.version == 6))


def on_the_lan(lan: Netns, host: Netns, last: int) -> None:
    """Connect a host with others; the pods' network is behind the first of them, their home."""
    add_veth(host, lan, "uplink", f"to{last}", mac=f"02:00:00:00:05:0{last}", bridge="lan0", mtu=1500)
    with host.ipr() as ipr:
        index = ipr.link_lookup(ifname="uplink")[0]
        ipr.addr("add", index=index, address=f"192.168.5.{last}", prefixlen=24)
        ipr.addr("add", index=index, address=f"fd05::{last}", prefixlen=64, flags=2)  # no probe
        if last != 1:
            for one in ipr.link_lookup(kind="bridge"):
                ipr.flush_addr(index=one)
            ipr.route("add", dst="10.88.0.0/16", gateway="192.168.5.1")
            ipr.route("add", family=socket.AF_INET6, dst="fd00:88::/64", gateway="fd05::1")


def put(pod: Netns, end: str, old: Netns, new: Netns, bridge: str | None) -> None:
    """Let a pod's host end be another node's, as if the pod had moved with its sockets."""
    with old.ipr() as ipr:
        ipr.link("set", index=ipr.link_lookup(ifname=end)[0], net_ns_fd=new.fileno())
    with new.ipr() as ipr:
        master = ipr.link_lookup(ifname=bridge)[0] if bridge else 0
        ipr.link("set", index=ipr.link_lookup(ifname=end)[0], master=master, state="up")
    with pod.inside():  # a moved one has its gateway's MAC to learn
        subprocess.run(["ip", "neigh", "flush", "dev", "eth0"], check=True)


def much(one: socket.socket, other: socket.socket) -> None:
    """More both ways than any window is wide."""
    n_bytes = 16 << 20
    for sender, receiver in ((one, other), (other, one)):
        with ThreadPoolExecutor(1) as beside:
            sending = beside.submit(sender.sendall, bytes(n_bytes))
            left = n_bytes
            while left:
                left -= len(receiver.recv(1 << 20))
            sending.result()


def test_nodes_that_drop_what_they_take_for_invalid(made: Nodes, tmp_path: Path) -> None:
    """A client's way to the pod that is away is by its home, and the pod's to the client is not."""
    lan, network = made.empty("lan"), bridge_network(tmp_path / "a", first=10)
    with lan.ipr() as ipr:
        ipr.link("add", ifname="lan0", kind="bridge")
        ipr.link("set", index=ipr.link_lookup(ifname="lan0")[0], state="up")
    home, node, client = (made.node(name) for name in "abc")
    for last, host in enumerate((home, node, client), 1):
        on_the_lan(lan, host, last)
    pod, near = made.empty("pod"), made.empty("near")
    cni(home, "ADD", "pod", pod, network)
    cni(home, "ADD", "near", near, network)
    rule = "type filter hook forward priority 0; ct state invalid drop;"
    for host in (home, node):
        nft.run(host, f"table inet drops {{\nchain forward {{ {rule} }}\n}}")
    before, identity = capture(home, None), capture(pod, home)
    end = next(link.host.name for link in identity.links if link.host)
    addresses = global_addresses(identity)
    four = next(one.ip for one in addresses if one.version == 4)
    with pod.inside():
        listener = socket.create_server((four, 7776))
        listener.settimeout(30)
    with contextlib.ExitStack() as stack, listener:
        pairs: list[tuple[socket.socket, socket.socket]] = []

        def opened() -> None:
            with client.inside():
                one = stack.enter_context(socket.create_connection((four, 7776), timeout=30))
            other = stack.enter_context(listener.accept()[0])
            other.settimeout(30)  # also for all of a `sendall`
            pairs.append((one, other))

        def go_on() -> None:
            for pair in pairs:
                much(*pair)

        opened()
        go_on()
        for name in ("0" * 16, "1" * 16):
            put(pod, end, home, node, None)
            applied = attach(pod, node)
            plug_routed(applied, node, addresses)
            here = Here(config=config.Config(node="a", state=tmp_path / "state"), node=cast("Any", None))
            via = ("192.168.5.2", "fd05::2")
            absent = Absent(migration=name, owner="0", identity=encode(identity), peer="b", via=via)
            with home.inside():
                absence = Absence.begin(here, absent)
                absence.send_on()
                absence.send_on()  # as by an agent that starts anew
            opened()
            go_on()
            for one in addresses:
                connects(client, pod, one.ip)
                connects(near, pod, one.ip)  # both ways by its home
            connects(pod, client, "192.168.5.3")
            with home.inside():
                absence.come_home()
            applied.undo()
            with node.inside():
                wiring.unroute(identity)
            put(pod, end, node, home, BRIDGE)
            go_on()
            with home.inside():
                absence.end()
            go_on()
    after = capture(home, None)
    assert (after.nftables, after.routes) == (before.nftables, before.routes)


@pytest.mark.parametrize("translated", [False, True])
def test_a_home_that_both_ways_lead_by_tracks_them(made: Nodes, tmp_path: Path, translated: bool) -> None:
    """It is the gateway of the node that the pod is on, and may translate."""
    home, network = made.node("a"), bridge_network(tmp_path / "a", first=10)
    node, client = routed_node(made, home), made.empty("client")
    add_veth(client, home, "eth0", "wide", mac="02:00:00:00:06:01", bridge=None, mtu=1500)
    for netns, name, last in ((home, "wide", 1), (client, "eth0", 2)):
        with netns.ipr() as ipr:
            index = ipr.link_lookup(ifname=name)[0]
            ipr.addr("add", index=index, address=f"192.168.6.{last}", prefixlen=24)
            ipr.route(
                "add", dst="10.0.0.0/8" if last == 2 else "10.9.0.0/16", gateway=f"192.168.6.{3 - last}"
            )
    rules = (
        "type filter hook forward priority 0; policy drop; ct state established accept; ct state new accept;"
    )
    nft.run(home, f"table inet drops {{\nchain forward {{ {rules} }}\n}}")
    if translated:
        rules = "type nat hook postrouting priority 100; oifname wide masquerade;"
        nft.run(home, f"table inet nat {{\nchain out {{ {rules} }}\n}}")
    pod, identity = moved(made, home, node, "pod", network)
    here = Here(config=config.Config(node="a", state=tmp_path / "state"), node=cast("Any", None))
    absent = Absent(migration="0" * 16, owner="0", identity=encode(identity), peer="b", via=VIA)
    with home.inside():
        Absence.begin(here, absent).send_on()
    connects(client, pod, POD[4])
    connects(pod, client, "192.168.6.2")
    assert asks(pod, client, "192.168.6.2") == ("192.168.6.1" if translated else POD[4])


def test_the_first_of_two_to_come_home_takes_nothing_from_the_other(made: Nodes, tmp_path: Path) -> None:
    home, network = made.node("a"), bridge_network(tmp_path / "a", first=10)
    node, near = routed_node(made, home), made.empty("near")
    cni(home, "ADD", "near", near, network)
    (_, back), (pod, stays) = (moved(made, home, node, name, network) for name in ("back", "stays"))
    home.set_sysctl(f"net/ipv4/conf/{BRIDGE}/forwarding", "0")
    before = capture(home, None)
    here = Here(config=config.Config(node="a", state=tmp_path / "state"), node=cast("Any", None))

    def sent_away(name: str, identity: Identity) -> Absence:
        absent = Absent(migration=name, owner=name, identity=encode(identity), peer="b", via=VIA)
        with home.inside():
            absence = Absence.begin(here, absent)
            absence.send_on()
        return absence

    def neighbours_reach_it() -> None:
        with near.inside():
            subprocess.run(["ip", "neigh", "flush", "dev", "eth0"], check=True)
        asks(near, pod, next(one.ip for one in global_addresses(stays) if one.version == 4))
        assert home.sysctl(f"net/ipv6/conf/{BRIDGE}/proxy_ndp") == "1"

    def sent_on() -> set[str]:
        routes = capture(home, None).routes
        return {one.destination.partition("/")[0] for one in routes if one.protocol == PROTOCOL}

    def let_pass() -> set[str]:
        sets = (one["set"] for one in nft.run(home, "list ruleset") if "set" in one)
        return {ip for one in sets if one["table"] == "torpor-away" for ip in one["elem"]}

    first, last = sent_away("0" * 16, back), sent_away("1" * 16, stays)
    neighbours_reach_it()
    nft.run(home, "flush ruleset")  # as a restart of nftables.service does
    with home.inside():
        keep_passing(here)
        assert let_pass() == {one.ip for each in (back, stays) for one in global_addresses(each)}
        first.come_home()
        agent._send_on(here)  # pyright: ignore[reportPrivateUsage]
    assert sent_on() == {one.ip for one in global_addresses(stays)}
    with home.inside():
        first.end()
    neighbours_reach_it()
    assert let_pass() == {one.ip for one in global_addresses(stays)}
    with home.inside():
        last.end()
    assert diff(before, capture(home, None)) == []
    assert list(here.config.away.iterdir()) == []
