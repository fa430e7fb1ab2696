"""Cells that must not pass for the best, however good what they are judged by looks."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from shim.cli.main import main
from sim.results import judge, report
from sim.results.tables import Cell, Results


def cells(workload: str, *each: tuple[str, dict[str, list[float]], list[str]]) -> Results:
    found = [
        Cell(name, name, {"policy": name}, values=values, statuses=statuses)
        for name, values, statuses in each
    ]
    return Results("a", "", "", 0, workload, "", found)


DONE = ["done"] * 3


def test_runs_that_end_as_livelock_neither_win_nor_are_compared() -> None:
    wins, loses = {"ettr": [0.99, 0.98, 0.97]}, {"ettr": [0.7, 0.72, 0.71]}
    cut = ("cut", wins, ["horizon", "livelock", "livelock"])
    (group,) = judge.groups(cells("training", cut, ("whole", loses, ["horizon"] * 3)))
    assert [one.name for one in group.ranked] == ["whole", "cut"]
    assert group.ranked[1].beside == "livelock in 2 of 3 runs" and not group.ranked[1].tied
    assert group.verdict() == "whole is best: ettr 0.71 ± 0.025; not compared: cut (livelock in 2 of 3 runs)"
    (group,) = judge.groups(cells("training", cut))
    assert group.verdict() == "cut: ettr 0.98 ± 0.025, but livelock in 2 of 3 runs"
    (group,) = judge.groups(cells("training", cut, ("other", loses, ["livelock"] * 3)))
    assert group.verdict().startswith("nobody wins, as each has such runs: cut: ettr 0.98")
    assert group.best.beside == "livelock in 2 of 3 runs"


def test_missing_the_deadline_is_not_cheap() -> None:
    late = ("late", {"cost_usd": [1.0, 2.0, 1.5], "deadline_met": [1.0, 0.5, 0.0]}, DONE)
    dear = ("dear", {"cost_usd": [9.0, 9.5, 9.1], "deadline_met": [1.0] * 3}, DONE)
    middle = ("middle", {"cost_usd": [7.0, 7.5, 7.1], "deadline_met": [1.0] * 3}, DONE)
    (group,) = judge.groups(cells("spot", late, dear, middle))
    assert [one.name for one in group.ranked] == ["middle", "dear", "late"]
    said = group.verdict()
    assert said.startswith("middle is best: cost_usd 7.2 ") and "better than dear by 2 " in said
    assert said.endswith("; not compared: late (deadline missed in 2 of 3 runs)")


def test_a_service_that_serves_nobody_does_not_win() -> None:
    values = {"requests": [9.0] * 3, "ttft_p99_s": [1.0, 1.1, 1.2]}
    idle = ("idle", values | {"requests_done": [0.0, 9.0, 0.0]}, DONE)
    busy = ("busy", values | {"requests_done": [9.0] * 3, "ttft_p99_s": [5.0, 5.1, 5.2]}, DONE)
    (group,) = judge.groups(cells("inference", idle, busy))
    assert (group.best.name, group.ranked[1].beside) == ("busy", "nobody served in 2 of 3 runs")


@pytest.mark.parametrize(
    ("resolved", "replays"),
    [
        ("", False),
        ("failures: [{kind: exponential, mean: 5s}]\njob: {}", False),
        ("failures: [{kind: none}, {kind: trace, path: faults.json}]", True),
        ("failures: [[{kind: [none, trace], path: faults.json}], []]", True),
        ("spot: {trace: zones.json}", True),
        ("spot: {regions: [{name: a, mean_up: 5h}]}", False),
        ("inference: {requests: {trace: [a.csv, b.csv]}}", True),
        ("study: {name: trace}", False),
    ],
)
def test_intervals_over_one_trace_are_said_to_be(
    resolved: str, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.results.plots.KINDS", ())
    results = cells("spot", ("a", {"cost_usd": [1.0, 2.0, 1.5]}, DONE))
    results.resolved = resolved
    remark = "of this trace alone: another time may differ by more"
    assert (remark in judge.remark(results)) == (remark in report.page(results)) == replays


STUDY = """
schema: 1
study: {name: hopeless, replications: {min: 2, max: 2}, horizon: 900d}
cluster: {nodes: 1}
failures: [{kind: exponential, mean: 1m}]
costs: {stall: 1s, restart: 20m}
job: {}
policies: [{name: periodic, interval: 1h}]
"""


@pytest.mark.parametrize("swept", ["", ", detection: [0s, 1s]"])
def test_livelock_is_said_where_there_is_nothing_to_compare(swept: str, tmp_path: Path) -> None:
    path = tmp_path / "hopeless.yaml"
    path.write_text(STUDY.replace("restart: 20m", "restart: 20m" + swept))
    said = CliRunner().invoke(main, ["sim", "run", str(path)])
    assert said.exit_code == 0, said.output
    assert "livelock in 2 of 2 runs" in said.output
    done = CliRunner().invoke(main, ["sim", "recommend", str(path), "-o", str(tmp_path / "p.json")])
    assert done.exit_code == 1
    assert "could not recommend a policy: " in done.output
