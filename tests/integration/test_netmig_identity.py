"""A pod's network identity on the real kernel: read, given to another namespace, taken back."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from netmig import rtnl
from netmig.apply import apply, plug, unplug
from netmig.capture import capture
from netmig.identity import decode, diff, encode
from netmig.ns import Netns
from tests.support.pods import Nodes, bridge_network, cni, nodes, rich_pod

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

    assert (again.journal.steps, capture(other, b)) == ((), before)
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
    assert capture(other, b) == replace(before, neighbours=capture(other, b).neighbours)


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


def bridges(pod: Netns, node: Netns) -> dict[str, str | None]:
    return {link.name: link.host.bridge for link in capture(pod, node).links if link.host is not None}
