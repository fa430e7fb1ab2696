"""What the lab plays: each scenario makes its own lab and returns rows for the report."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.netlab import alone, kubelet, migrations, redis, report
from tests.netlab.moves import Mover
from tests.netlab.nodes import KINDS, Kind
from tests.netlab.report import Figure, Row
from tests.netlab.stage import Plan, Stage, stage
from tests.netlab.traffic import Client, both_ways, mixed

ALONE = "alone"
MOVES = "moves"


def suspend(plan: Plan) -> list[Row]:
    """The pod sleeps on its node for some seconds and wakes up there, by torpor's own commands."""
    rows: list[Row] = []
    crowd = f"{plan.connections} connections"
    with stage(plan, "l2", "suspend") as place:
        v4, v6 = place.pod.ips
        kinds = {
            "one connection, IPv4": both_ways([v4], 1),
            "one connection, IPv6": both_ways([v6], 1),
            crowd: both_ways([v4, v6], plan.connections),
            "every kind of flow": mixed([v4, v6]),
        }
        for name, flows in list(kinds.items())[-plan.kinds :]:
            client = place.client(flows)
            phases = sleep_and_wake(place, plan.asleep_s)
            client.goes_on()
            rows.append(
                Row(
                    scenario="suspend",
                    name=f"suspend {plan.asleep_s:g} s: {name}",
                    network="l2",
                    tally=client.stop(),
                    phases_ms=phases,
                )
            )
    return rows


def sleep_and_wake(place: Stage, asleep_s: float) -> dict[str, float]:
    """`torpor checkpoint --stop --keep-tcp`, some seconds, `torpor restore --keep-tcp`; ms of each."""
    node = place.node
    begun = time.monotonic()
    node.torpor(
        *("checkpoint", place.container_id, "--name", "asleep", "--stop", "--keep-tcp", "--replace"),
        *("--root", node.runc.root),
    )
    slept = time.monotonic()
    place.containers.remove(node, place.container_id)
    bundle = place.bundle_path = place.bundle(place.pod)
    time.sleep(asleep_s)
    waking = time.monotonic()
    node.torpor("restore", "asleep", "--bundle", bundle, "--keep-tcp", "--detach", "--root", node.runc.root)
    awake = time.monotonic()
    return {"checkpoint": (slept - begun) * 1000, "restore": (awake - waking) * 1000}


def moves(plan: Plan) -> list[Row]:
    """The pod moves to another node and back, on one segment and routed, beside CRIU alone on one node."""
    rows: list[Row] = []
    for kind in KINDS:
        with stage(plan, kind, "moves", argv=("/bin/server", str(plan.mebibytes))) as place:
            mover = Mover(place)
            flows = mixed(place.pod.ips)
            for number in range(plan.rounds):
                client = place.client(flows)
                peer, output = alone.dump_and_restore(place.node, place.container_id, place.bundle_path)
                place.containers.outputs.append(output)
                client.goes_on()
                rows.append(_row(ALONE, f"CRIU alone, same node, {plan.mebibytes} MiB", kind, client, peer))
                client = place.client(flows)
                phases = mover.move(place.lab.nodes[(number + 1) % 2])
                client.goes_on()
                row = _row(MOVES, f"move, {plan.mebibytes} MiB", kind, client, phases)
                row.phases_ms["commit to client"] = (row.tally.heard_s - mover.committed_s) * 1000
                rows.append(row)
    return rows


def back_and_forth(plan: Plan) -> list[Row]:
    """Many moves in a row under the same connections."""
    rows: list[Row] = []
    for kind in KINDS:
        with stage(plan, kind, "back-and-forth") as place:
            mover = Mover(place)
            # On one segment it goes round all nodes; routed, it returns home each time.
            nodes = place.lab.nodes if kind == "l2" else place.lab.nodes[:2]
            client = place.client([*mixed(place.pod.ips), *both_ways(place.pod.ips, plan.connections)])
            phases: list[dict[str, float]] = []
            for number in range(1, plan.back_and_forth + 1):
                phases.append(mover.move(nodes[number % len(nodes)]))
                client.goes_on()
            rows.append(
                Row(
                    scenario="back-and-forth",
                    name=f"{plan.back_and_forth} moves in a row",
                    network=kind,
                    moves=plan.back_and_forth,
                    tally=client.stop(),
                    phases_ms=report.medians(phases),
                )
            )
    return rows


def figures(rows: Sequence[Row]) -> list[Figure]:
    """What must hold, of what was played: medians over rounds, each beside CRIU alone just before."""
    found: list[Figure] = []
    for title, peer, scenario, kind, limit in (
        ("", ALONE, MOVES, "l2", 0.1),
        ("", ALONE, MOVES, "routed", 0.25),
        ("torpor migrate, ", migrations.ALONE, migrations.MEASURED, "l2", 0.1),
        ("torpor migrate, ", migrations.ALONE, migrations.MEASURED, "routed", 0.25),
    ):
        peers = [sum(row.phases_ms.values()) for row in rows if (row.scenario, row.network) == (peer, kind)]
        moved = [row for row in rows if (row.scenario, row.network) == (scenario, kind)]
        if not peers or len(peers) != len(moved):
            continue
        pairs = list(zip(moved, peers, strict=True))
        network = [sum(row.phases_ms.get(name, 0.0) for name in ("switch", "plug")) / ms for row, ms in pairs]
        gaps = [row.tally.gap_s * 1000 / ms for row, ms in pairs]
        found += [
            Figure(name=f"{title}{kind}: network's share", value=statistics.median(network), limit=limit),
            Figure(name=f"{title}{kind}: downtime / CRIU alone", value=statistics.median(gaps), limit=1.5),
        ]
    return found


def _row(scenario: str, name: str, kind: Kind, client: Client, phases_ms: dict[str, float]) -> Row:
    return Row(scenario=scenario, name=name, network=kind, tally=client.stop(), phases_ms=phases_ms)


def redis_suspended(plan: Plan) -> list[Row]:
    """redis sleeps and wakes up while redis-benchmark is connected."""
    with stage(plan, "l2", "redis", lower=redis.layer(), argv=redis.ARGV) as place:
        server = redis.Redis(place.lab.client, place.pod.ips[0])
        with server.under_load() as tally:
            phases = sleep_and_wake(place, plan.asleep_s)
    name = f"redis-benchmark, {redis.N_CLIENTS} clients: suspend {plan.asleep_s:g} s"
    return [Row(scenario="redis-suspended", name=name, network="l2", tally=tally, phases_ms=phases)]


SCENARIOS: dict[str, Callable[[Plan], list[Row]]] = {
    "suspend": suspend,
    "redis-suspended": redis_suspended,
    "kubelet": kubelet.sleeps,
    "moves": moves,
    "back-and-forth": back_and_forth,
    "migrate": migrations.in_a_row,
    "migrate-measured": migrations.measured,
    "migrate-redis": migrations.redis_migrates,
}


SHORT = ("suspend", "back-and-forth", "migrate", "migrate-redis")


def play(plan: Plan, name: str) -> list[Row]:
    """One scenario's rows. What goes wrong is a row too."""
    try:
        return SCENARIOS[name](plan)
    except Exception as error:  # the others are still worth playing
        return [Row(scenario=name, name=name, network="", problem=f"{type(error).__name__}: {error}"[:2000])]


def full(root: Path, server: Path) -> Plan:
    """All of it."""
    return Plan(root=root, server=server)


def short(root: Path, server: Path) -> Plan:
    """As much as a test suite has time for."""
    return Plan(
        root=root,
        server=server,
        asleep_s=1.0,
        rounds=1,
        back_and_forth=2,
        connections=20,
        kinds=1,
        networks=("routed",),  # on one segment they have tests of their own
    )
