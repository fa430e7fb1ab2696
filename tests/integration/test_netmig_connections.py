"""Peers of connections that nobody serves: kept waiting by a guard, or told that it is over."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from netmig import nft
from netmig.connections import Connection, farewell, guard, guard_name, unguard
from netmig.ns import Netns
from tests.support.containers import command, tool

pytestmark = pytest.mark.engine

PORT = 7000
TCP_REPAIR = 19
FOUR, SIX = "10.79.1.2", "fd00:79:1::2"


class Wire:
    """A pod and a peer on a bridge of a node, each a namespace; the node has an address too."""

    def __init__(self, name: str) -> None:
        self.names = {place: f"{name}{place}" for place in ("node", "pod", "peer")}
        for namespace in self.names.values():
            command("ip", "netns", "add", namespace)
            command("ip", "-n", namespace, "link", "set", "lo", "up")
        self.run("node", "ip link add cni0 type bridge forward_delay 0")
        self.run("node", "ip link set cni0 up")
        self.addresses("node", "cni0", 1)
        for number, place in ((2, "pod"), (3, "peer")):
            self.run("node", f"ip link add {place} type veth peer name eth0 netns {self.names[place]}")
            self.run("node", f"ip link set {place} master cni0 up")
            self.run(place, "ip link set eth0 up")
            self.addresses(place, "eth0", number)
        self.spaces = {place: Netns.open(Path("/run/netns", one)) for place, one in self.names.items()}

    def addresses(self, place: str, device: str, number: int) -> None:
        self.run(place, f"ip address add 10.79.1.{number}/24 dev {device}")
        self.run(place, f"ip address add fd00:79:1::{number}/64 dev {device} nodad")

    def run(self, place: str, words: str) -> None:
        command("ip", "netns", "exec", self.names[place], *words.split())

    def close(self) -> None:
        for space in self.spaces.values():
            space.close()
        for name in self.names.values():
            command("ip", "netns", "delete", name, check=False)


@pytest.fixture
def wire() -> Iterator[Wire]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    nft.use_program(tool("nft"))
    made = Wire(f"tpcn{os.getpid() % 0xFFFF:x}")
    yield made
    made.close()
    nft.use_program(None)


def connect(wire: Wire, place: str, ip: str) -> tuple[socket.socket, socket.socket, socket.socket]:
    """A listener in the pod, its end of a connection from a place, and that place's."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with wire.spaces["pod"].inside():
        listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((ip, PORT))
    listener.listen()
    listener.settimeout(10)
    with wire.spaces[place].inside():
        client = socket.socket(family)
    client.settimeout(10)
    client.connect((ip, PORT))
    return listener, listener.accept()[0], client


def end_in_silence(server: socket.socket) -> None:
    """What becomes of a connection whose process was dumped: it is gone, and nothing was sent."""
    server.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    server.close()


def of(client: socket.socket) -> Connection:
    local, remote = client.getpeername(), client.getsockname()
    return Connection(local=local[0], local_port=local[1], remote=remote[0], remote_port=remote[1])


@pytest.mark.parametrize("ip", [FOUR, SIX])
@pytest.mark.parametrize("listening", [True, False], ids=["listening", "nobody"])
def test_an_idle_peer_learns_that_its_connection_is_closed(wire: Wire, ip: str, listening: bool) -> None:
    listener, server, client = connect(wire, "peer", ip)
    with listener, client:
        end_in_silence(server)
        if not listening:
            listener.close()
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)
        assert farewell(wire.spaces["pod"], [of(client)]) == 1
        client.settimeout(10)
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_a_connection_that_goes_on_is_not_harmed_by_a_farewell(wire: Wire) -> None:
    listener, server, client = connect(wire, "peer", FOUR)
    with listener, server, client:
        farewell(wire.spaces["pod"], [of(client)])
        client.sendall(b"on")
        assert server.recv(2) == b"on"
        server.sendall(b"and on")
        assert client.recv(6) == b"and on"


def test_who_cannot_be_told_is_not_counted(wire: Wire) -> None:
    far = Connection(local=FOUR, local_port=PORT, remote="192.0.2.77", remote_port=1)
    other = Connection(local="10.79.1.99", local_port=PORT, remote="10.79.1.3", remote_port=1)
    assert farewell(wire.spaces["pod"], [far, other]) == 0


@pytest.mark.parametrize("ip", [FOUR, SIX])
@pytest.mark.parametrize("place", ["node", "peer"])
def test_a_guarded_connection_waits_where_others_get_through(wire: Wire, place: str, ip: str) -> None:
    listener, server, client = connect(wire, place, ip)
    table = guard_name("a1b2-c3")
    with listener, client:
        assert guard(wire.spaces["node"], table, [of(client)])
        end_in_silence(server)
        client.sendall(b"lost")  # the pod's kernel would answer with a reset
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.recv(1)
        other = connect_again(wire, place, ip)
        accepted, _ = listener.accept()
        other.sendall(b"through")
        assert accepted.recv(7) == b"through"
        other.close()
        accepted.close()
        assert unguard(wire.spaces["node"], table)
        assert not unguard(wire.spaces["node"], table)
        client.settimeout(30)
        with pytest.raises(ConnectionResetError):  # at its next retransmission
            client.recv(1)


def connect_again(wire: Wire, place: str, ip: str) -> socket.socket:
    with wire.spaces[place].inside():
        client = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    client.settimeout(10)
    client.connect((ip, PORT))
    return client


def test_a_guard_may_be_set_again_and_of_nothing_is_none(wire: Wire) -> None:
    table = guard_name("x")
    node = wire.spaces["node"]
    assert guard(node, table, [])
    assert not unguard(node, table)
    one = Connection(local=FOUR, local_port=PORT, remote="10.79.1.3", remote_port=40000)
    many = [
        Connection(local=SIX, local_port=PORT, remote=str(ipaddress.ip_address(number)), remote_port=1)
        for number in range(1 << 100, (1 << 100) + 1000)
    ]
    for _ in range(2):
        assert guard(node, table, [one, *many])
    listed = nft.run(node, "list ruleset")
    sets = [entry["set"] for entry in listed if "set" in entry and entry["set"]["family"] == "inet"]
    assert sorted(len(one["elem"]) for one in sets) == [1, 1000]
    assert unguard(node, table)
    assert nft.run(node, "list tables") == []
