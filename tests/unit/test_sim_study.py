"""Studies that can be used: what they come to, and the file that says everything."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from sim.engine.dispatch import simulate
from sim.maths.laws import Constant, Exponential, Lognormal, Quantiles, Weibull
from sim.studies import study
from sim.studies.config import (
    GroupFailures,
    Inference,
    Maintenance,
    NodeFailures,
    Predictor,
    Queue,
    SpotNotice,
    SpotWork,
    TraceFailures,
    Training,
)
from sim.traces import synthetic

WHOLE = """
schema: 1
study: {name: everything, question: "what is it worth?", seed: 7, horizon: 54d,
        replications: {min: 3, max: 5, rel_half_width: 0.5}}
cluster: {nodes: 64, gpus_per_node: 8, spares: [0, 4], racks: 8, switches: 2}
failures:
  - {kind: exponential, rate_per_1000_node_days: 4}
  - {kind: weibull, mean: 200d, shape: 0.7, scope: process}
  - {kind: group, scope: rack, law: lognormal, median: 90d, sigma: 1.0, repair: 3h}
  - {kind: group, scope: switch, rate_per_1000_switch_days: 1}
  - {kind: trace, path: faults.json, start: 1d, offset: 2d, repeat: true}
  - {kind: none}
repair: {kind: lognormal, median: 20h, sigma: 1.5}
notices:
  - {kind: maintenance, every: 1d, lead: 30m, lasting: {kind: exponential, mean: 1h}, nodes: 2}
  - {kind: spot, rate_per_1000_node_days: 9, away: 1h, lead: 120s, coverage: 0.9, poll: 5s}
  - {kind: predictor, precision: 0.8, recall: 0.7, lead: 10m}
storage:
  - {name: local, write: 20Gbps, lost_with: node}
  - {name: remote, write: 10GB/s, read: 20GB/s, shared: true}
costs:
  {startup: 2m, detection: 30s, restart: {kind: quantiles, points: {p0: 100s, p50: 200s, p100: 900s}},
   async_stall: 5s, increment: 0.2, replica_stall: 1s, jit_save: 20s, migrate: 40s, swap: 90s,
   node_price: $98.32/h}
job: {gpus: 512, work: 40d, step: 8s, state: 4TB, replicas: 4, final_checkpoint: true}
policies:
  - {name: periodic, interval: [5m, 1h]}
  - daly
  - {name: event, on: [maintenance, prediction], base: {name: periodic, interval: [10m, 20m]}}
"""


def load(folder: Path, text: str) -> study.Study:
    events = synthetic.fault_events(60, 300, 0.01, 1.0, 3)
    (folder / "faults.json").write_text(json.dumps(events))
    path = folder / "study.yaml"
    path.write_text(text)
    return study.load(path)


def test_everything_that_a_study_may_say_is_read(tmp_path: Path) -> None:
    config = load(tmp_path, WHOLE).cells[0].config
    assert config.horizon_s == 54 * 86400
    assert (config.cluster.machines, config.cluster.racks, config.cluster.switches) == (64, 8, 2)
    nodes, process, rack, switch, trace = config.failures
    assert nodes == NodeFailures(Exponential(250 * 86400))
    assert process == NodeFailures(Weibull(0.7, 200 * 86400), process=True)
    assert isinstance(rack, GroupFailures)
    assert isinstance(rack.law, Lognormal)
    assert (rack.scope, rack.repair) == ("rack", Constant(3 * 3600))
    assert switch == GroupFailures("switch", Exponential(1000 * 86400))
    assert isinstance(trace, TraceFailures)
    assert (trace.start_s, trace.offset_s, trace.repeat) == (86400, 2 * 86400, True)
    maintenance, spot, predictor = config.notices
    assert maintenance == Maintenance(Constant(86400), 2, 1800, Exponential(3600))
    assert isinstance(spot, SpotNotice)
    assert (spot.coverage, spot.poll_s, spot.lead_s) == (0.9, 5, 120)
    assert predictor == Predictor(0.8, 0.7, 600)
    assert config.predictor is predictor
    local, remote = config.storage
    assert (local.write_bps, local.read_bps, local.lost_with) == (2.5e9, 2.5e9, "node")
    assert (remote.write_bps, remote.read_bps, remote.shared) == (10e9, 20e9, True)
    assert config.costs.restart == Quantiles((0.0, 0.5, 1.0), (100.0, 200.0, 900.0))
    assert config.costs.node_usd_per_s == pytest.approx(98.32 / 3600)
    work = config.workload
    assert isinstance(work, Training)
    assert (work.nodes, work.work_s, work.replicas, work.state_bytes) == (64, 40 * 86400, 4, 4e12)


def test_lists_are_sweeps_and_cells_are_all_combinations(tmp_path: Path) -> None:
    read = load(tmp_path, WHOLE)
    assert [cell.name for cell in read.cells] == [
        f"{policy} spares={spares}"
        for spares in (0, 4)
        for policy in (
            "periodic interval=5m", "periodic interval=1h", "daly",
            "event base.interval=10m", "event base.interval=20m",
        )
    ]  # fmt: skip
    assert dict(read.cells[6].params) == {
        "policy": "periodic",
        "policy.interval": 3600.0,
        "cluster.spares": 4,
    }
    assert dict(read.cells[3].params)["policy.base.interval"] == 600.0
    assert read.units == {"policy.interval": "s", "policy.base.interval": "s"}
    assert read.cells[6].config.cluster.spares == 4
    assert read.cells[6].config.policy.options == {"interval": 3600.0}


def test_the_resolved_file_loads_as_the_same_study(tmp_path: Path) -> None:
    read = load(tmp_path, WHOLE)
    (tmp_path / "resolved.yaml").write_text(read.resolved)
    again = study.load(tmp_path / "resolved.yaml")
    assert [cell.config for cell in again.cells] == [cell.config for cell in read.cells]
    assert [cell.params for cell in again.cells] == [cell.params for cell in read.cells]
    assert again.sha256 == read.sha256


def test_what_follows_from_a_sweep_is_not_frozen_in_the_resolved_file(tmp_path: Path) -> None:
    text = """
schema: 1
study: {name: sizes, horizon: 54d}
cluster: {nodes: [8, 64]}
failures: [{kind: exponential, mean: 9d}]
job: {}
costs: {stall: 30s}
policies: [none]
"""
    read = load(tmp_path, text)
    again = load(tmp_path, read.resolved)
    assert [cell.config for cell in again.cells] == [cell.config for cell in read.cells]
    assert [getattr(cell.config.workload, "nodes", 0) for cell in again.cells] == [8, 64]


def test_what_says_the_same_has_the_same_hash(tmp_path: Path) -> None:
    read = load(tmp_path, WHOLE)
    same = WHOLE.replace("horizon: 54d", "horizon: 4665600s").replace(
        "{name: everything, ", "{name: everything, warmup: 0d, "
    )
    other = WHOLE.replace("seed: 7", "seed: 8")
    assert load(tmp_path, same).sha256 == read.sha256
    assert load(tmp_path, other).sha256 != read.sha256


def test_cells_can_be_sent_elsewhere(tmp_path: Path) -> None:
    for cell in load(tmp_path, WHOLE).cells:
        assert pickle.loads(pickle.dumps(cell)) == cell


def test_sections_can_be_swept(tmp_path: Path) -> None:
    text = """
schema: 1
study: {name: sections, horizon: 54d}
cluster: {nodes: 8}
failures: [[], [{kind: exponential, mean: [9d, 18d]}]]
repair: [1h, {kind: exponential, mean: 1h}]
job: {}
costs: {stall: 30s}
policies: [none]
"""
    with pytest.raises(study.SimError, match=r"failures\[0\].mean is \['9d', '18d'\]"):
        load(tmp_path, text)
    read = load(tmp_path, text.replace("[9d, 18d]", "9d"))
    assert [cell.name for cell in read.cells] == [
        "none failures=none repair=1h", "none failures=none repair=exponential",
        "none failures=exponential repair=1h", "none failures=exponential repair=exponential",
    ]  # fmt: skip
    assert read.cells[0].params == {"policy": "none", "failures": "none", "repair": 3600.0}
    assert read.cells[0].config.failures == ()


def test_policies_of_one_name_are_told_apart_by_their_options(tmp_path: Path) -> None:
    text = """
schema: 1
study: {name: two, horizon: 54d}
cluster: {nodes: 8}
failures: [{kind: exponential, mean: 9d}]
job: {}
costs: {stall: 30s}
policies: [{name: event, on: [spot]}, {name: event, on: [maintenance, spot]}, {name: [young, daly]}]
"""
    read = load(tmp_path, text)
    assert [cell.name for cell in read.cells] == [
        "event on=spot",
        "event on=maintenance+spot",
        "young",
        "daly",
    ]
    assert read.cells[1].params == {"policy": "event", "policy.on": "maintenance+spot"}


def test_measured_costs_are_drawn_from_their_quantiles(tmp_path: Path) -> None:
    shares = [0.0, 0.5, 1.0]
    phases = {name: {"times_s": [1.0, 2.0, 9.0]} for name in ("stall", "persist", "restore")}
    (tmp_path / "measured.json").write_text(json.dumps({"schema": 1, "shares": shares, "phases": phases}))
    text = """
schema: 1
study: {name: measured, horizon: 54d}
cluster: {nodes: 8}
failures: [{kind: exponential, mean: 9d}]
job: {}
costs: {file: measured.json, restore: 7s}
policies: [daly]
"""
    (storage,) = load(tmp_path, text).cells[0].config.storage
    assert storage.stall == storage.persist == Quantiles((0.0, 0.5, 1.0), (1.0, 2.0, 9.0))
    assert storage.restore == Constant(7)


def test_other_work_is_read_too(tmp_path: Path) -> None:
    head = "schema: 1\nstudy: {name: x, horizon: 9d}\npolicies: [none]\ncluster: {nodes: 8}\n"
    queue = load(
        tmp_path, head + "queue: {classes: [{name: a, nodes: 2, work: 1h, every: 30m, priority: 2}]}"
    )
    work = queue.cells[0].config.workload
    assert isinstance(work, Queue)
    assert work.classes[0].priority == 2
    service = load(tmp_path, head + "inference: {requests: {rate: 2/s}, least: [0, 1], cold: 2m, warm: 5s}")
    work = service.cells[1].config.workload
    assert isinstance(work, Inference)
    assert (work.least, work.requests.per_s, work.cold) == (1, 2.0, Constant(120))
    spot = load(
        tmp_path,
        head.replace("none", "greedy")
        + "spot: {work: 48h, deadline: 60h, restart: 12m, spot_price: $1/h, on_demand_price: $3/h, "
        "regions: [{name: a, mean_up: 5h, mean_down: 1h}, "
        "{name: b, mean_up: 5h, mean_down: 1h, spot_price: $2/h}]}",
    )
    work = spot.cells[0].config.workload
    assert isinstance(work, SpotWork)
    assert [region.spot_usd_per_s * 3600 for region in work.regions] == [1.0, 2.0]
    assert work.regions[0].available != work.regions[1].available
    assert len(work.starts) == 100
    again = load(tmp_path, spot.resolved)
    assert again.cells[0].config.workload == work
    other = load(tmp_path, spot.resolved.replace("seed: 0\n", "seed: 1\n", 1)).cells[0].config
    assert isinstance(other.workload, SpotWork)
    assert (other.seed, other.workload.starts) == (1, work.starts)
    assert other.workload.regions[0].available != work.regions[0].available


def test_zones_of_a_trace_that_begin_at_different_ticks_are_of_one_time(tmp_path: Path) -> None:
    up = [int(100 <= tick < 200) for tick in range(600)]
    meta = {"gap_seconds": 600, "polarity": "1 = AVAILABLE", "start_indexes": [100], "window_ticks": 90}
    zones = {"a": {"first_tick": 0, "data": [1] * 600}, "b": {"first_tick": 50, "data": up[50:]}}
    (tmp_path / "zones.json").write_text(json.dumps({"meta": meta, "zones": zones}))
    read = load(
        tmp_path,
        "schema: 1\nstudy: {name: x}\npolicies: [greedy]\nspot: {work: 10h, deadline: 14h, restart: 10m, "
        "trace: zones.json, zones: b, spot_price: $1/h, on_demand_price: $3/h}",
    )
    metrics = simulate(read.cells[0], 0).metrics
    assert metrics["cost_usd"] == pytest.approx(10 + 1 / 6)
    assert (metrics["preemptions"], metrics["on_demand_work_s"]) == (0, 0)
