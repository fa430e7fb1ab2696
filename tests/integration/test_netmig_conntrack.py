"""A connection to a Service goes on by way of another node, which has the first one's translations."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator
from pathlib import Path

import pytest
from pyroute2.netlink.exceptions import NetlinkError

from netmig import conntrack, hold, nft
from netmig.capture import capture
from netmig.check import leads
from netmig.errors import NetworkError
from netmig.ns import Netns
from tests.support.segment import BRIDGE, Member, Segment, in_netns, segment, until

pytestmark = pytest.mark.engine

SERVICE = {False: "10.96.0.1", True: "fd96::1"}
PORT = 80


@pytest.fixture
def wire(tmp_path: Path) -> Generator[Segment]:
    with segment(tmp_path / "one") as made:
        yield made


class Node:
    """A router between pods and backends that translates the Service's address."""

    def __init__(self, path: Path, name: str, wire: Segment, number: int, backend: Member) -> None:
        self.netns = Netns.create(path / name)
        with self.netns.ipr() as ipr, wire.node.ipr() as outside:
            ipr.link("set", index=1, state="up")
            ipr.link("add", ifname="up0", kind="veth", peer={"ifname": name, "net_ns_fd": wire.node.fileno()})
            ipr.link("add", ifname="pods0", kind="bridge", address="02:77:00:00:01:01")
            for ifname in ("up0", "pods0"):
                self.netns.set_sysctl(f"net/ipv6/conf/{ifname}/accept_dad", "0")
                ipr.link("set", index=ipr.link_lookup(ifname=ifname)[0], state="up")
            bridge = outside.link_lookup(ifname=BRIDGE)[0]
            outside.link("set", index=outside.link_lookup(ifname=name)[0], master=bridge, state="up")
            up, pods = (ipr.link_lookup(ifname=one)[0] for one in ("up0", "pods0"))
            ipr.addr("add", index=up, address=f"10.77.0.{number}", prefixlen=24)
            ipr.addr("add", index=up, address=f"fd77::{number:x}", prefixlen=64)
            ipr.addr("add", index=pods, address="10.88.0.1", prefixlen=24)
            ipr.addr("add", index=pods, address="fd88::1", prefixlen=64)
        for name_ in ("net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"):
            self.netns.set_sysctl(name_, "1")
        self.number, self.ip4, self.ip6 = number, f"10.77.0.{number}", f"fd77::{number:x}"
        nft.run(
            self.netns,
            f"""table inet services {{
 chain in {{
  type nat hook prerouting priority dstnat
  ip daddr {SERVICE[False]} tcp dport {PORT} dnat ip to {backend.ip4}:8080
  ip6 daddr {SERVICE[True]} tcp dport {PORT} dnat ip6 to [{backend.ip6}]:8080
 }}
}}
""",
        )

    def serve(self, other: str) -> None:
        """From now on new connections go to another backend, as kube-proxy's choice is random."""
        nft.run(self.netns, "flush chain inet services in")
        family = "ip6" if ":" in other else "ip"
        target = f"[{other}]" if ":" in other else other
        nft.run(
            self.netns,
            f"add rule inet services in {family} daddr {SERVICE[':' in other]} tcp dport {PORT} "
            f"dnat {family} to {target}:8080",
        )

    def plug(self, pod: Netns, name: str) -> None:
        """A pod with 10.88.0.5 and fd88::5 whose eth0 is in this node's bridge."""
        with pod.ipr() as ipr, self.netns.ipr() as node:
            peer = {"ifname": name, "net_ns_fd": self.netns.fileno()}
            ipr.link("add", ifname="eth0", kind="veth", address="02:88:00:00:00:05", peer=peer)
            pod.set_sysctl("net/ipv6/conf/eth0/accept_dad", "0")
            bridge = node.link_lookup(ifname="pods0")[0]
            node.link("set", index=node.link_lookup(ifname=name)[0], master=bridge, state="up")
            index = ipr.link_lookup(ifname="eth0")[0]
            ipr.link("set", index=index, state="up")
            ipr.addr("add", index=index, address="10.88.0.5", prefixlen=24)
            ipr.addr("add", index=index, address="fd88::5", prefixlen=64)
            ipr.route("add", dst="default", gateway="10.88.0.1")
            ipr.route("add", family=socket.AF_INET6, dst="default", gateway="fd88::1")

    def move(self, pod: Netns, name: str) -> None:
        """Take a pod's interface away from its node and give it another one on this node."""
        with pod.ipr() as ipr:
            ipr.link("del", index=ipr.link_lookup(ifname="eth0")[0])
        self.plug(pod, name)

    def house(self, path: Path) -> Member:
        """Somebody who is on this node, as another pod."""
        netns, ip4, ip6 = Netns.create(path), f"10.89.{self.number}.{{}}", f"fd89:{self.number}::{{}}"
        with netns.ipr() as ipr, self.netns.ipr() as node:
            peer = {"ifname": "house0", "net_ns_fd": self.netns.fileno()}
            ipr.link("add", ifname="eth0", kind="veth", peer=peer)
            for last, where, here, name in ((1, self.netns, node, "house0"), (2, netns, ipr, "eth0")):
                where.set_sysctl(f"net/ipv6/conf/{name}/accept_dad", "0")
                index = here.link_lookup(ifname=name)[0]
                here.link("set", index=index, state="up")
                here.addr("add", index=index, address=ip4.format(last), prefixlen=24)
                here.addr("add", index=index, address=ip6.format(last), prefixlen=64)
            ipr.route("add", dst="default", gateway=ip4.format(1))
            ipr.route("add", family=socket.AF_INET6, dst="default", gateway=ip6.format(1))
        return Member(netns=netns, port="house0", ip4=ip4.format(2), ip6=ip6.format(2), mac="")

    def reaches(self, other: Node) -> None:
        """Those on the other node by that node."""
        with self.netns.ipr() as ipr:
            ipr.route("add", dst=f"10.89.{other.number}.0/24", gateway=other.ip4)
            ipr.route("add", family=socket.AF_INET6, dst=f"fd89:{other.number}::/64", gateway=other.ip6)

    def lead(self, to: Node) -> None:
        """The pod is on the other node from now on, and no more on this one."""
        for node, change, way in ((self, "replace", to), (to, "del", self)):
            with node.netns.ipr() as ipr, contextlib.suppress(NetlinkError):  # there may be none to delete
                ipr.route(change, dst="10.88.0.5/32", gateway=way.ip4)
            with node.netns.ipr() as ipr, contextlib.suppress(NetlinkError):
                ipr.route(change, family=socket.AF_INET6, dst="fd88::5/128", gateway=way.ip6)

    def close(self) -> None:
        self.netns.remove()


def _route_back(backend: Member, node: Node) -> None:
    with backend.netns.ipr() as ipr:
        ipr.route("replace", dst="10.88.0.0/24", gateway=node.ip4)
        ipr.route("replace", family=socket.AF_INET6, dst="fd88::/64", gateway=node.ip6)


@pytest.mark.parametrize("ipv6", [False, True], ids=["ipv4", "ipv6"])
@pytest.mark.parametrize("carried", [True, False], ids=["carried", "left behind"])
def test_a_connection_to_a_service_moves(wire: Segment, tmp_path: Path, carried: bool, ipv6: bool) -> None:
    backend, other = wire.add("backend", 30), wire.add("other", 31)
    old, new = (Node(tmp_path, f"n{number}", wire, number, backend) for number in (41, 42))
    pod = Netns.create(tmp_path / "pod")
    try:
        old.plug(pod, "pod")
        _route_back(backend, old)
        _route_back(other, new)
        new.serve(other.addresses[ipv6])
        with (
            in_netns(backend.netns, socket.SOCK_STREAM, ipv6=ipv6) as listener,
            in_netns(pod, socket.SOCK_STREAM, ipv6=ipv6) as near,
        ):
            listener.bind((backend.addresses[ipv6], 8080))
            listener.listen()
            near.settimeout(10)
            near.connect((SERVICE[ipv6], PORT))
            far, _ = listener.accept()
            far.settimeout(10)
            near.sendall(b"before")
            assert far.recv(100) == b"before"

            ip = near.getsockname()[0]
            hold.lock(pod, hold.table_name("pod"))
            entries, left = conntrack.capture(old.netns, [ip])
            assert left == ()
            [entry] = entries
            assert entry.original.dst == SERVICE[ipv6]
            assert (entry.reply.src, entry.reply.src_port) == (backend.addresses[ipv6], 8080)
            if carried:
                assert conntrack.restore(new.netns, entries) == ()
                assert conntrack.restore(new.netns, entries) == (), "again does no harm"
                [same], _ = conntrack.capture(new.netns, [ip])
                assert (same.original, same.reply) == (entry.original, entry.reply)
            new.move(pod, "pod2")
            _route_back(backend, new)
            hold.unlock(pod, hold.table_name("pod"))

            near.sendall(b"after")
            if not carried:
                with pytest.raises(ConnectionResetError):
                    near.recv(100)
                return
            assert far.recv(100) == b"after"
            far.sendall(b"and back")
            assert near.recv(100) == b"and back"
            far.close()
    finally:
        for one in (pod, old.netns, new.netns):
            one.remove()


@pytest.mark.parametrize("ipv6", [False, True], ids=["ipv4", "ipv6"])
@pytest.mark.parametrize("beside", ["source", "target"])
@pytest.mark.parametrize("opens", [True, False], ids=["opened by the pod", "opened to the pod"])
def test_a_connection_goes_on_with_who_is_on_either_node(
    wire: Segment, tmp_path: Path, opens: bool, beside: str, ipv6: bool
) -> None:
    """Both nodes see its packets, and one of them translates; there and back again."""
    some = wire.add("some", 30)
    old, new = (Node(tmp_path, f"n{number}", wire, number, some) for number in (41, 42))
    pod = Netns.create(tmp_path / "pod")
    other = (old if beside == "source" else new).house(tmp_path / "other")
    try:
        old.plug(pod, "pod")
        new.lead(old)
        old.reaches(new)
        new.reaches(old)
        ip = "fd88::5" if ipv6 else "10.88.0.5"
        caller, called, backend = (
            (pod, other.netns, other.addresses[ipv6]) if opens else (other.netns, pod, ip)
        )
        for node in (old, new):
            node.serve(backend)
        with (
            in_netns(called, socket.SOCK_STREAM, ipv6=ipv6) as listener,
            in_netns(caller, socket.SOCK_STREAM, ipv6=ipv6) as client,
        ):
            listener.bind((backend, 8080))
            listener.listen()
            client.settimeout(10)
            client.connect((SERVICE[ipv6], PORT))
            server, _ = listener.accept()
            with server:
                server.settimeout(10)
                _talk(client, server)
                for source, target, name in ((old, new, "pod2"), (new, old, "pod3")):
                    hold.lock(pod, hold.table_name("pod"))  # or an acknowledgement would be translated anew
                    entries, left = conntrack.capture(source.netns, [ip])
                    assert (len(entries), left) == (int(opens), ())
                    conntrack.forget(source.netns, entries)
                    conntrack.forget(source.netns, entries)  # again does no harm
                    assert conntrack.capture(source.netns, [ip]) == ((), ())
                    assert conntrack.restore(target.netns, entries) == ()
                    target.move(pod, name)
                    source.lead(target)
                    hold.unlock(pod, hold.table_name("pod"))
                    _talk(client, server)
    finally:
        for one in (pod, other.netns, old.netns, new.netns):
            one.remove()


@pytest.mark.parametrize("filters", ["0", "1"], ids=["a bridge alone", "a bridge with br_netfilter"])
def test_who_does_not_see_what_the_pod_sends_does_not_translate_it(
    wire: Segment, tmp_path: Path, filters: str
) -> None:
    """One segment of pods over both nodes, with its gateway on the old one."""
    backend, other = wire.add("backend", 30), wire.add("other", 31)
    old, new = (Node(tmp_path, f"n{number}", wire, number, backend) for number in (41, 42))
    pod = Netns.create(tmp_path / "pod")
    try:
        for node in (old, new):
            with contextlib.suppress(NetworkError):  # the module need not be there
                for family in ("iptables", "ip6tables"):
                    node.netns.set_sysctl(f"net/bridge/bridge-nf-call-{family}", filters)
        old.plug(pod, "pod")
        for one in (backend, other):
            _route_back(one, old)
        identity = capture(pod, old.netns)
        assert leads(identity, old.netns)
        with (
            in_netns(backend.netns, socket.SOCK_STREAM) as listener,
            in_netns(pod, socket.SOCK_STREAM) as near,
        ):
            listener.bind((backend.ip4, 8080))
            listener.listen()
            near.settimeout(10)
            near.connect((SERVICE[False], PORT))
            far, _ = listener.accept()
            with far:
                far.settimeout(10)
                _talk(near, far)
                hold.lock(pod, hold.table_name("pod"))
                with old.netns.ipr() as one, new.netns.ipr() as two:
                    one.link(
                        "add",
                        ifname="pods1",
                        kind="veth",
                        peer={"ifname": "x", "net_ns_fd": new.netns.fileno()},
                    )
                    for ipr, name in ((one, "pods1"), (two, "x")):
                        [index], [bridge] = ipr.link_lookup(ifname=name), ipr.link_lookup(ifname="pods0")
                        ipr.link("set", index=index, master=bridge, state="up")
                    two.flush_addr(index=bridge)
                    two.link("set", index=bridge, address="02:77:00:00:01:02")
                entries, _ = conntrack.capture(old.netns, [near.getsockname()[0]])
                if leads(identity, new.netns):
                    conntrack.forget(old.netns, entries)
                assert conntrack.restore(new.netns, entries) == ()
                for node in (old, new):
                    node.serve(other.ip4)
                new.move(pod, "pod2")
                with pod.ipr() as ipr:  # as it comes with a pod
                    mac, [index] = "02:77:00:00:01:01", ipr.link_lookup(ifname="eth0")
                    ipr.neigh("replace", dst="10.88.0.1", lladdr=mac, ifindex=index, state=0x80)
                hold.unlock(pod, hold.table_name("pod"))
                _talk(near, far)
    finally:
        for netns in (pod, old.netns, new.netns):
            netns.remove()


def _talk(client: socket.socket, server: socket.socket) -> None:
    for one, other in ((client, server), (server, client)) * 2:
        one.sendall(b"a word")
        assert other.recv(100) == b"a word"


def test_what_leaves_by_the_nodes_address_is_told(wire: Segment, tmp_path: Path) -> None:
    backend = wire.add("backend", 30)
    node = Node(tmp_path, "n43", wire, 43, backend)
    pod = Netns.create(tmp_path / "pod")
    try:
        node.plug(pod, "pod")
        nft.run(
            node.netns,
            "table inet out {\n chain out {\n type nat hook postrouting priority srcnat\n"
            ' oifname "up0" masquerade\n }\n}\n',
        )
        with (
            in_netns(backend.netns, socket.SOCK_STREAM) as listener,
            in_netns(pod, socket.SOCK_STREAM) as near,
        ):
            listener.bind((backend.ip4, 8080))
            listener.listen()
            near.settimeout(10)
            near.connect((backend.ip4, 8080))
            until(lambda: conntrack.capture(node.netns, ["10.88.0.5"])[1] != ())
            entries, [sentence] = conntrack.capture(node.netns, ["10.88.0.5"])
        assert entries == ()
        assert sentence.startswith("TCP 10.88.0.5 port ")
        assert "leaves by 10.77.0.43, the old node's address: it will be reset" in sentence
        assert conntrack.capture(node.netns, ["10.88.0.6"]) == ((), ())
    finally:
        pod.remove()
        node.close()
