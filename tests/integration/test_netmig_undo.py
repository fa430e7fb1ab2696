"""Whatever a call did to the network is taken back: when it fails, and when it is killed at any step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from netmig import apply as applying
from netmig import nft, queues, rtnl, undo
from netmig.apply import apply, attach, create, detour, plug, plug_routed, unplug
from netmig.capture import capture
from netmig.errors import NetworkError
from netmig.identity import global_addresses, without_links
from netmig.journal import Journal
from netmig.ns import Netns
from tests.support import soak
from tests.support.pods import Nodes, add_veth, bridge_network, cni, nodes, rich_pod, same

pytestmark = pytest.mark.engine

# All that changes anything goes through one of these.
STEPS: tuple[tuple[Any, str], ...] = (
    (rtnl, "link"),
    (rtnl, "change"),
    (rtnl, "port"),
    (queues, "replay"),
    (queues, "clear"),
    (nft, "run"),
    (Netns, "set_sysctl"),
    (Netns, "create"),
    (Netns, "remove"),
    (Journal, "record"),
    (Journal, "drop"),
)


@pytest.fixture
def made(tmp_path: Path) -> Generator[Nodes]:
    with nodes(tmp_path / "ns") as these:
        yield these


def in_child(work: Callable[[], object], *, kill_at: int) -> bool:
    """Do something in a forked child that is killed before its Nth step; was it done before that?"""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            return False
        assert os.WEXITSTATUS(status) == 0
        return True
    try:
        numbers = count(1)

        def dying(real: Callable[..., Any]) -> Callable[..., Any]:
            def step(*args: Any, **kwargs: Any) -> Any:
                if next(numbers) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return step

        for owner, name in STEPS:
            setattr(owner, name, dying(getattr(owner, name)))
        work()
        os._exit(0)
    finally:
        os._exit(1)


def kill_points(every: int) -> Generator[int]:
    """Numbers of steps; the caller stops at the first that was not reached."""
    step = 1 if soak.SOAK else every
    yield from range(1, 10_000, step)


def test_a_kill_at_any_step_of_a_takeover(
    made: Nodes, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Taken over from a plugin, plugged, unplugged and routed to: undone by what is on disk."""
    a, b = made.node("a"), made.node("b")
    pod, other, path = made.empty("pod"), made.empty("other"), tmp_path / "journal"
    cni(a, "ADD", "pod", pod, bridge_network(tmp_path / "a", first=10))
    cni(b, "ADD", "other", other, bridge_network(tmp_path / "b", first=20), "net3")
    identity = capture(pod, a)
    before, node = capture(other, b), capture(b, None)

    def take_over() -> None:
        applied = apply(identity, other, b, adopt=True, journal=Journal(path))
        plug(applied, b)
        unplug(applied, b)
        plug_routed(applied, b, global_addresses(identity))

    n_killed = 0
    for step in kill_points(every=4):
        done = in_child(take_over, kill_at=step)
        n_killed += not done
        if path.exists():
            # The undo is killed, too, and done again.
            in_child(lambda: undo.undo_left(path), kill_at=1 + step % 7)
        if path.exists():
            assert undo.undo_left(path) is not None
        assert not path.exists()
        assert same(before, capture(other, b))
        assert same(node, capture(b, None))
        if done:
            break
    assert n_killed >= 8
    soak.tell_kills(request, "netmig", {"undone": n_killed})


def test_a_kill_at_any_step_of_making_one(
    made: Nodes, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    a, b = made.node("a"), made.node("b")
    identity = capture(rich_pod(made, a), a)
    where, path = made.path / "new", tmp_path / "journal"
    node = capture(b, None)

    def make() -> None:
        journal = Journal(path)
        plug(apply(identity, create(where, journal), b, adopt=False, journal=journal), b)

    n_killed = 0
    for step in kill_points(every=11):
        done = in_child(make, kill_at=step)
        n_killed += not done
        if path.exists():
            undo.undo_left(path)
        assert not path.exists()
        assert not where.exists()
        assert same(node, capture(b, None))
        if done:
            break
    assert n_killed >= 5
    soak.tell_kills(request, "netmig", {"undone": n_killed})


def test_a_call_at_work_is_not_undone(made: Nodes, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    create(made.path / "new", journal)
    assert undo.undo_left(tmp_path / "journal") is None
    journal.close()
    steps = undo.undo_left(tmp_path / "journal")
    assert steps is not None
    assert len(steps) == 1
    assert not (made.path / "new").exists()


@pytest.mark.parametrize("adopt", [False, True])
def test_a_failure_leaves_everything_as_it_was(made: Nodes, tmp_path: Path, adopt: bool) -> None:
    """The last thing to be set cannot be: a firewall rule that jumps to nowhere."""
    a, b = made.node("a"), made.node("b")
    identity = capture(rich_pod(made, a), a)
    rules = [one for one in identity.nftables if one.get("chain", {}).get("name") != "helper"]
    other = made.empty("other")
    if adopt:
        for number, name in ((20, "eth0"), (40, "net1")):
            cni(b, "ADD", f"other{number}", other, bridge_network(tmp_path / "b", first=number), name)
    before, node = capture(other, b), capture(b, None)
    journal = Journal(tmp_path / "journal")

    with pytest.raises(NetworkError):
        apply(replace(identity, nftables=tuple(rules)), other, b, adopt=adopt, journal=journal)

    assert same(before, capture(other, b))
    assert same(node, capture(b, None))
    assert not (tmp_path / "journal").exists()


def test_a_running_pod_is_unplugged_and_given_back(made: Nodes, tmp_path: Path) -> None:
    a = made.node("a")
    pod = rich_pod(made, a)
    before = capture(pod, a)
    applied = attach(pod, a, Journal(tmp_path / "journal"))
    unplug(applied, a)
    assert {link.host.bridge for link in capture(pod, a).links if link.host} == {None}
    applied.journal.close()
    undo.undo_left(tmp_path / "journal")
    assert same(before, capture(pod, a))


def test_what_the_plugin_has_removed_does_not_come_back(made: Nodes, tmp_path: Path) -> None:
    """The pod was torn down between the kill and the recovery; of its two networks one is still there."""
    a, b = made.node("a"), made.node("b")
    identity = capture(rich_pod(made, a), a)
    node, other = capture(b, None), made.empty("other")
    networks = {
        name: bridge_network(tmp_path / "b", first=number) for number, name in ((20, "eth0"), (40, "net1"))
    }
    for name, network in networks.items():
        cni(b, "ADD", f"other{name}", other, network, name)
    before = capture(other, b)
    applied = apply(identity, other, b, adopt=True, journal=Journal(tmp_path / "journal"))
    plug(applied, b)
    applied.journal.close()
    cni(b, "DEL", "othereth0", other, networks["eth0"], "eth0")

    assert undo.undo_left(tmp_path / "journal") is not None

    after = capture(other, b)
    assert [link.name for link in after.links] == ["lo", "net1"]
    assert same(without_links(before, {"eth0"}), after)
    cni(b, "DEL", "othernet1", other, networks["net1"], "net1")
    assert [link.name for link in capture(b, None).links] == [link.name for link in node.links]


def test_a_namespace_that_is_gone_needs_no_undo(made: Nodes, tmp_path: Path) -> None:
    a, b = made.node("a"), made.node("b")
    identity = capture(rich_pod(made, a), a)
    node = capture(b, None)
    other = Netns.create(made.path / "short")
    applied = apply(identity, other, b, adopt=False, journal=Journal(tmp_path / "journal"))
    plug_routed(applied, b, global_addresses(identity))
    with b.ipr() as ipr:
        for end in applied.ends:
            rtnl.link(ipr, "del", index=end.index)
    other.remove()
    applied.undo()
    assert same(node, capture(b, None))


def test_a_detour_and_its_undo(made: Nodes, tmp_path: Path) -> None:
    """The old node already had a route to the address, which comes back."""
    a = made.node("a")
    identity = capture(rich_pod(made, a), a)
    with a.ipr() as ipr:
        ipr.route("add", dst="10.88.0.10/32", oif=ipr.link_lookup(ifname="cni0")[0], scope=253)
    before = capture(a, None)
    first = [one for one in global_addresses(identity) if one.ip == "10.88.0.10"]
    six = [one for one in global_addresses(identity) if one.ip == "fd00:88::a"]
    journal = Journal(tmp_path / "journal")

    detour(a, first, "10.88.0.200", bridge="cni0", journal=journal)
    detour(a, six, "fd00:88::200", bridge="cni0", journal=journal)
    steps = journal.steps
    detour(a, first, "10.88.0.200", bridge="cni0", journal=journal)
    detour(a, six, "fd00:88:0::200", bridge="cni0", journal=journal)
    assert journal.steps == steps  # or it would grow with each try of a migration that is cut off

    after = capture(a, None)
    routes = {
        route.destination: route.attributes.get("RTA_GATEWAY")
        for route in after.routes
        if route.protocol == applying.PROTOCOL
    }
    assert routes == {"10.88.0.10/32": "10.88.0.200", "fd00:88::a/128": "fd00:88::200"}
    assert after.sysctls["net/ipv4/conf/cni0/proxy_arp"] == "1"
    with pytest.raises(NetworkError, match="other family"):
        detour(a, six, "10.88.0.200", journal=journal)
    undo.undo_steps(journal)
    assert same(before, capture(a, None))


def test_a_foreign_namespace_at_the_path_is_left_alone(made: Nodes, tmp_path: Path) -> None:
    a, b = made.node("a"), made.node("b")
    identity = capture(rich_pod(made, a), a)
    other = Netns.create(made.path / "other")
    applied = apply(identity, other, b, adopt=False, journal=Journal(tmp_path / "journal"))
    applied.journal.close()
    other.remove()
    stranger = made.empty("other")
    add_veth(stranger, a, "eth0", "stranger", mac="02:00:00:00:00:99")
    before = capture(stranger, a)
    undo.undo_left(tmp_path / "journal")
    assert same(before, capture(stranger, a))
