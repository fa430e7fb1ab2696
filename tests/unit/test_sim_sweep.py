"""Sweeps: as many replications as it takes, the same bytes however it was run, going on after a kill."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from sim.engine import dispatch
from sim.engine.ledger import Outcome, Span
from sim.errors import SimError
from sim.results import judge, sweep
from sim.results import tables as results
from sim.studies.config import Cluster, Config, PolicySpec, Replications, Training
from sim.studies.study import Cell, Study


def study(spreads: dict[str, float], rule: Replications, text: str = "made up") -> Study:
    cells = tuple(
        Cell(
            name,
            {"policy": "periodic", "spread": spread},
            Config(
                Cluster(4),
                Training(4, 1000.0),
                PolicySpec("periodic", {"interval": 600.0}),
                replications=rule,
                seed=7,
            ),
        )
        for name, spread in spreads.items()
    )
    return Study("made-up", "is it?", cells, {}, text)


class Fake:
    """An engine whose ETTR is 0.5 and some noise; it can be killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dies_after: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.dies_after = dies_after
        monkeypatch.setattr(dispatch, "simulate", self)

    def __call__(self, cell: Cell, replication: int, *, timeline: bool = False) -> Outcome:
        if self.dies_after is not None and len(self.calls) >= self.dies_after:
            raise KeyboardInterrupt
        self.calls.append((cell.name, replication))
        noise = random.Random(replication).gauss(0, 1)
        ettr = 0.5 + float(cell.params["spread"]) * noise
        good = 1000 * min(1.0, max(0.0, ettr))
        return Outcome(
            "done",
            {"wall_s": 1000.0, "ettr": ettr, "cost_usd": 3.0},
            {"goodput": good, "lost_work": 1000 - good},
            [float(replication), 2.5],
            [Span(0, 1000, "job0", "work")] if timeline else [],
        )


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


RULE = Replications(least=10, most=500, rel_half_width=0.01)


def test_each_cell_runs_until_its_own_interval_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    Fake(monkeypatch)
    found = sweep.run(study({"quiet": 0.001, "loud": 0.03, "hopeless": 5.0}, RULE))
    quiet, loud, hopeless = found.cells
    assert quiet.replications == 10
    assert 50 < loud.replications < 300
    assert hopeless.replications == 500
    s = loud.summary("ettr")
    assert s.ci95 <= 0.01 * s.mean
    assert loud.values["bucket.lost_work"] == [1000 - v for v in loud.values["bucket.goodput"]]
    assert (loud.summary("cost_usd").mean, loud.summary("cost_usd").ci95) == (3.0, 0.0)


def test_results_come_back_as_they_were_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Fake(monkeypatch)
    made = sweep.run(study({"a": 0.01, "b": 0.02}, RULE), tmp_path, timeline=True)
    read = results.load(tmp_path)
    assert read == made
    assert len(made.cells[1].recoveries_s) == 2 * min(
        results.RECOVERY_REPLICATIONS, made.cells[1].replications
    )
    assert made.cells[0].spans == [Span(0, 1000, "job0", "work")]


def test_the_table_is_tidy_and_the_summary_is_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Fake(monkeypatch)
    sweep.run(study({"a": 0.01, "b": 0.02}, RULE), tmp_path)
    rows = pq.read_table(tmp_path / "results.parquet").to_pylist()
    assert list(rows[0]) == ["study", "cell", "policy", "params", "rep", "seed", "metric", "value", "unit"]
    first = rows[0]
    assert (first["study"], first["cell"], first["policy"], first["rep"], first["seed"]) == (
        "made-up", "a", "periodic", 0, 7,
    )  # fmt: skip
    assert json.loads(first["params"]) == {"policy": "periodic", "spread": 0.01}
    assert {row["metric"]: row["unit"] for row in rows} == {
        "wall_s": "s", "ettr": "", "cost_usd": "$", "bucket.goodput": "s", "bucket.lost_work": "s",
    }  # fmt: skip
    lines = list(csv.DictReader((tmp_path / "summary.csv").read_text().splitlines()))
    assert tuple(lines[0]) == results.SUMMARY_COLUMNS
    line = next(line for line in lines if line["cell"] == "b" and line["metric"] == "ettr")
    values = [row["value"] for row in rows if row["cell"] == "b" and row["metric"] == "ettr"]
    assert float(line["mean"]) == pytest.approx(math.fsum(values) / len(values), rel=1e-15)
    assert int(line["n"]) == len(values)


@pytest.mark.parametrize("dies_after", [0, 15, 130, 320])
def test_a_killed_sweep_goes_on_and_gives_the_same_bytes(
    dies_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = study({"loud": 0.04, "quiet": 0.001, "hopeless": 5.0}, RULE)
    whole = Fake(monkeypatch)
    sweep.run(asked, tmp_path / "whole")
    dying = Fake(monkeypatch, dies_after)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(asked, tmp_path / "cut")
    assert not (tmp_path / "cut/results.parquet").exists()
    kept = len(list((tmp_path / "cut/parts").glob("*.parquet")))
    rest = Fake(monkeypatch)
    sweep.run(asked, tmp_path / "cut")
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")
    assert len(dying.calls) + len(rest.calls) < len(whole.calls) + sweep.BLOCK, "at most one part was redone"
    assert (kept > 0) == (dies_after >= 15)
    again = Fake(monkeypatch)
    sweep.run(asked, tmp_path / "cut")
    assert again.calls == []


def test_a_part_that_is_broken_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = study({"a": 0.01, "b": 0.02}, RULE)
    Fake(monkeypatch)
    sweep.run(asked, tmp_path)
    before = digests(tmp_path)
    part = next((tmp_path / "parts").glob("00001-*.parquet"))
    part.write_bytes(part.read_bytes()[:100])
    again = Fake(monkeypatch)
    sweep.run(asked, tmp_path)
    assert digests(tmp_path) == before
    assert {name for name, _ in again.calls} == {"b"}


def test_a_folder_is_of_one_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Fake(monkeypatch)
    sweep.run(study({"a": 0.01}, RULE), tmp_path)
    with pytest.raises(SimError, match=r"^could not go on in '.*': it holds results of another study"):
        sweep.run(study({"a": 0.01}, RULE, "another"), tmp_path)


def test_progress_is_told_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Fake(monkeypatch)
    told: list[tuple[int, int]] = []
    sweep.run(study({"a": 0.04, "b": 0.02}, RULE), tmp_path, progress=lambda *both: told.append(both))
    assert told[-1][0] == told[-1][1] == len(list((tmp_path / "parts").glob("*.parquet")))
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_metric_that_some_replications_lack() -> None:
    cell = results.Cell("a", "periodic", {})
    cell.add(Outcome("done", {"wall_s": 1.0}, {"goodput": 1.0}), 0)
    cell.add(Outcome("done", {"wall_s": 1.0, "mttf_s": 4.0}, {"goodput": 1.0}), 1)
    other = results.Cell("a", "periodic", {})
    other.add(Outcome("done", {"wall_s": 1.0}, {"goodput": 1.0}), 2)
    cell.extend(other)
    assert [math.isnan(value) for value in cell.values["mttf_s"]] == [True, False, True]
    assert (cell.summary("mttf_s").mean, cell.summary("mttf_s").n, cell.summary("wall_s").n) == (4.0, 1, 3)
    with pytest.raises(SimError, match="could not find metric 'mttr_s' of a; there are mttf_s, wall_s"):
        cell.summary("mttr_s")


def test_cells_are_ranked_by_the_failures_that_all_of_them_met() -> None:
    # The second loses to the first on every failure that both met, and met kinder ones alone.
    cells = [results.Cell(name, name, {"policy": name}) for name in ("longer", "shorter")]
    for number in range(12):
        for cell, loss in zip(cells, (0.01 + 0.001 * (number % 2), 0.0), strict=True):
            if number < 10 or cell.name == "longer":
                ettr = 0.5 + 0.02 * number + (0.2 if number >= 10 else 0.0) - loss
                cell.add(Outcome("done", {"wall_s": 1.0, "ettr": ettr}, {"goodput": 1.0}), number)
    assert cells[0].summary("ettr").mean > cells[1].summary("ettr").mean
    (group,) = judge.groups(results.Results("a", "", "", 0, "training", "", cells))
    assert group.best.cell.name == "shorter"
    assert group.ranked[1].behind is not None and group.ranked[1].behind.mean > 0
    assert "shorter is best" in group.verdict()


@pytest.mark.parametrize("missing", ["run.json", "results.parquet"])
def test_a_folder_without_results_says_so(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fake(monkeypatch)
    sweep.run(study({"a": 0.01}, RULE), tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(SimError, match=rf"it has no {missing}"):
        results.load(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(SimError, match="could not read results"):
        results.load(tmp_path)


def test_no_more_workers_are_started_than_there_are_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fake(monkeypatch)
    started: list[int] = []

    def parallel(n_jobs: int, return_as: str) -> Callable[[Iterable[Any]], Iterator[Any]]:
        started.append(n_jobs)
        return lambda calls: (call() for call in calls)

    joblib = SimpleNamespace(
        parallel_config=lambda backend, n_jobs, **_: contextlib.nullcontext(started.append(n_jobs)),
        Parallel=parallel,
        delayed=lambda function: lambda *args: functools.partial(function, *args),
    )
    monkeypatch.setattr(sweep, "_library", lambda name, extra: joblib)
    sweep.run(study(dict.fromkeys("abc", 0.0), Replications(8, 2 * sweep.BLOCK, 0.01)), tmp_path, jobs=4096)
    assert started == [6, 3], "two tasks of each cell at most, and one that each of them begins with"


def test_a_study_whose_runs_lack_what_it_is_judged_by(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch)

    def without(cell: Cell, replication: int, *, timeline: bool = False) -> Outcome:
        outcome = fake(cell, replication)
        return dataclasses.replace(outcome, metrics={"wall_s": 1000.0})

    monkeypatch.setattr(dispatch, "simulate", without)
    with pytest.raises(SimError, match="a run has no ettr"):
        sweep.run(study({"a": 0.01}, RULE))
