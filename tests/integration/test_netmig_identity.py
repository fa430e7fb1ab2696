"""A pod's network identity on the real kernel: read, given to another namespace, taken back."""

from __future__ import annotations

import ipaddress
import re
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from netmig import rtnl, sysctls
from netmig.apply import apply, check, plug, plug_routed, unplug
from netmig.capture import capture
from netmig.identity import NUD_STALE, Neighbour, decode, diff, encode, global_addresses, rebind
from netmig.messages import neighbour_to
from netmig.ns import Netns
from tests.support.containers import tool
from tests.support.pods import Nodes, bridge_network, cni, nodes, rich_pod, same

pytestmark = pytest.mark.engine


@pytest.fixture
def made(tmp_path: Path) -> Generator[Nodes]:
    with nodes(tmp_path / "ns") as these:
        yield these


def test_everything_goes_round(made: Nodes) -> None:
    a, b = made.node("a"), made.node("b")
    pod = rich_pod(made, a)
    identity = decode(encode(capture(pod, a)))
    assert identity.warnings == ()
    assert (len(identity.links), len(identity.routes), len(identity.rules)) == (3, 14, 11)

    other = made.empty("other")
    applied = apply(identity, other, b, adopt=False)

    assert diff(identity, capture(other, b)) == []
    assert applied.warnings == ()


def test_done_again_it_changes_nothing(made: Nodes) -> None:
    a, b = made.node("a"), made.node("b")
    identity = capture(rich_pod(made, a), a)
    other = made.empty("other")
    plug(apply(identity, other, b, adopt=False), b)
    before = capture(other, b)
    assert {link.host.bridge for link in before.links if link.host} == {"cni0"}

    again = apply(identity, other, b, adopt=False)

    assert again.journal.steps == ()
    assert same(before, capture(other, b))
    assert [(end.interface, end.bridge) for end in again.ends] == [("eth0", "cni0"), ("net1", "cni0")]


def test_the_host_end_waits_outside_the_bridge(made: Nodes) -> None:
    a, b = made.node("a"), made.node("b")
    identity = capture(rich_pod(made, a), a)
    other = made.empty("other")
    applied = apply(identity, other, b, adopt=False)
    assert bridges(other, b) == {"eth0": None, "net1": None}
    plug(applied, b)
    assert bridges(other, b) == {"eth0": "cni0", "net1": "cni0"}
    unplug(applied, b)
    assert bridges(other, b) == {"eth0": None, "net1": None}
    applied.undo()
    assert [link.name for link in capture(other, b).links] == ["lo"]


def test_a_plugins_interface_is_taken_over(made: Nodes, tmp_path: Path) -> None:
    """The real plugin gave another address, another MAC and another name; the pod has two networks."""
    a, b = made.node("a"), made.node("b")
    identity = capture(rich_pod(made, a), a)
    other = made.empty("other")
    for number, interface in ((20, "eth0"), (40, "net7")):
        network = bridge_network(tmp_path / "leases", first=number)
        cni(b, "ADD", f"sandbox{number}", other, network, interface)
    before = capture(other, b)
    assert diff(identity, before) != []

    applied = apply(identity, other, b, adopt=True)

    # Nothing differs but the numbers, if the plugin's differ, and queues of a plugin's link are its own.
    assert diff(identity, capture(other, b)) == []
    assert bridges(other, b) == {"eth0": None, "net1": None}
    plug(applied, b)
    assert bridges(other, b) == {"eth0": "cni0", "net1": "cni0"}

    applied.undo()
    assert same(before, capture(other, b))


def test_another_number_of_an_interface_is_told(made: Nodes, tmp_path: Path) -> None:
    """It cannot be changed, and programs may remember it."""
    a, b = made.node("a"), made.node("b")
    pod, other = made.empty("pod"), made.empty("other")
    cni(a, "ADD", "pod", pod, bridge_network(tmp_path / "a", first=10))
    with other.ipr() as ipr:
        ipr.link("add", ifname="tunl0", kind="bridge")  # as a module for tunnels would
    cni(b, "ADD", "other", other, bridge_network(tmp_path / "b", first=20))
    identity = capture(pod, a)
    applied = apply(identity, other, b, adopt=True)
    assert applied.warnings == ("eth0 has number 3 here and had 2",)
    assert diff(identity, capture(other, b)) == ["links.eth0.index: 2 became 3"]


def test_a_plugin_still_finds_what_it_made(made: Nodes, tmp_path: Path) -> None:
    a, b = made.node("a"), made.node("b")
    network_a, network_b = (
        bridge_network(tmp_path / name, first=number) for name, number in (("a", 10), ("b", 20))
    )
    pod, other = made.empty("pod"), made.empty("other")
    cni(a, "ADD", "pod", pod, network_a)
    cni(b, "ADD", "other", other, network_b)
    apply(capture(pod, a), other, b, adopt=True)
    cni(b, "DEL", "other", other, network_b)
    assert [link.name for link in capture(other, b).links] == ["lo"]
    with b.ipr() as ipr:
        assert {one.attributes["IFLA_IFNAME"] for one in rtnl.links(ipr)} == {"lo", "cni0"}


def test_devices_that_modules_put_everywhere_are_no_identity(made: Nodes) -> None:
    a, b = made.node("a"), made.node("b")
    pod, other = rich_pod(made, a), made.empty("other")
    for netns in (pod, other):
        with netns.ipr() as ipr:
            ipr.link("add", ifname="tunl0", kind="bridge")
    identity = capture(pod, a)
    assert [link.name for link in identity.links] == ["lo", "eth0", "net1"]
    apply(identity, other, b, adopt=False).undo()
    with other.ipr() as ipr:
        assert {one.attributes["IFLA_IFNAME"] for one in rtnl.links(ipr)} == {"lo", "tunl0"}


def uplinks(*those: Netns) -> None:
    """What a macvlan is on."""
    for node in those:
        with node.ipr() as ipr:
            ipr.link("add", ifname="up0", kind="veth", peer={"ifname": "up1"})
            for name in ("up0", "up1"):
                ipr.link("set", index=ipr.link_lookup(ifname=name)[0], state="up")


@pytest.mark.parametrize("plugin", ["macvlan", "ptp"])
def test_a_plugin_without_a_bridge(made: Nodes, tmp_path: Path, plugin: str) -> None:
    a, b = made.node("a"), made.node("b")
    uplinks(a, b)
    pod, other = made.empty("pod"), made.empty("other")
    for node, netns, number in ((a, pod, 10), (b, other, 20)):
        network = bridge_network(tmp_path / str(number), first=number)
        network |= {"type": plugin, "master": "up0", "name": plugin}
        cni(node, "ADD", "one", netns, network)
    identity, before, node = capture(pod, a), capture(other, b), capture(b, None)
    routed = plugin == "ptp"
    assert [problem.code for problem in check(identity, other, b, adopt=True)] == ["bridge"] * routed

    applied = apply(identity, other, b, adopt=True, routed=routed)
    if routed:
        plug_routed(applied, b, global_addresses(identity))

    assert diff(identity, capture(other, b)) == []
    applied.undo()
    assert same(before, capture(other, b))
    assert same(node, capture(b, None))


@pytest.mark.parametrize("pod_has_it", [True, False])
def test_ipv6_is_turned_on_and_off_with_the_pod(made: Nodes, tmp_path: Path, pod_has_it: bool) -> None:
    a, b = made.node("a"), made.node("b")
    pod, other = made.empty("pod"), made.empty("other")
    both = bridge_network(tmp_path / "both", first=10)
    four = bridge_network(tmp_path / "four", first=20)
    for key in ("ranges", "routes"):
        four["ipam"][key] = four["ipam"][key][:1]
    cni(a, "ADD", "pod", pod, both if pod_has_it else four)
    cni(b, "ADD", "other", other, four if pod_has_it else both)
    without = other if pod_has_it else pod
    without.set_sysctl("net/ipv6/conf/eth0/disable_ipv6", "1")
    identity, before = capture(pod, a), capture(other, b)

    applied = apply(identity, other, b, adopt=True)

    assert diff(identity, capture(other, b)) == []
    assert applied.warnings == ()
    applied.undo()
    assert same(before, capture(other, b))


def test_a_clone_beside_its_template(made: Nodes) -> None:
    """On the same node, with other addresses: host ends, MACs and link-local addresses do not collide."""
    a = made.node("a")
    identity = capture(rich_pod(made, a), a)
    other = made.empty("other")
    ours = sorted({one.ip for one in identity.addresses if one.scope == 0})
    new = {ip: str(ipaddress.ip_address(ip) + 100) for ip in ours}
    clone = rebind(identity, new)
    assert check(clone, other, a) == [
        problem for problem in check(identity, None, made.node("b")) if problem.code == "route"
    ]
    plug(apply(clone, other, a, adopt=False), a)
    after = capture(other, a)
    assert diff(clone, after) == []
    assert not {one.ip for one in after.addresses} & {*ours}
    macs = {link.mac for one in (identity, after) for link in one.links if link.mac}
    assert len(macs) == 4


@pytest.mark.parametrize("neighbours", [True, False])
def test_what_was_learned_is_carried_within_a_segment_only(made: Nodes, neighbours: bool) -> None:
    a, b = made.node("a"), made.node("b")
    pod, other = rich_pod(made, a), made.empty("other")
    learned = Neighbour(interface="eth0", ip="10.88.7.7", mac="02:00:00:00:07:07", state=NUD_STALE)
    with pod.ipr() as ipr:
        index = ipr.link_lookup(ifname="eth0")[0]
        rtnl.change(ipr, "neighbour", neighbour_to(learned, index), "replace")
    apply(capture(pod, a), other, b, adopt=False, neighbours=neighbours)
    assert (learned in capture(other, b).neighbours) == neighbours


def test_settings_that_came_later_are_no_difference(made: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module brings settings to all namespaces; they are not the pod's for that."""
    pod, now, cleared = made.empty("pod"), sysctls.baseline(), list[bool]()
    outdated = {name: value for name, value in now.items() if "tcp_" not in name}
    monkeypatch.setattr(sysctls, "baseline", lambda: now if cleared else outdated)
    monkeypatch.setattr(sysctls.baseline, "cache_clear", lambda: cleared.append(True), raising=False)
    assert sysctls.different(pod) == {}
    assert cleared


WITNESSES = (
    ("ip", "-d", "address"),
    ("ip", "-d", "link"),
    ("ip", "route", "show", "table", "all"),
    ("ip", "-6", "route", "show", "table", "all"),
    ("ip", "rule"),
    ("ip", "-6", "rule"),
    ("ip", "neighbour", "show", "nud", "permanent"),
    ("ip", "neighbour", "show", "proxy"),
    ("ip", "-6", "neighbour", "show", "proxy"),
    ("tc", "qdisc"),
    ("tc", "class", "show", "dev", "eth0"),
)


def test_other_eyes_see_no_difference_either(made: Nodes) -> None:
    """iproute2 looks at both, so that what `capture` is blind to is not missed."""
    a, b = made.node("a"), made.node("b")
    pod, other = rich_pod(made, a), made.empty("other")
    apply(capture(pod, a), other, b, adopt=False)
    for witness in WITNESSES:
        assert seen(pod, witness) == seen(other, witness)


# The kernel's own business: seconds left, marks of a probe for duplicates that is left out here, a bridge's
# port at the other end, numbers of namespaces, states that follow from a probe.
_PASSING = re.compile(
    r"(valid_lft|preferred_lft|expires) \d+sec|nodad|tentative|"
    r"(link-netnsid|refcnt|direct_packets_stat) \d+|@if\d+"
)


def seen(netns: Netns, command: tuple[str, ...]) -> list[str]:
    with netns.inside():
        done = subprocess.run([tool(command[0]), *command[1:]], capture_output=True, text=True, check=True)
    return [" ".join(_PASSING.sub("", line).split()) for line in done.stdout.splitlines()]


def bridges(pod: Netns, node: Netns) -> dict[str, str | None]:
    return {link.name: link.host.bridge for link in capture(pod, node).links if link.host is not None}
