"""Gangs whose policies act on notices, and what checkpoints in parts and in memory leave: by hand."""

from __future__ import annotations

from typing import Any

import pytest
import simpy

from sim.engine import training
from sim.engine.fleet import Fleet
from sim.engine.hardware import Announcement, Incident
from sim.engine.ledger import Outcome
from sim.engine.streams import Streams
from sim.maths.laws import Constant, Exponential, Fixed
from sim.policies.base import Event
from sim.policies.interval import Periodic
from sim.studies.config import (
    Cluster,
    Costs,
    Maintenance,
    NodeFailures,
    SpotNotice,
    Storage,
    Training,
)
from tests.unit.test_sim_engine import config, outages, play, spent

DAY = 86400.0


def drained(**more: Any) -> Outcome:
    """64 nodes that move from each maintenance, a stall of 10 minutes for 14 of work."""
    base: dict[str, Any] = {
        "cluster": Cluster(64, spares=16),
        "workload": Training(64),
        "notices": (Maintenance(Fixed(7200.0), 1, 1800.0, Constant(3600.0)),),
        "storage": (Storage("remote", stall=Constant(600.0)),),
        "costs": Costs(restart=Constant(300.0), migrate=Constant(45.0)),
        "horizon_s": 5 * DAY,
    }
    return play(config("migrate", {"base": {"name": "periodic", "interval": 840.0}}, **(base | more)))


def test_a_notice_during_a_stall_is_acted_on_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = drained()
    # Each checkpoint is an event now, and nothing else differs.
    monkeypatch.setattr(Periodic, "ignores", frozenset())
    played = drained()
    assert counted.buckets == pytest.approx(played.buckets)
    same = ("migrations", "maintenances", "checkpoints")
    assert [counted.metrics[name] for name in same] == [played.metrics[name] for name in same]
    assert (counted.metrics["maintenances"], counted.metrics["migrations"] > 40) == (0, True)


def test_a_notice_during_a_restart_is_acted_on_once_work_goes_on() -> None:
    # Maintenance at 300 s is told at 240 s, as the gang restarts from a failure at 220 s until 270 s.
    what: dict[str, Any] = {
        "cluster": Cluster(2, spares=2),
        "notices": (Maintenance(Fixed(300.0), 4, 60.0, Constant(1.0)),),
        "costs": Costs(restart=Constant(50.0), migrate=Constant(5.0)),
        "horizon_s": 400.0,
    }
    seen = play(config("event", failures=(outages((220, 0, 1)),), **what))
    # Saved just before it: what the policy leaves itself as room is lost.
    assert 0 < spent(seen)["lost_work"] < 5
    assert seen.metrics["maintenances"] == 1


def test_a_notice_for_machines_that_are_not_its_own_any_more_is_nothing_to_a_gang() -> None:
    heard: list[str] = []

    class Listens(Periodic):
        def on_event(self, state: Any, event: Event) -> list[Any]:
            heard.append(event.kind)
            return super().on_event(state, event)

    def told(second_failure_s: float) -> list[str]:
        """Of node 0 it is said, at 150 s and as it restarts, that it is to go at 450 s."""
        heard.clear()
        what = config(
            cluster=Cluster(1, spares=3),
            workload=Training(1, 1000.0),
            failures=(outages((149, 0, 0), (second_failure_s, 500, 0)),),
            notices=(Maintenance(Fixed(450.0), 1, 300.0, Constant(9.0)),),
            horizon_s=430.0,
        )
        training.run(what, Streams(1, 0), Listens(100.0), False)
        return heard

    assert told(420.0) == ["start", "failure", "restart", "notice", "failure"]
    # At 180 s another machine takes its place.
    assert told(180.0) == ["start", "failure", "failure", "restart"]


@pytest.mark.parametrize("cause", ["maintenance", "spot"])
def test_machines_that_are_taken_for_no_time_are_there_again(cause: str) -> None:
    def migrations(away_s: float) -> float:
        notices = {
            "maintenance": Maintenance(Fixed(21_600.0), 1, 1800.0, Constant(away_s)),
            "spot": SpotNotice(Exponential(2 * DAY), Constant(away_s), 1800.0),
        }
        what = {"cluster": Cluster(8, spares=4), "workload": Training(8), "horizon_s": 20 * DAY}
        return drained(notices=(notices[cause],), **what).metrics["migrations"]

    assert migrations(0.0) == pytest.approx(migrations(1.0), rel=0.1)
    assert migrations(0.0) > 20


class Holder:
    """Has one machine, and is told nothing that it heeds."""

    def __init__(self) -> None:
        self.nodes: list[int | None] = [None]
        self.missing = {0}

    def struck(self, incident: object, places: object) -> None: ...
    def told(self, announcement: object, places: object) -> None: ...
    def repaired(self, node: int) -> None: ...


def test_a_machine_that_was_drained_and_given_away_again_is_nobody_elses() -> None:
    env = simpy.Environment()
    fleet = Fleet(env, 2, None)
    first, second, third = Holder(), Holder(), Holder()
    assert fleet.claim(first) is None and first.nodes == [0]
    prediction = Announcement(0.0, (0,), 60.0, "prediction", "node")
    assert fleet.replace(first, 0, prediction) and first.nodes == [1]
    # It comes true before its time is over, and the machine is whole at once.
    env.run(until=50.0)
    fleet.strike(Incident(50.0, (0,), 0.0, "node", 1))
    assert fleet.claim(second) is None and second.nodes == [0]
    env.run(until=70.0)
    assert fleet.claim(third) is not None and fleet.free == 0
    fleet.release(second, [0])
    assert third.nodes == [0]


def test_the_first_checkpoint_in_parts_is_whole() -> None:
    what = config(
        "incremental",
        {"interval": 3600.0},
        cluster=Cluster(1),
        workload=Training(1, 330 * 60.0),
        storage=(Storage("remote", stall=Constant(600.0)),),
        costs=Costs(increment=0.1),
    )
    assert spent(play(what))["checkpoint_stall"] == pytest.approx(600 + 4 * 60)


def test_parts_are_read_back_over_shared_bandwidth_too() -> None:
    storage = (Storage("remote", 10.0, 10.0, shared=True),)
    what = config(
        "incremental",
        {"interval": 100.0},
        cluster=Cluster(2),
        workload=Training(1, 1000.0, state_bytes=100.0, count=2),
        storage=storage,
        costs=Costs(increment=0.5),
        failures=(outages((360, 0, 0)),),
    )
    # Checkpoints end at 120, 230 and 340 s, one whole and two parts; the other gang works as they are read.
    assert spent(play(what))["restore"] == pytest.approx(10 * (1 + 2 * 0.5))


def test_nodes_that_make_no_whole_group_join_the_last_one() -> None:
    costs = Costs(replica_stall=Constant(1.0))

    def lost(nodes: int, *gone: int) -> float:
        what = config(
            "in-memory",
            {"copies": 2, "remote": 500.0, "interval": 100.0},
            cluster=Cluster(nodes),
            workload=Training(nodes, 1000.0),
            costs=costs,
            failures=(outages(*((450.0, 1.0, node) for node in gone)),),
        )
        return spent(play(what))["lost_work"]

    # 0 and 1 are a group, and 2, 3 and 4 hold copies of each other in a ring.
    assert lost(5, 4) == lost(5, 1, 2) == lost(5, 0, 4) == 46
    assert lost(5, 0, 1) == lost(5, 2, 3) == lost(5, 3, 4) == lost(5, 4, 2) == 446
    assert lost(3, 0, 2) == 446


def test_asynchronous_checkpoints_are_no_closer_than_one_is_written() -> None:
    def ettr(interval_s: float) -> float:
        what = config(
            policy="asynchronous",
            options={"interval": interval_s},
            cluster=Cluster(1),
            workload=Training(1),
            failures=(NodeFailures(Exponential(10_800.0)),),
            storage=(Storage("remote", stall=Constant(60.0), persist=Constant(1200.0)),),
            costs=Costs(async_stall=Constant(5.0)),
            horizon_s=10 * DAY,
        )
        return play(what).metrics["ettr"]

    assert ettr(300.0) == ettr(1200.0)
