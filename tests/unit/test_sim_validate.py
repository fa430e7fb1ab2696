"""The validation table: it is whole, it passes, a wrong figure fails it, and the command says so."""

from __future__ import annotations

import importlib.util
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shim.cli.main import main
from sim.errors import SimError
from sim.validation.measures import MEASURES, TRACE_MEASURES
from sim.validation.validate import SEED, check, holds, status, table
from tests.support.traces import trace


def torpor(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(main, ["sim", *words], env={"TORPOR_TRACES": None, **environment})


def test_every_line_is_measured_and_every_measure_has_a_line() -> None:
    rows = table()
    assert [name for name, count in Counter(row.row for row in rows).items() if count > 1] == []
    assert {row.row for row in rows if not row.needs} == MEASURES.keys()
    assert {row.row for row in rows if row.needs == "traces"} == TRACE_MEASURES.keys()
    for row in rows:
        assert row.topic and row.inputs and row.source and row.tolerance, row


def test_the_simulator_agrees_with_the_table() -> None:
    for line in check(None):
        assert line.verdict in ("pass", "no trace"), line
        assert (line.seen is None) == bool(line.row.needs) == bool(line.why), line


def test_other_randomness_agrees_with_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        row for row in table() if "simulation" in row.row and not row.row.startswith("V48")
    ]  # V48: for time
    assert len(lines) > 8
    monkeypatch.setattr("sim.validation.validate.table", lambda: lines)
    failed = [line.row.row for line in check(None, SEED + 1) if line.verdict == "fail"]
    assert failed == []


def test_the_simulator_agrees_with_the_published_traces() -> None:
    folder = trace("spot/cbl_aws_2022-10-26.json").parent.parent
    lines = {line.row.row: line for line in check(folder) if line.row.needs == "traces"}
    assert {line.verdict for line in lines.values()} == {"pass"}, lines
    assert lines.keys() == TRACE_MEASURES.keys()


@pytest.mark.parametrize(
    ("tolerance", "seen", "error", "good"),
    [
        ("exact", 100.0, None, True),
        ("exact", 100.0000001, None, False),
        ("rel 0.01", 101.0, None, True),
        ("rel 0.01", 101.1, None, False),
        ("rel 0.01", 98.9, None, False),
        ("abs 2", 102.0, None, True),
        ("abs 2", 97.9, None, False),
        ("errors 3", 102.9, 1.0, True),
        ("errors 3", 103.1, 1.0, False),
        ("abs 2; errors 3", 101.0, 0.3, False),
        ("abs 2; errors 3", 101.0, 0.4, True),
        ("not 105", 100.0, 1.0, True),
        ("not 105", 101.5, 1.0, False),
        ("exact", float("nan"), None, False),
        ("abs 2", float("nan"), None, False),
    ],
)
def test_a_tolerance_holds_or_not(tolerance: str, seen: float, error: float | None, good: bool) -> None:
    assert holds(tolerance, 100.0, seen, error) is good


@pytest.mark.parametrize("tolerance", ["about right", "errors 3", "not 105", ""])
def test_a_condition_that_cannot_be_judged_is_an_error(tolerance: str) -> None:
    with pytest.raises(SimError, match="is no condition for it"):
        holds(tolerance, 100.0, 100.0, None)


def test_the_status_tells_failed_from_unchecked() -> None:
    assert status(Counter({"pass": 5})) == 0
    assert status(Counter({"pass": 5, "no trace": 1})) == 3
    assert status(Counter({"pass": 5, "no trace": 1, "fail": 1})) == 1


CHEAP = ("V01.formula", "V11.formula", "V32.replay", "V41.mean", "S02.up-2.0")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of five lines, one for each way a line can be checked."""
    lines = [row for row in table() if row.row in CHEAP]
    monkeypatch.setattr("sim.validation.validate.table", lambda: lines)


@pytest.mark.usefixtures("short")
def test_the_command_counts_what_it_could_not_check() -> None:
    done = torpor("validate")
    assert done.exit_code == 3, done.output
    assert "5 lines: 3 passed, 0 failed, 2 no trace" in done.output
    assert "not checked, 2 lines: no folder of traces was given" in done.output


@pytest.mark.usefixtures("short")
def test_the_command_names_the_file_that_a_folder_lacks(tmp_path: Path) -> None:
    for done in (
        torpor("validate", "--traces", str(tmp_path)),
        torpor("validate", TORPOR_TRACES=str(tmp_path)),
    ):
        assert done.exit_code == 3
        assert f"no infinitehbd/fault_trace.json in {tmp_path}" in done.output


@pytest.mark.usefixtures("short")
def test_a_broken_trace_is_one_sentence_and_not_a_failed_line(tmp_path: Path) -> None:
    (tmp_path / "infinitehbd").mkdir()
    (tmp_path / "infinitehbd/fault_trace.json").write_text("[]")
    done = torpor("validate", "--traces", str(tmp_path))
    assert done.exit_code == 1
    assert done.output.startswith("Error: could not read trace")
    assert "Traceback" not in done.output


@pytest.mark.usefixtures("short")
def test_a_wrong_figure_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEASURES, "V11.formula", lambda rng: 7.9)
    done = torpor("validate")
    assert done.exit_code == 1
    (line,) = [line for line in done.output.splitlines() if line.startswith("V11.formula")]
    assert "7.9" in line and "fail" in line


def test_without_the_extra_the_command_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def without_numpy(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "numpy" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_numpy)
    done = torpor("validate")
    assert done.exit_code == 1
    assert "pip install '.[sim]'" in done.output


def test_a_trace_is_inspected(tmp_path: Path) -> None:
    file = tmp_path / "nodes.csv"
    file.write_text("0,add,a\n3600000,remove,a\n")
    done = torpor("trace", "inspect", str(file))
    assert done.exit_code == 0
    assert "1, 1.000 for each hour of a node" in done.output
    done = torpor("trace", "inspect", str(tmp_path / "none.csv"))
    assert done.exit_code == 1
    assert done.output.startswith("Error: could not read trace") and "No such file" in done.output


def test_a_line_that_needs_two_files_names_the_one_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = [row for row in table() if row.row == "S03.up"]
    monkeypatch.setattr("sim.validation.validate.table", lambda: lines)
    (tmp_path / "skynomad").mkdir()
    (tmp_path / "skynomad/h100_16_13zones.tar.gz").touch()
    (line,) = check(tmp_path)
    assert line.verdict == "no trace"
    assert line.why == f"no skynomad/expected_deadline_sensitivity.csv in {tmp_path}"
