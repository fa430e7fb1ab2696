"""A pod with live TCP clients sleeps, and wakes in another pod: `keep`, `keep-closed` and `new`."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from netmig.identity import decode, global_addresses
from netmig.ns import Netns
from tests.support.containerd import Containerd
from tests.support.containers import command, tool, until
from tests.support.cri import Container, Cri, Pod
from tests.support.network import Echo, Lines
from tests.support.soak import SOAK
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine

PORT = 7000
LIVE = ("/usr/bin/python3", "-IS", "-u", "/workloads/live.py", "--port", str(PORT))
WAIT_S = 60.0


@pytest.fixture
def neighbour(daemon: Containerd) -> Iterator[str]:
    """A namespace on the pods' bridge, as another pod is."""
    name = f"tpnm{os.getpid() % 0xFFFF:x}"
    network = ipaddress.ip_network(subnet(daemon))
    daemon_up(daemon)
    command("ip", "netns", "add", name)
    command(*f"ip link add {name}h type veth peer name eth0 netns {name}".split())
    command(*f"ip link set {name}h master {daemon.bridge} up".split())
    command(*f"ip -n {name} address add {network[200]}/{network.prefixlen} dev eth0".split())
    command(*f"ip -n {name} link set eth0 up".split())
    yield name
    command("ip", "link", "delete", f"{name}h", check=False)
    command("ip", "netns", "delete", name)


def daemon_up(daemon: Containerd) -> None:
    """The plugin makes the bridge with the first pod."""
    until(lambda: Path(f"/sys/class/net/{daemon.bridge}").exists(), what="the bridge is there")


def subnet(daemon: Containerd) -> str:
    conf = json.loads((daemon.path / "cni" / "10-torpor.conflist").read_text())
    return conf["plugins"][0]["ipam"]["ranges"][0][0]["subnet"]


def leases(daemon: Containerd, tag: str) -> Path:
    return daemon.path / "ipam" / tag


def pin(daemon: Containerd, tag: str, address: str) -> None:
    """Let the plugin give this address next: it goes on from the one that it gave last."""
    (leases(daemon, tag) / "last_reserved_ip.0").write_text(str(ipaddress.ip_address(address) - 1))


def asleep(container: Container, daemon: Containerd, torpor: Torpor, *options: str) -> None:
    torpor(
        *("checkpoint", container.id, "--root", daemon.runc_root / "k8s.io", "--name", "net"),
        *("--stop", *options),
    )
    until(lambda: container.state == "EXITED", what="containerd knows that it has ended")


def woken(cri: Cri, mode: str, **more: str) -> Pod:
    notes = {"torpor.dev/restore-from.main": "net", "torpor.dev/network.main": mode, **more}
    return cri.pod("new", annotations=notes)


def addresses(pod: Pod) -> list[str]:
    listing = command("nsenter", "-t", str(pod.pid), "-n", "ip", "-json", "address", "show").stdout
    return [
        one["local"] for link in json.loads(listing) for one in link["addr_info"] if one["scope"] == "global"
    ]


def tables(pod: Pod | None) -> list[str]:
    """Names of torpor's and CRIU's tables in a pod's namespace, or the node's guards."""
    inside = ("nsenter", "-t", str(pod.pid), "-n") if pod else ()
    words = [line.split()[-1] for line in command(*inside, tool("nft"), "list", "tables").stdout.splitlines()]
    return [word for word in words if word.startswith("torpor-guard-" if pod is None else ("torpor", "CRIU"))]


def held(torpor: Torpor) -> list[Path]:
    return [path for path in (torpor.state_path / "net").glob("*/*") if path.is_file()]


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "adopted"])
def test_clients_go_on_with_a_pod_that_slept(
    cri: Cri,
    daemon: Containerd,
    torpor: Torpor,
    tag: str,
    request: pytest.FixtureRequest,
    pinned: bool,
) -> None:
    image = daemon.image("python")
    old = cri.pod("old")
    source = old.run("main", LIVE, image=image)
    source.until_number(3)
    address = old.ip
    with Netns.open(Path("/run/netns", request.getfixturevalue("neighbour"))) as neighbour:
        clients = [Echo(address, PORT), Echo(address, PORT, neighbour)]
    quiet = socket.create_connection((address, PORT), timeout=WAIT_S)
    try:
        asleep(source, daemon, torpor, "--keep-tcp")
        document = (torpor.image_path("net", namespace="default") / "network.json").read_bytes()
        assert [one.ip for one in global_addresses(decode(document))] == [address]
        assert len(tables(None)) == 2, "a guard against resets, in two families"
        reserved = (leases(daemon, tag) / address).read_text()
        assert reserved.startswith("torpor-")
        old.remove()
        assert (leases(daemon, tag) / address).read_text() == reserved
        if pinned:
            torpor("net", "release", "default/net")
            pin(daemon, tag, address)
        new = woken(cri, "keep")
        assert (new.ip == address) == pinned
        # Peers that have no memory of the old interface reach the new pod before its container is there.
        command("ip", "neighbour", "flush", "to", address, check=False)
        quiet.sendall(b"question")
        target = new.run("main", LIVE, image=image)
        assert quiet.recv(100) == b"question"
        for client in clients:
            client.goes_on()
        assert target.exec("/usr/bin/python3", "-c", "print(1)").stdout == "1\n"
    finally:
        for client in (*clients, quiet):
            client.close()
    assert addresses(new) == [address]
    assert tables(new) == tables(None) == held(torpor) == []
    verdict = torpor.audit()[-2]
    assert (verdict["event"], verdict["verdict"]) == ("restore", "held")
    assert bool(verdict["warnings"]) != pinned
    if not pinned:
        (warning,) = verdict["warnings"]
        assert f"gave the pod {new.ip}, and it now has {address}" in warning
        assert new.id in (leases(daemon, tag) / address).read_text()
    new.remove()
    assert not (leases(daemon, tag) / address).exists(), "the plugin freed it with the pod's own"


@pytest.mark.soak
def test_a_client_goes_on_through_pod_after_pod(
    cri: Cri, daemon: Containerd, torpor: Torpor, tag: str
) -> None:
    image = daemon.image("python")
    pod = cri.pod("first")
    container = pod.run("main", LIVE, image=image)
    container.until_number(3)
    address = pod.ip
    client = Echo(address, PORT)
    try:
        for _ in range(20 if SOAK else 2):
            asleep(container, daemon, torpor, "--keep-tcp", "--replace")
            pod.remove()
            pod = woken(cri, "keep")
            container = pod.run("main", LIVE, image=image)
            client.goes_on()
            assert addresses(pod) == [address] != [pod.ip]
            assert pod.id in (leases(daemon, tag) / address).read_text()
            assert tables(pod) == tables(None) == held(torpor) == []
            assert not list((torpor.store_path / "leases").glob("*"))
    finally:
        client.close()


def test_closed_connections_are_known_to_be_closed_at_both_ends(
    cri: Cri, daemon: Containerd, torpor: Torpor, tag: str
) -> None:
    image = daemon.image("python")
    argv = ["/usr/bin/python3", "/workloads/service.py", str(PORT), "1"]
    old = cri.pod("old")
    source = old.run("main", argv, image=image)
    source.until_number(1, word="ready")
    idle = Lines(old.ip, PORT)
    assert idle.ask("clients") == "1"
    asleep(source, daemon, torpor, "--keep-tcp")
    address = old.ip
    old.remove()
    new = woken(cri, "keep-closed")
    target = new.run("main", argv, image=image)
    assert addresses(new) == [address] != [new.ip]
    with pytest.raises(ConnectionResetError):  # although it says nothing
        idle.reader.read(1)
    idle.close()
    again = Lines(address, PORT)
    until(lambda: again.ask("clients") == "1", what="the program has seen its connection end")
    again.close()
    assert tables(new) == tables(None) == held(torpor) == []
    assert target.state == "RUNNING"


def test_peers_of_a_container_that_stops_are_told(cri: Cri, daemon: Containerd, torpor: Torpor) -> None:
    image = daemon.image("python")
    old = cri.pod("old")
    source = old.run("main", ["/usr/bin/python3", "/workloads/service.py", str(PORT), "1"], image=image)
    source.until_number(1, word="ready")
    idle = Lines(old.ip, PORT)
    assert idle.ask("clients") == "1"
    asleep(source, daemon, torpor)
    assert tables(None) == []
    with pytest.raises(ConnectionResetError):
        idle.reader.read(1)
    idle.close()


BOUND = """
import socket, sys, time
address = socket.gethostbyname(socket.gethostname())
listener = socket.create_server((address, 7001))
print("ready 1", flush=True)
time.sleep(3600)
"""


def test_a_listener_on_the_old_address_is_refused_in_a_clone(
    cri: Cri, daemon: Containerd, torpor: Torpor
) -> None:
    image = daemon.image("python")
    old = cri.pod("old")
    argv = ["/usr/bin/python3", "-c", BOUND.replace("address =", f"address = '{old.ip}' or")]
    source = old.run("main", argv, image=image)
    source.until_number(1, word="ready")
    address = old.ip
    asleep(source, daemon, torpor, "--use=clone")
    old.remove()
    refused = woken(cri, "new")
    with pytest.raises(grpc.RpcError, match=f"bound to {address}.* tcp port 7001 \\(listen\\)"):
        refused.run("main", argv, image=image)
    cold = woken(cri, "new", **{"torpor.dev/on-restore-failure.main": "cold-start"})
    until(lambda: cold.run("main", ["/bin/sh", "-c", "echo cold 1"], image=image), what="it starts cold")
    kept = woken(cri, "keep-closed")
    kept.run("main", argv, image=image)
    assert addresses(kept) == [address]
    Lines(address, 7001).close()


def test_an_address_that_somebody_has_is_refused_and_nothing_is_changed(
    cri: Cri, daemon: Containerd, torpor: Torpor, tag: str
) -> None:
    image = daemon.image("python")
    old = cri.pod("old")
    source = old.run("main", LIVE, image=image)
    source.until_number(3)
    address = old.ip
    asleep(source, daemon, torpor, "--keep-tcp")
    new = woken(cri, "keep")
    before = addresses(new)
    with pytest.raises(grpc.RpcError, match=f"address {address} is in use"):  # by the pod that sleeps
        new.run("main", LIVE, image=image)
    assert addresses(new) == before
    assert tables(new) == held(torpor) == []
    old.remove()
    torpor("net", "release", "default/net")
    pin(daemon, tag, address)
    other = cri.pod("other")
    assert other.ip == address
    with pytest.raises(grpc.RpcError, match=f"address {address} is in use"):
        new.run("main", LIVE, image=image, attempt=1)
    other.remove()
    new.run("main", LIVE, image=image, attempt=2).until_number(3)
    assert addresses(new) == [address]


SQUAT = """
import socket, sys, time

address, port = sys.argv[1:]
print("ready 1", flush=True)
taken = socket.socket()
while True:
    try:
        taken.bind((address, int(port)))
    except OSError:
        pass
    else:
        break
time.sleep(3600)
"""


def test_a_restore_that_fails_gives_the_plugins_address_back(
    cri: Cri, daemon: Containerd, torpor: Torpor, tag: str
) -> None:
    image = daemon.image("python")
    old = cri.pod("old")
    source = old.run("main", LIVE, image=image)
    source.until_number(3)
    address = old.ip
    asleep(source, daemon, torpor, "--keep-tcp")
    old.remove()
    new = woken(cri, "keep")
    # It takes the port as the address comes, so that only CRIU notices. Another has clients meanwhile.
    side = new.run("side", ("/usr/bin/python3", "-c", SQUAT, address, str(PORT)), image=image)
    side.until_number(1, word="ready")
    other = new.run("other", (*LIVE[:-1], str(PORT + 1)), image=image)
    other.until_number(3)
    client = Echo(new.ip, PORT + 1)
    try:
        with pytest.raises(grpc.RpcError, match="Address already in use"):
            new.run("main", LIVE, image=image)
        client.goes_on()
    finally:
        client.close()
    assert addresses(new) == [new.ip] != [address]
    assert tables(new) == held(torpor) == []
    assert (leases(daemon, tag) / address).read_text().startswith("torpor-")
    side.remove()
    new.run("main", LIVE, image=image, attempt=1).until_number(3)
    assert addresses(new) == [address]
