"""The event engine on cases worked out by hand: policies, machines, levels, replicas, notices."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sim.engine import gang, hardware, training
from sim.engine.dispatch import simulate
from sim.engine.hardware import Announcement, Incident
from sim.engine.ledger import Ledger, Outcome
from sim.engine.streams import Streams
from sim.errors import SimError
from sim.maths.laws import Constant, Exponential, Fixed, Quantiles, Weibull
from sim.policies.base import (
    Action,
    Checkpoint,
    Event,
    Policy,
    RunOn,
    SetInterval,
    SetLevels,
    State,
)  # fmt: skip
from sim.studies import study
from sim.studies.config import (
    Cluster,
    Config,
    Costs,
    GroupFailures,
    Maintenance,
    NodeFailures,
    PolicySpec,
    Predictor,
    SpotNotice,
    Storage,
    TraceFailures,
    Training,
)
from sim.studies.study import Cell
from sim.traces import faults
from tests.support.traces import trace

CHECKOUT = Path(__file__).resolve().parents[2]
DAY = 86400.0


def outages(*faults: tuple[float, float, int]) -> TraceFailures:
    return TraceFailures("by hand", faults, 1e9)


def config(policy: str = "periodic", options: dict[str, object] | None = None, **more: Any) -> Config:
    """Two nodes, 1000 s of work, a checkpoint costs 10 s, a restart 50 s."""
    if options is None:
        options = {"interval": 100.0} if policy != "none" else {}
    base: dict[str, Any] = {
        "cluster": Cluster(2),
        "workload": Training(2, 1000.0, replicas=2, step_s=8.0),
        "policy": PolicySpec(policy, options),
        "storage": (Storage("remote", stall=Constant(10.0)),),
        "costs": Costs(restart=Constant(50.0)),
        "horizon_s": 1e5,
    }
    return Config(**(base | more))


def play(what: Config, **more: Any) -> Outcome:
    return simulate(Cell("by hand", {}, what), 0, **more)


def spent(outcome: Outcome) -> dict[str, float]:
    return {name: round(seconds, 6) for name, seconds in outcome.buckets.items() if seconds}


def test_a_job_without_failures_pays_its_checkpoints() -> None:
    seen = play(config())
    assert spent(seen) == {"goodput": 1000, "checkpoint_stall": 90}
    assert (seen.status, seen.metrics["checkpoints"], seen.metrics["wall_s"]) == ("done", 9, 1090)
    assert "mttf_s" not in seen.metrics


def test_a_failed_node_is_waited_for_and_work_since_the_checkpoint_is_lost() -> None:
    # The second checkpoint ends at 220 s; the node is back at 550 s.
    seen = play(config(failures=(outages((250, 300, 1)),)), timeline=True)
    assert spent(seen) == {
        "goodput": 1000, "checkpoint_stall": 90, "lost_work": 30, "waiting": 300, "restart": 50,
    }  # fmt: skip
    assert seen.recoveries_s == [350]
    assert seen.metrics["recovery_s"] == 350
    assert seen.metrics["nodes_down"] == pytest.approx(300 / seen.metrics["wall_s"])
    states = [(span.t0_s, span.t1_s, span.state) for span in seen.spans if span.who == "job0"]
    assert states[:7] == [
        (0, 100, "work"), (100, 110, "checkpoint_stall"), (110, 210, "work"), (210, 220, "checkpoint_stall"),
        (220, 250, "lost_work"), (250, 550, "waiting"), (550, 600, "restart"),
    ]  # fmt: skip
    assert states[-1] == (seen.metrics["wall_s"] - 100, seen.metrics["wall_s"], "work")
    assert [(s.t0_s, s.t1_s, s.cause) for s in seen.spans if s.who == "node1"] == [(250, 550, "node")]


def test_a_spare_takes_the_place_of_a_failed_node() -> None:
    failures = (outages((250, 300, 1)),)
    seen = play(config(cluster=Cluster(2, spares=1), failures=failures))
    assert "waiting" not in spent(seen)
    assert seen.metrics["spare_use"] == pytest.approx(300 / seen.metrics["wall_s"])
    swapped = play(
        config(
            "hot-spares",
            cluster=Cluster(2, spares=1),
            failures=failures,
            costs=Costs(restart=Constant(50.0), swap=Constant(5.0)),
        )
    )
    assert spent(swapped)["restart"] == 5
    assert swapped.metrics["swaps"] == 1


def test_requeueing_gives_all_machines_back() -> None:
    costs = Costs(detection=Constant(7.0), restart=Constant(50.0), requeue=Constant(20.0))
    seen = play(config("requeue", failures=(outages((250, 300, 1)),), costs=costs))
    assert seen.metrics["requeues"] == 1
    assert spent(seen)["detection"] == 7
    assert spent(seen)["waiting"] == 293


def test_a_failure_while_waiting_is_waited_out_too() -> None:
    seen = play(config(failures=(outages((250, 300, 1), (300, 400, 0)),)))
    assert spent(seen)["waiting"] == 450
    assert seen.metrics["failures"] == 1


def test_a_failure_during_a_restart_starts_it_over() -> None:
    seen = play(config(failures=(outages((250, 300, 1), (580, 10, 1)),)))
    assert spent(seen)["restart"] == 80
    assert seen.recoveries_s == [390]
    assert seen.metrics["failures"] == 2


def test_a_checkpoint_that_ends_as_the_failure_strikes_counts() -> None:
    assert spent(play(config(failures=(outages((220, 1, 1)),)))).get("lost_work") is None
    assert spent(play(config(failures=(outages((219.9, 1, 1)),))))["lost_work"] == 100


def test_an_asynchronous_checkpoint_counts_once_it_is_written() -> None:
    costs = Costs(async_stall=Constant(1.0))
    storage = (Storage("remote", stall=Constant(10.0), persist=Constant(30.0)),)
    late = config("asynchronous", failures=(outages((132, 1, 1)),), costs=costs, storage=storage)
    early = config("asynchronous", failures=(outages((130.9, 1, 1)),), costs=costs, storage=storage)
    assert spent(play(late))["lost_work"] == pytest.approx(31)
    assert spent(play(early))["lost_work"] == pytest.approx(129.9)


def test_increments_are_cheap_and_a_restart_reads_them_all() -> None:
    storage = (Storage("remote", stall=Constant(10.0), restore=Constant(40.0)),)
    costs = Costs(increment=0.1)
    seen = play(
        config(
            "incremental",
            {"full_every": 4, "interval": 100.0},
            storage=storage,
            costs=costs,
            failures=(outages((250, 1, 0)),),
        )
    )
    # By then one whole one and an increment of 1 s, which both are read; the fifth and ninth are whole, too.
    assert spent(seen)["restore"] == pytest.approx(40 * 1.1)
    assert spent(seen)["checkpoint_stall"] == pytest.approx(6 * 1 + 3 * 10)


def test_a_level_is_lost_with_what_it_is_on() -> None:
    storage = (
        Storage("local", stall=Constant(1.0), lost_with="node", restore=Constant(2.0)),
        Storage("remote", stall=Constant(10.0), restore=Constant(20.0)),
    )
    options: dict[str, object] = {"interval": 100.0, "remote_every": 3}

    def lost(process: bool) -> dict[str, float]:
        what = config(
            "multilevel",
            options,
            cluster=Cluster(1),
            workload=Training(1),
            storage=storage,
            # The second one only makes the policy use both levels.
            failures=(NodeFailures(Fixed(550.0), process), NodeFailures(Exponential(1e9), not process)),
            horizon_s=640.0,
        )
        return spent(play(what))

    # Checkpoints end at 101, 202, 312 (on storage), 413 and 514 s.
    assert (lost(process=True)["lost_work"], lost(process=True)["restore"]) == (36, 2)
    assert (lost(process=False)["lost_work"], lost(process=False)["restore"]) == (236, 20)


def test_copies_in_memory_survive_until_a_whole_group_is_gone() -> None:
    costs = Costs(replica_stall=Constant(1.0), replica_restore=Constant(3.0))
    four: dict[str, Any] = {"cluster": Cluster(4), "workload": Training(4, 1000.0), "costs": costs}
    options: dict[str, object] = {"copies": 2, "remote": 500.0, "interval": 100.0}

    def lost(*nodes: int) -> float:
        failures = (outages(*((450.0, 1.0, node) for node in nodes)),)
        return spent(play(config("in-memory", options, failures=failures, **four)))["lost_work"]

    # Copies end at 101, 202, 303 and 404 s; the first on storage is the fifth.
    assert lost(1) == 46
    assert lost(0, 1) == 446


def test_what_survivors_hold_is_saved_after_the_failure() -> None:
    costs = Costs(restart=Constant(50.0), jit_save=Constant(20.0))
    seen = play(config("just-in-time", {}, failures=(outages((250, 10, 1)),), costs=costs))
    # A step is lost only: 250 s are 31 steps of 8 s and 2 s.
    assert spent(seen) == {"goodput": 1000, "lost_work": 2, "save_after_failure": 20, "restart": 50}
    alone = config("just-in-time", {}, failures=(outages((250, 10, 0), (250, 10, 1)),), costs=costs)
    # Both copies are gone before anything is saved: the first failure is noticed, the second ends the save.
    assert spent(play(alone))["lost_work"] == 250


def test_a_notice_is_time_enough_to_save_or_to_move() -> None:
    maintenance = (Maintenance(Fixed(250.0), 1, 60.0, Constant(100.0)),)
    saved = play(config("event", notices=maintenance))
    assert saved.metrics["maintenances"] >= 2
    # The policy leaves itself a little room.
    assert spent(saved)["lost_work"] <= 3 * saved.metrics["maintenances"]
    stayed = play(config("periodic", notices=maintenance))
    assert spent(stayed)["lost_work"] > 30
    moved = play(
        config(
            "migrate",
            failures=(outages((450, 100, 1)),),
            notices=(Predictor(1.0, 1.0, 60.0),),
            cluster=Cluster(2, spares=1),
            costs=Costs(restart=Constant(50.0), migrate=Constant(5.0)),
        )
    )
    assert (moved.metrics["migrations"], moved.metrics["failures"]) == (1, 0)
    assert spent(moved) == {"goodput": 1000, "checkpoint_stall": 90, "migration": 5}


def test_a_predictor_keeps_its_precision_and_recall() -> None:
    what = config(
        failures=(NodeFailures(Exponential(2 * 1000.0)),), notices=(Predictor(0.5, 0.8, 30.0),), seed=4
    )
    failures = predictions = true = 0
    at_s: list[float] = []
    last_s = 0.0
    for item in hardware.stream(what, Streams(4, 0)):
        assert item.at_s >= last_s
        last_s = item.at_s
        if isinstance(item, Announcement):
            predictions += 1
            at_s.append(item.at_s + item.lead_s)
        else:
            failures += 1
            true += any(abs(time - item.at_s) < 1e-6 for time in at_s[-200:])
        if failures == 20_000:
            break
    assert true / failures == pytest.approx(0.8, abs=0.02)
    assert true / predictions == pytest.approx(0.5, abs=0.02)


def test_spot_notices_cover_a_share_and_come_late_by_a_poll() -> None:
    what = config(notices=(SpotNotice(Exponential(2000.0), Constant(10.0), 120.0, 0.7, 5.0),))
    leads: list[float] = []
    taken = 0
    for item in hardware.stream(what, Streams(1, 0)):
        if isinstance(item, Announcement):
            leads.append(item.lead_s)
        else:
            taken += 1
        if taken == 5000:
            break
    assert len(leads) / taken == pytest.approx(0.7, abs=0.03)
    assert 115 <= min(leads[3:]) <= max(leads) <= 120


def test_a_rack_fails_with_all_its_nodes() -> None:
    what = config(
        cluster=Cluster(8, racks=4),
        workload=Training(8, 1000.0),
        failures=(GroupFailures("rack", Exponential(3000.0), Constant(70.0)),),
    )
    first = next(item for item in hardware.stream(what, Streams(0, 0)) if isinstance(item, Incident))
    assert (len(first.nodes), first.down_s, first.cause, first.severity) == (2, 70, "group", 2)
    assert play(what).metrics["most_nodes_down"] >= 2


def test_a_trace_is_replayed_from_its_start_again_and_again() -> None:
    faults = ((10.0, 20.0, 0), (50.0, 5.0, 1))
    trace = TraceFailures("t", faults, 100.0, 15.0, 60.0, repeat=True)
    seen: list[list[tuple[float, float, int]]] = []
    for replication in (0, 1):
        items = hardware.stream(config(failures=(trace,)), Streams(0, replication))
        incidents = [next(items) for _ in range(4)]
        seen.append([(i.at_s, i.down_s, i.nodes[0]) for i in incidents if isinstance(i, Incident)])
    # Under way at the start: what is left of it.
    assert seen[0] == [(0, 15, 0), (35, 5, 1), (95, 20, 0), (135, 5, 1)]
    assert seen[1] == [(35, 20, 0), (75, 5, 1), (135, 20, 0), (175, 5, 1)]
    over = TraceFailures("t", faults, 100.0, 50.0, 60.0)
    with pytest.raises(SimError, match="before replication 1 begins"):
        next(hardware.stream(config(failures=(over,)), Streams(0, 1)))


def test_failures_are_the_same_whatever_the_policy_and_the_spares() -> None:
    def times(spares: int, policy: str) -> list[float]:
        what = config(
            policy,
            cluster=Cluster(2, spares=spares),
            failures=(NodeFailures(Weibull(0.7, 900.0)), NodeFailures(Exponential(800.0))),
            workload=Training(2),
            repair=Constant(30.0),
            horizon_s=20_000,
        )
        seen = play(what, timeline=True)
        return [span.t0_s for span in seen.spans if span.who in ("node0", "node1") and span.state == "down"]

    assert times(0, "periodic") == times(5, "none")


def test_a_job_that_can_never_end_is_given_up() -> None:
    failures = (NodeFailures(Fixed(90.0)),)
    seen = play(config("periodic", failures=failures, horizon_s=math.inf))
    assert seen.status == "livelock"
    assert seen.metrics["goodput_s"] == 0
    assert seen.metrics["failures"] >= gang.MOST_BARREN - 1


def test_more_checkpoints_than_can_be_drawn_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.engine.schedule._MOST_DRAWN", 1000)
    storage = (Storage("remote", stall=Quantiles((0.0, 1.0), (1e-3, 2e-3))),)
    with pytest.raises(SimError, match=r"one every 0\.1 s; use a longer interval"):
        play(config("periodic", {"interval": 0.1}, storage=storage))
    # With costs that are constants they are only counted.
    free = (Storage("remote", stall=Constant(1e-3)),)
    assert play(config("periodic", {"interval": 0.1}, storage=free)).metrics["checkpoints"] == 9999


def test_a_job_that_never_gets_its_machines_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.engine.clock.MOST_EVENTS", 5000)
    # Two nodes that are nearly always in repair, never whole at once for long enough.
    what = config(failures=(NodeFailures(Exponential(1.0)),), repair=Exponential(1e4), horizon_s=math.inf)
    seen = play(what)
    assert seen.status == "livelock"
    assert spent(seen)["waiting"] > 0.9 * seen.metrics["wall_s"]


def test_watching_ends_at_the_horizon_and_what_is_in_memory_is_kept() -> None:
    seen = play(config(horizon_s=505.0))
    assert seen.status == "horizon"
    assert spent(seen) == {"goodput": 465, "checkpoint_stall": 40}
    assert seen.metrics["unfinished"] == 1
    stopped = play(config(horizon_s=260.0, failures=(outages((250, 300, 1)),)))
    assert spent(stopped) == {"goodput": 200, "checkpoint_stall": 20, "lost_work": 30, "waiting": 10}


def test_gangs_share_bandwidth_and_spares() -> None:
    storage = (Storage("remote", 10.0, 10.0, shared=True),)
    alone = config(storage=storage, workload=Training(1, 1000.0, state_bytes=100.0))
    both = config(storage=storage, workload=Training(1, 1000.0, state_bytes=100.0, count=2))
    assert spent(play(alone))["checkpoint_stall"] == 90
    # They write at the same moments, so each takes twice as long.
    assert spent(play(both))["checkpoint_stall"] == pytest.approx(2 * 180)


def test_a_gang_writes_one_checkpoint_at_a_time_over_shared_bandwidth() -> None:
    both = config(
        "asynchronous",
        {"interval": 100.0},
        storage=(Storage("remote", 10.0, 10.0, shared=True),),
        workload=Training(1, 1000.0, state_bytes=1000.0, count=2),
        costs=Costs(async_stall=Constant(1.0)),
    )
    # Of nine, all but the first wait 100 s for the one before, which takes 200 s as the other gang writes.
    assert spent(play(both))["checkpoint_stall"] == pytest.approx(2 * (9 * 1 + 8 * 100))


class Scripted:
    """Does what a script says at events of a kind."""

    name = "scripted"

    def __init__(self, **script: Sequence[Action]) -> None:
        self.script = script
        self.heard: list[str] = []

    def on_event(self, state: State, event: Event) -> list[Action]:
        self.heard.append(event.kind)
        return list(self.script.get(event.kind, ()))


def scripted(what: Config, policy: Policy) -> Outcome:
    # As the caller has it, but for one copy a gang: what it heard is looked at.
    policy.__class__.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    return training.run(what, Streams(0, 0), policy, False)


def test_a_policy_hears_of_everything_that_it_does_not_ignore() -> None:
    policy = Scripted(start=[SetInterval(400.0)])
    what = config(
        failures=(outages((450, 20, 1)),),
        notices=(Maintenance(Fixed(700.0), 1, 60.0, Constant(10.0)),),
        storage=(Storage("remote", stall=Constant(10.0), persist=Constant(5.0)),),
    )
    scripted(what, policy)
    assert policy.heard[:5] == ["start", "checkpoint", "failure", "repaired", "restart"]
    assert "notice" in policy.heard


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ({"start": [RunOn("spot")]}, "'scripted': it asks for RunOn.*no training job can do"),
        ({"start": [SetInterval(0.0)]}, "a checkpoint every 0.0 s of work"),
        ({"start": [SetLevels((("moon", 1),))]}, "at level 'moon'; there are remote"),
        ({"start": [SetLevels((("remote", 2),))]}, "first does not get each"),
        ({"failure": [Checkpoint("moon")]}, "'moon', which is no storage"),
    ],
)
def test_what_a_job_cannot_do_is_refused(script: dict[str, Sequence[Action]], said: str) -> None:
    with pytest.raises(SimError, match=said):
        scripted(config(failures=(outages((250, 300, 1)),)), Scripted(**script))


def test_a_policy_that_goes_round_in_circles_ends_with_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    free = config(storage=(Storage("remote", stall=Constant(0.0)),))
    at_once = Scripted(
        start=[SetInterval(100.0)], checkpoint=[SetInterval(100.0), Checkpoint()], persisted=[]
    )
    assert scripted(free, at_once).status == "done"
    monkeypatch.setattr("sim.engine.clock.MOST_EVENTS", 20_000)
    policy = Scripted(start=[SetInterval(100.0)], checkpoint=[SetInterval(1e-9)])
    assert scripted(free, policy).status == "livelock"


def test_events_grow_with_failures_and_not_with_checkpoints_or_nodes() -> None:
    def events(nodes: int, interval_s: float, days: float, mean_s: float) -> tuple[float, float, float]:
        what = config(
            options={"interval": interval_s},
            cluster=Cluster(nodes),
            workload=Training(nodes),
            failures=(NodeFailures(Exponential(mean_s * nodes)),),
            horizon_s=days * DAY,
        )
        metrics = play(what).metrics
        return metrics["events"], metrics["failures"], metrics["checkpoints"]

    few, failures, checkpoints = events(2048, 800, 54, 11135)
    many, _, many_checkpoints = events(2048, 10, 54, 11135)
    assert many_checkpoints > 20 * checkpoints
    assert abs(many - few) <= 10
    assert few <= 4 * failures + 20
    assert abs(events(16, 800, 54, 11135)[0] / failures - few / failures) < 0.5
    long, long_failures, _ = events(2048, 800, 540, 11135)
    assert long / long_failures == pytest.approx(few / failures, rel=0.05)


def test_an_outcome_that_does_not_add_up_cannot_be_made() -> None:
    with pytest.raises(SimError, match="a bug of the simulator"):
        Outcome("done", {"wall_s": 10.0}, {"goodput": 9.99})
    with pytest.raises(SimError, match="bucket restart is below 0"):
        Outcome("done", {"wall_s": 10.0}, {"goodput": 12.0, "restart": -2.0})
    ledger = Ledger()
    ledger.add("goodput", 7)
    ledger.move("goodput", "lost_work", 3)
    assert {name: s for name, s in ledger.buckets().items() if s} == {"goodput": 4, "lost_work": 3}


def test_the_same_seed_gives_the_same_bytes_whatever_the_hash_seed() -> None:
    code = (
        "import tests.unit.test_sim_engine as t\n"
        "from sim.studies.config import *; from sim.maths.laws import *\n"
        "what = t.config('migrate', cluster=Cluster(40, spares=4, racks=5), workload=Training(20, count=2),\n"
        "    failures=(NodeFailures(Weibull(0.7, 1e6)), GroupFailures('rack', Exponential(1e6))),\n"
        "    repair=Lognormal(5e4, 1.5), horizon_s=3e6, notices=(Predictor(0.5, 0.7, 300.0),\n"
        "    Maintenance(Fixed(4e4), 3, 900.0, Exponential(3e3))),\n"
        "    costs=Costs(restart=Quantiles((0.0, 1.0), (50.0, 90.0)), migrate=Constant(9.0)))\n"
        "seen = t.play(what, timeline=True)\n"
        "print(seen)\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(CHECKOUT)},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1
    assert "migrations': 0.0" not in said.pop()


def test_the_public_trace_has_as_many_nodes_down_as_it_says(tmp_path: Path) -> None:
    path = trace("infinitehbd/fault_trace.json")
    span_d = faults.span_d(faults.load(path))
    (tmp_path / "study.yaml").write_text(f"""
schema: 1
study: {{name: replay, horizon: {span_d!r}d}}
cluster: {{nodes: 350, spares: 50}}
failures: [{{kind: trace, path: {path}}}]
job: {{}}
costs: {{stall: 30s}}
policies: [{{name: periodic, interval: 1h}}]
""")
    (cell,) = study.load(tmp_path / "study.yaml").cells
    seen = simulate(cell, 0)
    expected = faults.faulty(faults.load(path))
    assert seen.metrics["nodes_down"] == pytest.approx(expected.mean, rel=1e-6)
    assert seen.metrics["most_nodes_down"] == expected.most
    assert spent(seen).get("waiting") is None
