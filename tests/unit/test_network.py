"""Which of an image's sockets a restore in each mode accepts, and what it says of the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from engines.api import Needs, SocketNeed
from netmig.identity import Identity, Link, LinkAddress, encode
from shim import network
from shim.annotations import Network
from shim.cli.restore import command as restore_command
from shim.errors import AdmissionRefused, ShimError, UsageError
from tests.support.admission import NEEDS
from tests.support.containers import command, make_spec

OLD = "10.77.1.2"
LISTEN_ALL = SocketNeed(family="inet", protocol="tcp", state="listen", address="0.0.0.0", port=80)
LISTEN_ALL6 = SocketNeed(family="inet6", protocol="tcp", state="listen", address="::", port=80)
LISTEN_LOOPBACK = SocketNeed(family="inet", protocol="tcp", state="listen", address="127.0.0.1", port=81)
LISTEN_OLD = SocketNeed(family="inet", protocol="tcp", state="listen", address=OLD, port=82)
LISTEN_MAPPED = SocketNeed(
    family="inet6", protocol="tcp", state="listen", address="::ffff:127.0.0.1", port=83
)
UDP_OLD = SocketNeed(family="inet", protocol="udp", state="closed", address=OLD, port=53)
UDP_GROUP = SocketNeed(family="inet", protocol="udp", state="closed", address="224.0.0.251", port=5353)
TALKING = SocketNeed(
    family="inet",
    protocol="tcp",
    state="established",
    address=OLD,
    port=80,
    remote="10.77.1.9",
    remote_port=40000,
)


def needs(*sockets: SocketNeed) -> Needs:
    return replace(NEEDS, sockets=sockets)


def spec(*, netns: Path | None = None, kind: str = "own") -> dict[str, Any]:
    document = make_spec(["app"], netns_path=netns)
    if kind == "host":
        document["linux"]["namespaces"] = [
            entry for entry in document["linux"]["namespaces"] if entry["type"] != "network"
        ]
    return document


def test_only_tcp_has_connections() -> None:
    closed, closing = (replace(TALKING, state=state) for state in ("closed", "close-wait"))
    raw = replace(TALKING, protocol="other")
    assert TALKING.connected and closing.connected
    assert not any(socket.connected for socket in (LISTEN_ALL, LISTEN_OLD, UDP_OLD, closed, raw))


def test_connections_of_a_container_that_ran_on_are_never_kept() -> None:
    assert network.tcp_mode("keep", leave_running=False, what="web") == "keep"
    assert network.tcp_mode("new", leave_running=True, what="web") == "close"
    assert network.tcp_mode("keep-closed", leave_running=True, what="web") == "close"
    assert network.tcp_mode(None, leave_running=False, what="web") == "close"
    with pytest.raises(AdmissionRefused, match="would hang for ever"):
        network.tcp_mode("keep", leave_running=True, what="web")


@pytest.mark.parametrize("kind", ["own", "host"])
def test_what_does_not_mind_another_address_is_accepted(kind: str) -> None:
    sockets = (LISTEN_ALL, LISTEN_ALL6, LISTEN_LOOPBACK, LISTEN_MAPPED, TALKING, UDP_GROUP)
    assert network.judge(needs(*sockets), spec(kind=kind), tcp="close") == ()


def test_a_socket_on_the_old_address_is_refused_by_name() -> None:
    (finding,) = network.judge(needs(LISTEN_ALL, LISTEN_OLD, UDP_OLD), spec(), tcp="close")
    assert (finding.rule, finding.severity) == ("network.address", "refuse")
    assert finding.message == (
        "sockets are bound to 10.77.1.2, which the new network namespace does not have: "
        "tcp port 82 (listen), udp port 53 (closed)"
    )
    assert "keep-closed" in finding.remedy


def test_a_connection_that_is_to_be_kept_wants_its_address() -> None:
    (finding,) = network.judge(needs(TALKING, *[TALKING] * 99), spec(), tcp="keep")
    assert finding.message.endswith("does not have: tcp port 80 (established)")


def test_many_sockets_are_counted() -> None:
    sockets = [replace(LISTEN_OLD, port=number) for number in range(1000, 1006)]
    (finding,) = network.judge(needs(*sockets), spec(), tcp="close")
    assert finding.message.endswith("tcp port 1003 (listen) and 2 more")


def test_hooks_may_yet_give_a_namespace_of_its_own_an_address() -> None:
    hooked = {**spec(), "hooks": {"prestart": [{"path": "/bin/true"}]}}
    assert network.judge(needs(LISTEN_OLD), hooked, tcp="close") == ()


def test_a_namespace_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ShimError, match="could not open network namespace"):
        network.judge(needs(LISTEN_OLD), spec(netns=tmp_path / "none"), tcp="close")


@pytest.fixture
def namespace() -> Iterator[Path]:
    """A namespace that has the old address."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    name = f"tpmode{os.getpid():x}"
    command("ip", "netns", "add", name)
    command(*f"ip -n {name} link set lo up".split())
    command(*f"ip -n {name} link add eth0 type veth peer name eth1".split())
    command(*f"ip -n {name} address add {OLD}/24 dev eth0".split())
    command(*f"ip -n {name} link set eth0 up".split())
    yield Path("/run/netns", name)
    command("ip", "netns", "delete", name)


@pytest.mark.engine
def test_a_namespace_with_the_old_address_is_as_good_as_the_old_one(namespace: Path) -> None:
    sockets = (LISTEN_OLD, UDP_OLD, UDP_GROUP, TALKING)
    assert network.judge(needs(*sockets), spec(netns=namespace), tcp="keep") == ()
    other = replace(LISTEN_OLD, address="10.77.1.3")
    (finding,) = network.judge(needs(LISTEN_OLD, other), spec(netns=namespace), tcp="keep")
    assert "10.77.1.3" in finding.message


@pytest.mark.engine
def test_a_namespace_that_lets_everything_be_bound_has_only_its_own(namespace: Path) -> None:
    command(*f"nsenter --net={namespace} sysctl -qw net.ipv4.ip_nonlocal_bind=1".split())
    assert network.absent([OLD, "127.0.0.1", "224.0.0.251", "10.77.1.3"], namespace) == ("10.77.1.3",)
    command(*f"nsenter --net={namespace} ip route add local 10.78.0.0/16 dev lo".split())
    assert network.absent(["10.78.1.1", "10.79.1.1"], namespace) == ("10.79.1.1",)


@pytest.mark.engine
def test_a_namespace_that_never_had_an_address_has_none() -> None:
    """The kernel lets everything be bound there."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    name = f"tpfresh{os.getpid():x}"
    command("ip", "netns", "add", name)
    try:
        fresh = Path("/run/netns", name)
        assert network.absent([OLD, "127.0.0.1", "fd77::1"], fresh) == (OLD, "fd77::1")
        (finding,) = network.judge(needs(LISTEN_OLD, UDP_GROUP), spec(netns=fresh), tcp="close")
        assert OLD in finding.message
    finally:
        command("ip", "netns", "delete", name)


def identity(address: str = OLD, *, mtu: int = 1500) -> Identity:
    eth0 = Link(name="eth0", index=2, kind="veth", mac="02:00:00:00:00:01", mtu=mtu, queue_length=0, flags=1)
    return Identity(links=(eth0,), addresses=(LinkAddress(interface="eth0", ip=address, prefix=24, scope=0),))


def planned(mode: Network | None, image: Path, netns: Path, *, leave_running: bool = False) -> network.Plan:
    asleep = replace(needs(TALKING), lock_table="CRIU-1")
    return network.plan(mode, asleep, spec(netns=netns), image, leave_running=leave_running, what="web")


@pytest.mark.parametrize(
    ("mode", "kept", "warned"),
    [("keep", False, True), ("keep", True, False), ("keep", None, False), ("new", False, False)],
)
def test_connections_whose_peers_were_told_that_they_ended_are_warned_of(
    tmp_path: Path, mode: Network, kept: bool | None, warned: bool
) -> None:
    plan = network.plan(mode, needs(TALKING), spec(), tmp_path, leave_running=False, kept=kept, what="web")
    assert [one.severity for one in plan.findings if one.rule == "network.ended"] == ["warn"] * warned
    quiet = network.plan(
        mode, needs(LISTEN_ALL), spec(), tmp_path, leave_running=False, kept=kept, what="web"
    )
    assert quiet.findings == ()


@pytest.mark.engine
def test_a_clone_asks_nothing_of_a_namespace(namespace: Path, tmp_path: Path) -> None:
    (tmp_path / "network.json").write_bytes(encode(identity()))
    for mode in (None, "new"):
        plan = planned(mode, tmp_path, namespace)
        assert (plan.mode, plan.tcp, plan.adopt, plan.addresses) == ("new", "close", None, ())
        assert plan.guarded, "its peers wait no longer"
        assert not planned(mode, tmp_path, namespace, leave_running=True).guarded


@pytest.mark.engine
@pytest.mark.parametrize(("mode", "tcp"), [("keep", "keep"), ("keep-closed", "close")])
def test_an_address_that_the_plugin_gave_is_left_alone(
    namespace: Path, tmp_path: Path, mode: Network, tcp: str
) -> None:
    (tmp_path / "network.json").write_bytes(encode(identity()))
    plan = planned(mode, tmp_path, namespace)
    assert (plan.tcp, plan.adopt, plan.findings) == (tcp, None, ())
    assert [one.ip for one in plan.addresses] == [OLD]


@pytest.mark.engine
@pytest.mark.parametrize("mode", ["keep", "keep-closed"])
def test_an_address_that_is_not_there_is_to_be_given(namespace: Path, tmp_path: Path, mode: Network) -> None:
    old = identity("10.77.1.77")
    (tmp_path / "network.json").write_bytes(encode(old))
    plan = planned(mode, tmp_path, namespace)
    assert plan.adopt == old
    assert plan.coming == ("10.77.1.77",)
    bound = replace(LISTEN_OLD, address="10.77.1.77")
    mapped = replace(bound, family="inet6", address="::ffff:10.77.1.77")  # of a server on both families
    for one in (bound, mapped):
        assert network.judge(needs(one), spec(netns=namespace), tcp=plan.tcp, coming=plan.coming) == ()


@pytest.mark.engine
def test_a_narrower_interface_is_refused_where_connections_go_on(namespace: Path, tmp_path: Path) -> None:
    (tmp_path / "network.json").write_bytes(encode(identity(mtu=9000)))
    (finding,) = planned("keep", tmp_path, namespace).findings
    assert (finding.rule, finding.severity) == ("network.mtu", "refuse")
    assert finding.message.startswith("interface eth0 carries 1500 bytes and carried 9000")
    assert planned("keep-closed", tmp_path, namespace).findings == ()


@pytest.mark.engine
def test_an_image_that_names_no_address_says_so(namespace: Path, tmp_path: Path) -> None:
    (finding,) = planned("keep-closed", tmp_path, namespace).findings
    assert (finding.rule, finding.severity) == ("network.identity", "unknown")


def test_contradicting_flags_are_refused() -> None:
    done = CliRunner().invoke(restore_command, ["x", "--bundle", "/", "--keep-tcp", "--network", "new"])
    assert isinstance(done.exception, UsageError)


@pytest.mark.engine
def test_the_caller_stays_in_its_own_namespace(namespace: Path) -> None:
    before = os.readlink("/proc/thread-self/ns/net")
    assert network.absent([OLD], namespace) == ()
    assert network.absent([OLD], None) == (OLD,)
    assert os.readlink("/proc/thread-self/ns/net") == before


@pytest.mark.parametrize("mode", ["keep", "keep-closed"])
def test_an_engine_that_can_keep_nothing_is_told_by_name(mode: Network) -> None:
    engine = SimpleNamespace(name="gvisor", capabilities=frozenset({"clone"}))
    with pytest.raises(AdmissionRefused, match=f"network: {mode}: engine gvisor can keep neither"):
        network.check_engine(cast("Any", engine), mode, what="web")
    network.check_engine(
        cast("Any", SimpleNamespace(name="x", capabilities={"external-netns"})), mode, what="web"
    )
