"""Migrations through `torpor migrate`, between agents that speak mutual TLS over the underlay."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import trustme

from tests.migrate.pair import PORT, Agent
from tests.netlab import alone, redis, report
from tests.netlab.nodes import NETNS, Kind, Lab
from tests.netlab.pods import new_pod
from tests.netlab.report import Row
from tests.netlab.stage import Plan, Stage
from tests.netlab.traffic import Tally, both_ways, mixed
from tests.support.containers import command

ALONE = "migrate-alone"
MEASURED = "migrate-measured"


class Agents:
    """A stage whose nodes have agents; the container goes round them, on routed networks to and fro."""

    def __init__(self, place: Stage) -> None:
        self.place = place
        authority = trustme.CA()
        nodes = place.lab.nodes if place.lab.kind == "l2" else place.lab.nodes[:2]
        self.agents = [
            Agent(
                node,
                place.lab,
                authority,
                {other.name: f'address = "{other.address}:{PORT}"' for other in nodes if other is not node},
            )
            for node in nodes
        ]
        for agent in self.agents:
            agent.start()
        self.at = 0

    def migrate(self) -> dict[str, float]:
        """`torpor migrate` to the next node; ms of its phases, and how long it says that nothing ran."""
        source, target = self.agents[self.at], self.agents[(self.at + 1) % len(self.agents)]
        done = source(
            *("migrate", self.place.container_id, "--to", target.node.name),
            *("--root", source.node.runc.root, "--json"),
        )
        self.at = (self.at + 1) % len(self.agents)
        told: dict[str, Any] = json.loads(done.stdout)
        return {**told["phases_ms"], "stood still": told["downtime_ms"]}

    def close(self) -> None:
        """End the agents and the container, wherever it is; the room takes the rest."""
        for agent in self.agents:
            agent.kill()
            agent.node.runc.delete(self.place.container_id)
        for client in self.place.clients:
            client.close()
        self.place.containers.close()
        for bundle in self.place.lab.path.glob("*/agent/state/arrivals/*/bundle/rootfs"):
            command("umount", "--lazy", bundle, check=False)
        for path in NETNS.iterdir():
            command("ip", "netns", "delete", path.name, check=False)


@contextlib.contextmanager
def agents(plan: Plan, name: str, lower: Path, argv: Sequence[str], kind: Kind = "l2") -> Generator[Agents]:
    """A stage with agents in a directory of its own."""
    place = Agents(Stage(Lab(kind, plan.root / f"{name}-{kind}"), lower, argv))
    try:
        yield place
    finally:
        place.close()


def in_a_row(plan: Plan) -> list[Row]:
    """Many migrations in a row under the same connections."""
    return [_in_a_row(plan, kind) for kind in plan.networks]


def _in_a_row(plan: Plan, kind: Kind) -> Row:
    with agents(plan, "migrate", plan.server, ("/bin/server", "1"), kind) as moving:
        ips = moving.place.pod.ips
        client = moving.place.client([*mixed(ips), *both_ways(ips, plan.connections)])
        phases: list[dict[str, float]] = []
        for _ in range(plan.back_and_forth):
            phases.append(moving.migrate())
            client.goes_on()
        return Row(
            scenario="migrate",
            name=f"torpor migrate, {plan.back_and_forth} in a row",
            network=kind,
            moves=plan.back_and_forth,
            tally=client.stop(),
            phases_ms=report.medians(phases),
        )


def measured(plan: Plan) -> list[Row]:
    """Migrations beside CRIU alone, which dumps and restores a second container of the same size in place."""
    return [row for kind in plan.networks for row in _measured(plan, kind)]


def _measured(plan: Plan, kind: Kind) -> list[Row]:
    rows: list[Row] = []
    argv = ("/bin/server", str(plan.mebibytes))
    with agents(plan, "migrate-measured", plan.server, argv, kind) as moving:
        place = moving.place
        containers, node = place.containers, place.node
        still = new_pod(node, "still")
        still_id = f"{place.container_id}-still"
        bundle = containers.bundle(node, still_id, plan.server, argv, still.netns_path)
        containers.run(node, still_id, bundle)
        for _ in range(plan.rounds):
            client = place.client(mixed(still.ips))
            peer, output = alone.dump_and_restore(node, still_id, bundle)
            containers.outputs.append(output)
            client.goes_on()
            rows.append(
                _row(ALONE, f"CRIU alone, same node, {plan.mebibytes} MiB", client.stop(), peer, kind)
            )
            client = place.client(mixed(place.pod.ips))
            phases = moving.migrate()
            client.goes_on()
            rows.append(_row(MEASURED, f"torpor migrate, {plan.mebibytes} MiB", client.stop(), phases, kind))
    return rows


def redis_migrates(plan: Plan) -> list[Row]:
    """redis migrates while redis-benchmark is connected."""
    with agents(plan, "migrate-redis", redis.layer(), redis.ARGV) as moving:
        server = redis.Redis(moving.place.lab.client, moving.place.pod.ips[0])
        with server.under_load() as tally:
            phases = moving.migrate()
    return [
        _row("migrate-redis", f"redis-benchmark, {redis.N_CLIENTS} clients: torpor migrate", tally, phases)
    ]


def _row(scenario: str, name: str, tally: Tally, phases_ms: dict[str, float], kind: Kind = "l2") -> Row:
    return Row(scenario=scenario, name=name, network=kind, tally=tally, phases_ms=phases_ms)
