"""The validation table: what is expected, by whom, how closely, and whether the simulator says the same.

`validation.csv` has a line for each figure. Its tolerance is a list of conditions that must all
hold: `exact`; `rel X`; `abs X`; `errors N`, within N standard errors of the simulation; `not X`, more than 4
standard errors away from X.
"""

from __future__ import annotations

import csv
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np

from sim.errors import SimError
from sim.models.renewal import Estimate
from sim.validation.measures import MEASURES, TRACE_MEASURES, Traces

Verdict = Literal["pass", "fail", "no trace"]

SEED = 2026


@dataclass(frozen=True)
class Row:
    """A line of the table. `needs`: traces, where it does."""

    row: str
    topic: str
    inputs: str
    source: str
    expected: float
    unit: str
    tolerance: str
    needs: str


@dataclass(frozen=True)
class Checked:
    """A line and what the simulator says; `seen` is None where it was not asked, and `why` says why."""

    row: Row
    verdict: Verdict
    seen: float | None = None
    error: float | None = None
    why: str = ""


def table() -> list[Row]:
    """The lines of the table that is part of the package."""
    text = resources.files("sim").joinpath("validation/validation.csv").read_text(encoding="utf-8")
    return [
        Row(
            line["row"], line["topic"], line["inputs"], line["source"], float(line["expected"]), line["unit"],
            line["tolerance"], line["needs"],
        )
        for line in csv.DictReader(text.splitlines())
    ]  # fmt: skip


def holds(tolerance: str, expected: float, seen: float, error: float | None) -> bool:
    """Whether a figure is as expected.

    Args:
        tolerance: conditions as in the table.
        expected: what the table says.
        seen: what the simulator says.
        error: its standard error, None for a figure without one.

    Raises:
        SimError: a condition is not one, or needs a standard error that is not there.

    """
    return all(_holds(part.split(), expected, seen, error) for part in tolerance.split(";"))


def _holds(condition: list[str], expected: float, seen: float, error: float | None) -> bool:
    # On the bound is within it, whatever the last digit of a sum.
    off = abs(seen - expected) * (1 - 1e-12)
    match condition:
        case ["exact"]:
            return seen == expected
        case ["rel", bound]:
            return off <= float(bound) * abs(expected)
        case ["abs", bound]:
            return off <= float(bound)
        case ["errors", count] if error is not None:
            return off <= float(count) * error
        case ["not", other] if error is not None:
            return abs(seen - float(other)) > 4 * error
        case _:
            raise SimError(f"could not judge a figure: '{' '.join(condition)}' is no condition for it")


def check(folder: Path | None, seed: int = SEED) -> Iterator[Checked]:
    """Check every line of the table, in its order.

    Args:
        folder: where the public traces lie; None checks no line that needs one.
        seed: of every simulation; a line's randomness depends on the seed and the line alone.

    Raises:
        SimError: a trace is there and cannot be read.

    """
    traces = Traces(folder) if folder else None
    for row in table():
        if row.needs == "traces":
            yield _on_trace(row, traces)
        else:
            rng = np.random.default_rng([seed, zlib.crc32(row.row.encode())])
            seen = MEASURES[row.row](rng)
            yield _judged(row, seen)


def _on_trace(row: Row, traces: Traces | None) -> Checked:
    files, measure = TRACE_MEASURES[row.row]
    if traces is None:
        return Checked(row, "no trace", why="no folder of traces was given")
    for file in (files,) if isinstance(files, str) else files:
        if not (traces.folder / file).exists():
            return Checked(row, "no trace", why=f"no {file} in {traces.folder}")
    return _judged(row, measure(traces))


def _judged(row: Row, seen: Estimate | float) -> Checked:
    value, error = (seen.mean, seen.error) if isinstance(seen, Estimate) else (seen, None)
    good = holds(row.tolerance, row.expected, value, error)
    return Checked(row, "pass" if good else "fail", value, error)


def status(verdicts: Counter[Verdict]) -> int:
    """Exit status: 0 if every line passed, 1 if one failed, 3 if none failed but some were not checked."""
    if verdicts["fail"]:
        return 1
    return 3 if verdicts["no trace"] else 0
