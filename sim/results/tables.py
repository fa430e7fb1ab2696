"""Results of a study: tidy tables in Parquet, a summary in CSV, and what is read back from them.

A folder of results holds run.json (what was run), results.parquet (a line for each metric of each
replication), summary.csv (a line for each metric of each cell), recoveries.parquet and timeline.parquet (of
the first replications), and parts/ (what a sweep that was stopped goes on from). The same study gives the
same bytes, so nothing in there tells when or where it was run.
"""

from __future__ import annotations

import csv
import importlib
import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.ledger import Outcome, Span
from sim.errors import BROKEN, SimError, why
from sim.maths.statistics import Summary, summarise

RESULTS, RECOVERIES, TIMELINE = "results.parquet", "recoveries.parquet", "timeline.parquet"
SUMMARY, RUN, PARTS = "summary.csv", "run.json", "parts"

BUCKET = "bucket."
"""Before the name of a bucket, where it stands among metrics."""

RECOVERY_REPLICATIONS = 20
"""Replications of a cell whose single recoveries are kept: enough for a distribution, and not too many."""

SUMMARY_COLUMNS = ("cell", "policy", "metric", "unit", "mean", "sd", "n", "ci95", "p5", "p50", "p95")

_UNITS = {"_s": "s", "_usd": "$", "_bytes": "B", "_h": "h"}


def pyarrow() -> Any:
    """The library of Parquet files, loaded where it is needed; it has no types.

    Raises:
        SimError: it is not installed.

    """
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise SimError("could not handle results: pyarrow is missing; pip install '.[sim]'") from error


def parquet() -> Any:
    """Its part that reads and writes."""
    pyarrow()
    return importlib.import_module("pyarrow.parquet")


def unit(metric: str) -> str:
    """Of a metric, by the end of its name; "" for a share or a count."""
    if metric.startswith(BUCKET):
        return "s"
    return next((name for end, name in _UNITS.items() if metric.endswith(end)), "")


Params = Mapping[str, str | float | int | bool]


@dataclass
class Cell:
    """One cell's replications: values of each metric in their order; recoveries and timeline of the first."""

    name: str
    policy: str
    params: Params
    units: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of parameters that are times or sizes: s, B."""
    interval_s: float | None = None
    """The interval that the policy of a training job sets at the start, None if it sets none."""
    values: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    statuses: list[str] = field(default_factory=list[str])
    recoveries_s: list[float] = field(default_factory=list[float])
    spans: list[Span] = field(default_factory=list[Span])

    @property
    def replications(self) -> int:
        """How many were run."""
        return len(self.statuses)

    def add(self, outcome: Outcome, replication: int) -> None:
        """Add the next replication, and its number. A metric that it does not have is not a number in it."""
        metrics = outcome.metrics | {BUCKET + name: value for name, value in outcome.buckets.items()}
        for name in dict.fromkeys([*self.values, *metrics]):
            earlier = self.values.setdefault(name, [math.nan] * self.replications)
            earlier.append(float(metrics.get(name, math.nan)))
        if replication < RECOVERY_REPLICATIONS:
            self.recoveries_s += outcome.recoveries_s
        self.statuses.append(outcome.status)
        self.spans += outcome.spans

    def extend(self, other: Cell) -> None:
        """Add the replications that follow on these."""
        for name in dict.fromkeys([*self.values, *other.values]):
            earlier = self.values.setdefault(name, [math.nan] * self.replications)
            earlier += other.values.get(name, [math.nan] * other.replications)
        self.statuses += other.statuses
        self.recoveries_s += other.recoveries_s
        self.spans += other.spans

    def mttf_s(self) -> tuple[float, float] | None:
        """Time over failures, of all replications, and half of its 95 % interval; None without failures.

        The mean of each replication's own ratio would be too long where failures are few. The interval is
        that of a ratio of means, by linearisation.
        """
        walls, failures = self.values.get("wall_s", []), self.values.get("failures", [])
        count = math.fsum(failures)
        if not count or len(failures) < 2:
            return None
        mean_s = math.fsum(walls) / count
        off = summarise([wall - mean_s * number for wall, number in zip(walls, failures, strict=True)])
        return mean_s, off.ci95 / (count / len(failures))

    def summary(self, metric: str) -> Summary:
        """Mean, interval and quantiles of a metric, over the replications that have it.

        Raises:
            SimError: the cell has no such metric.

        """
        if metric not in self.values:
            known = ", ".join(sorted(name for name in self.values if not name.startswith(BUCKET)))
            raise SimError(f"could not find metric '{metric}' of {self.name}; there are {known}")
        return summarise([value for value in self.values[metric] if not math.isnan(value)] or [math.nan])


@dataclass
class Results:
    """A study's cells, in its order, and what was run."""

    title: str
    question: str
    sha256: str
    seed: int
    workload: str
    resolved: str
    cells: list[Cell]
    versions: Mapping[str, str] = field(default_factory=dict[str, str])


def _dictionary(values: Sequence[str], lengths: Sequence[int]) -> Any:
    """A column that repeats each value so often."""
    pa = pyarrow()
    distinct = sorted(set(values))
    index = {value: number for number, value in enumerate(distinct)}
    numbers = np.repeat(np.array([index[value] for value in values], dtype=np.int32), lengths)
    return pa.DictionaryArray.from_arrays(pa.array(numbers), pa.array(distinct, pa.string()))


def table(study: str, seed: int, cells: Iterable[Cell]) -> Any:
    """The tidy table: study, cell, policy, params, rep, seed, metric, value, unit."""
    pa = pyarrow()
    rows = [(cell, metric, values) for cell in cells for metric, values in cell.values.items()]
    lengths = [len(values) for _, _, values in rows]
    total = sum(lengths)
    columns = {
        "study": _dictionary([study], [total]),
        "cell": _dictionary([cell.name for cell, _, _ in rows], lengths),
        "policy": _dictionary([cell.policy for cell, _, _ in rows], lengths),
        "params": _dictionary([json.dumps(dict(cell.params)) for cell, _, _ in rows], lengths),
        "rep": pa.array(np.concatenate([np.arange(0, dtype=np.int32), *map(_numbers, lengths)])),
        "seed": pa.array(np.full(total, seed, dtype=np.int64)),
        "metric": _dictionary([metric for _, metric, _ in rows], lengths),
        "value": pa.array(np.array([value for _, _, values in rows for value in values], dtype=np.float64)),
        "unit": _dictionary([unit(metric) for _, metric, _ in rows], lengths),
    }
    return pa.table(columns)


def _numbers(count: int) -> NDArray[np.int32]:
    return np.arange(count, dtype=np.int32)


def _series(content: Any) -> Iterator[tuple[str, str, list[float]]]:
    """Cell, metric and values of each series of a tidy table, whose lines lie together."""
    columns = [content.column(name).combine_chunks() for name in ("cell", "metric")]
    numbers = [np.asarray(column.indices) for column in columns]
    names = [column.dictionary.to_pylist() for column in columns]
    values: list[float] = content.column("value").to_numpy().tolist()
    changes = np.flatnonzero(np.logical_or.reduce([n[1:] != n[:-1] for n in numbers])) + 1
    starts = [0, *changes.tolist()] if values else []
    for start, stop in itertools.pairwise([*starts, len(values)]):
        yield names[0][numbers[0][start]], names[1][numbers[1][start]], values[start:stop]


def _long(columns: Mapping[str, Any], rows: Sequence[tuple[Any, ...]]) -> Any:
    """A table of rows whose columns have those types."""
    pa = pyarrow()
    return pa.table(
        {
            name: pa.array([row[place] for row in rows], kind)
            for place, (name, kind) in enumerate(columns.items())
        }
    )


def recoveries(cells: Iterable[Cell]) -> Any:
    """The table of single recoveries."""
    pa = pyarrow()
    rows = [(cell.name, recovery_s) for cell in cells for recovery_s in cell.recoveries_s]
    return _long({"cell": pa.string(), "recovery_s": pa.float64()}, rows)


def timeline(cells: Iterable[Cell]) -> Any:
    """The table of who was in which state when."""
    pa = pyarrow()
    text, number = pa.string(), pa.float64()
    columns = {"cell": text, "t0_s": number, "t1_s": number, "who": text, "state": text, "cause": text}
    rows = [(c.name, s.t0_s, s.t1_s, s.who, s.state, s.cause) for c in cells for s in c.spans]
    return _long(columns, rows)


def write_atomically(path: Path, data: bytes) -> None:
    """Put a file there whole or not at all; into a device, a FIFO or what a link leads to.

    Raises:
        SimError: it cannot be written.

    """
    new = path.with_name(path.name + ".new")
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(data)
            return
        new.write_bytes(data)
        new.replace(path)
    except OSError as error:
        raise SimError(f"could not write '{path}': {error.strerror or error}; give another path") from error


def check_place(path: Path) -> None:
    """Refuse, before there is anything to write, a path where no file can be put.

    Raises:
        SimError: none can.

    """
    new = path.with_name(path.name + ".new")
    try:
        new.touch()
        new.unlink()
    except OSError as error:
        raise SimError(f"could not write '{path}': {error.strerror or error}; give another path") from error


def _write_table(path: Path, content: Any) -> None:
    sink = io.BytesIO()
    parquet().write_table(content, sink, compression="zstd")
    write_atomically(path, sink.getvalue())


def summary_csv(cells: Iterable[Cell]) -> str:
    """One line for each metric of each cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(SUMMARY_COLUMNS)
    for cell in cells:
        for metric in cell.values:
            s = cell.summary(metric)
            numbers = (repr(s.mean), repr(s.sd), s.n, repr(s.ci95), repr(s.p5), repr(s.p50), repr(s.p95))
            writer.writerow((cell.name, cell.policy, metric, unit(metric), *numbers))
    return text.getvalue()


def save(results: Results, folder: Path) -> None:
    """Write all but the parts."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RUN, _run_json(results).encode())
    _write_table(folder / RESULTS, table(results.title, results.seed, results.cells))
    _write_table(folder / RECOVERIES, recoveries(results.cells))
    if any(cell.spans for cell in results.cells):
        _write_table(folder / TIMELINE, timeline(results.cells))
    write_atomically(folder / SUMMARY, summary_csv(results.cells).encode())


def _run_json(results: Results) -> str:
    document = {
        "schema": 1,
        "title": results.title,
        "question": results.question,
        "sha256": results.sha256,
        "seed": results.seed,
        "workload": results.workload,
        "versions": dict(results.versions),
        "resolved": results.resolved,
        "cells": [
            {
                "name": cell.name,
                "policy": cell.policy,
                "params": dict(cell.params),
                "units": dict(cell.units),
                "interval_s": cell.interval_s,
                "replications": cell.replications,
                "statuses": {status: cell.statuses.count(status) for status in sorted(set(cell.statuses))},
            }
            for cell in results.cells
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def load(folder: Path) -> Results:
    """Read a folder of results.

    Raises:
        SimError: it holds none, or broken ones.

    """
    if missing := [name for name in (RUN, RESULTS, RECOVERIES) if not (folder / name).exists()]:
        raise SimError(
            f"could not read results in '{folder}': it has no {missing[0]}; "
            "run `torpor sim sweep STUDY --out FOLDER` first"
        )
    pa, file = pyarrow(), RUN
    try:
        run = json.loads((folder / RUN).read_bytes())
        cells = {
            cell["name"]: Cell(
                cell["name"],
                cell["policy"],
                cell["params"],
                cell["units"],
                cell["interval_s"],
                statuses=[s for s, count in cell["statuses"].items() for _ in range(count)],
            )
            for cell in run["cells"]
        }
        found = Results(
            run["title"], run["question"], run["sha256"], run["seed"], run["workload"], run["resolved"],
            list(cells.values()), run["versions"],
        )  # fmt: skip
        file = RESULTS
        for name, metric, values in _series(parquet().read_table(folder / RESULTS)):
            cells[name].values[metric] = values
        file = RECOVERIES
        lines = parquet().read_table(folder / RECOVERIES).to_pydict()
        for name, value in zip(lines["cell"], lines["recovery_s"], strict=True):
            cells[name].recoveries_s.append(value)
        file = TIMELINE
        if (folder / TIMELINE).exists():
            for row in parquet().read_table(folder / TIMELINE).to_pylist():
                name = row.pop("cell")
                cells[name].spans.append(Span(**row))
        return found
    except (*BROKEN, pa.ArrowException) as error:
        raise SimError(
            f"could not read results '{folder / file}': {why(error)}; run the study again into another folder"
        ) from error


def part_bytes(sha256: str, cell: Cell, start: int) -> bytes:
    """What one task found: replications of one cell from `start` on, as a Parquet file of its own."""
    pa = pyarrow()
    content = table("", 0, [cell])
    extra = {
        b"torpor": json.dumps(
            {
                "sha256": sha256,
                "start": start,
                "statuses": cell.statuses,
                "recoveries_s": cell.recoveries_s,
                "spans": [[s.t0_s, s.t1_s, s.who, s.state, s.cause] for s in cell.spans],
            }
        ).encode()
    }
    sink = pa.BufferOutputStream()
    parquet().write_table(content.replace_schema_metadata(extra), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def read_part(path: Path, sha256: str, cell: Cell) -> Cell | None:
    """What a part holds, None if it is broken or of another study."""
    pa = pyarrow()
    found = Cell(cell.name, cell.policy, cell.params, cell.units)
    try:
        content = parquet().read_table(path)
        extra = json.loads(content.schema.metadata[b"torpor"])
        if extra["sha256"] != sha256:
            return None
        found.values = {metric: values for _, metric, values in _series(content)}
        found.statuses = extra["statuses"]
        found.recoveries_s = extra["recoveries_s"]
        found.spans = [Span(*row) for row in extra["spans"]]
    except (*BROKEN, pa.ArrowException):
        return None
    return found
