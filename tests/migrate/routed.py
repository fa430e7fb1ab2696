"""Migrations where each node has a pod network of its own: away from home, and back."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.criu.cgroups import of_process
from tests.migrate.pair import Pair, Pairs, whole
from tests.migrate.scenes import Fault
from tests.netlab.nodes import Node
from tests.netlab.traffic import both_ways
from tests.support.containers import there, tool, until

pytestmark = pytest.mark.engine

SOAK = bool(os.environ.get("TORPOR_SOAK"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    with Pairs(tmp_path_factory.mktemp("pairs"), "routed") as made:
        yield made


@pytest.fixture
def place(pairs: Pairs) -> Pair:
    return pairs.fresh()


def ways(node: Node) -> list[str]:
    """The routes that torpor made on a node, as their destinations with what they lead to."""
    found: list[str] = []
    for family in ("-4", "-6"):
        shown = json.loads(node("ip", "-j", family, "route", "show", "proto", "188").stdout or "[]")
        found += [f"{each['dst']} {each.get('gateway') or each.get('dev')}" for each in shown]
    return sorted(found)


def let_pass(node: Node) -> list[str]:
    """The addresses of what is away from a node in its firewall, or the table that has none."""
    listed = json.loads(node(tool("nft"), "-j", "list", "ruleset").stdout)["nftables"]
    tables = [each for each in listed if each.get("table", {}).get("name") == "torpor-away"]
    sets = [each["set"] for each in listed if each.get("set", {}).get("table") == "torpor-away"]
    return [ip for one in sets for ip in one.get("elem", [])] or [str(one) for one in tables]


def left_at(place: Pair, where: str) -> list[str]:
    """What there is that must not be when the container is at home ("node1"), away, or gone ("")."""
    one, two = place.agents
    left: list[str] = []
    for agent in place.agents:
        for what in ("departures/*", *(() if where == "node2" else ("away/*",))):
            left += map(str, there(agent.state_path, what))
        for what in ("images/*/*", "staging/*"):
            left += map(str, there(agent.node.torpor.store_path, what))
    if two.node.leases():
        left.append(f"node2 leases {two.node.leases()}")
    if len(one.node.leases()) != (2 if where else 0):
        left.append(f"node1 leases {one.node.leases()}")
    if {owner.startswith("torpor-") for owner in one.node.leases().values()} - {where == "node2"}:
        left.append(f"node1 leases to {one.node.leases()}")  # as of one that is away, or not
    for agent in place.agents:
        here = agent.node.name == where
        if len(agent.veths()) != int(here):
            left.append(f"{agent.node.name} has the ends {agent.veths()}")
        if bool(place.status(agent)) != here:
            left.append(f"{agent.node.name} says {place.status(agent)!r}")
    n_ways = [2, 2] if where == "node2" else [0, 0]
    if [len(ways(agent.node)) for agent in place.agents] != n_ways:
        left.append(f"the ways are {[ways(agent.node) for agent in place.agents]}")
    if [len(let_pass(agent.node)) for agent in place.agents] != [2 if where == "node2" else 0, 0]:
        left.append(f"what passes is {[let_pass(agent.node) for agent in place.agents]}")
    return left


def clean(place: Pair, where: str) -> None:
    until(lambda: not left_at(place, where), timeout_s=30, what=f"nothing is left: {left_at(place, where)}")


def test_away_and_back_and_away_for_good(place: Pair) -> None:
    pod = place.start("web")
    client = place.client(both_ways(pod.ips, 2))
    one, two = place.agents
    one.node.runc("update", "--pids-limit", "77", place.container_id)
    os.mknod(place.bundles[-1] / "rootfs" / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    warned: list[list[bool]] = []
    for source, target in ((one, two), (two, one), (one, two)):
        report = place.migrate(source, target)
        print(report)
        warned.append(["1 device node " in warning for warning in report["warnings"]])
        place.settles_on(target.node.name)
        groups = of_process(target.node.runc.pid(place.container_id))
        assert Path(groups.get("pids", groups.get("", "")), "pids.max").read_text() == "77\n"
        client.goes_on()
        clean(place, target.node.name)
    assert warned == [[True], [], []]
    not_on_from_there(place)
    whole(client.stop())
    assert place.never_twice() == ["node1", "node2", "node1", "node2"]
    two.node.runc.delete(place.container_id)  # it ends away: its home learns that, and gives its address back
    clean(place, "")
    place.forget()


POINTS = [
    ("source", "before cluster.away:Absence.begin"),
    ("source", "after cluster.away:Absence.begin"),
    ("source", "after cluster.away:detour"),
    ("source", "after cluster.away:oneway.let_pass"),
    ("target", "after cluster.wiring:apply"),
    ("target", "before cluster.wiring:plug_routed"),
    ("target", "after cluster.wiring:plug_routed"),
]
BACK = [
    ("source", "before cluster.wiring:unroute"),
    ("source", "after cluster.wiring:unroute"),
    ("target", "before cluster.away:Absence.come_home"),
    ("target", "after cluster.away:Absence.come_home"),
    ("target", "before cluster.away:Absence.end"),
    ("target", "after cluster.away:Absence.end"),
]


@pytest.mark.skipif(not SOAK, reason="long: see ./run soak")
@pytest.mark.parametrize(("side", "point"), POINTS)
def test_an_agent_is_killed_on_the_way_out(place: Pair, side: str, point: str, tmp_path: Path) -> None:
    pod = place.start("web")
    client = place.client(both_ways(pod.ips, 2))
    fault = Fault(place, side, point, "kill", tmp_path)
    _play(place, fault, side)
    client.goes_on()
    clean(place, str(until(place.runs_on, what="it runs")))
    whole(client.stop())
    _over(place)


@pytest.mark.skipif(not SOAK, reason="long: see ./run soak")
@pytest.mark.parametrize(("side", "point"), BACK)
def test_an_agent_is_killed_on_the_way_back(place: Pair, side: str, point: str, tmp_path: Path) -> None:
    pod = place.start("web")
    client = place.client(both_ways(pod.ips, 2))
    place.migrate(*place.agents)
    place.agents.reverse()
    try:
        _play(place, Fault(place, side, point, "kill", tmp_path), side)
    finally:
        place.agents.reverse()
    client.goes_on()
    clean(place, str(until(place.runs_on, what="it runs")))
    whole(client.stop())
    _over(place)


def _play(place: Pair, fault: Fault, side: str) -> None:
    fault.reached()
    victim = fault.source if side == "source" else fault.target
    victim.kill()
    time.sleep(0.3)
    place.never_twice()
    victim.start()
    took_s = fault.healed()
    print(f"runs on {place.runs_on()} after {took_s:.2f} s; {fault.end().strip().splitlines()[-1:]}")


def _over(place: Pair) -> None:
    """The container ends where it is; wherever that is, its home gives the address back."""
    away = place.runs_on() == "node2"
    for agent in place.agents:
        agent.node.runc.delete(place.container_id)
    if away:
        clean(place, "")
    place.forget()


def not_on_from_there(place: Pair) -> None:
    """Its home alone sends on what comes for it."""
    two = place.agents[1]
    text = two.config_path.read_text()
    two.config_path.write_text(f'{text}\n[peers.node3]\naddress = "10.99.0.9:1"\n')
    words = ("migrate", place.container_id, "--to", "node3", "--root", two.node.runc.root)
    assert "migrate it to 'node1' first" in two(*words, check=False).stderr
    two.config_path.write_text(text)
