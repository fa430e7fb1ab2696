"""Files from outside that are not what they should be: whoever reads one says in a sentence which and why."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sim.errors import SimError
from sim.policies import registry
from sim.results import calibrate, sweep, tables
from sim.studies import study
from sim.traces import capacity, faults, membership, priced, requests
from sim.traces.inspect import inspect
from sim.validation import published

STUDY = """
schema: 1
study: {name: small, horizon: 5d}
cluster: {nodes: 32}
failures: [{FAILURES}]
costs: {COSTS}
job: {nodes: 32}
policies: [young]
"""
RATE = "kind: exponential, rate_per_1000_node_days: 300"


def of_costs(path: Path) -> object:
    file = path.parent / "s.yaml"
    file.write_text(STUDY.replace("FAILURES", RATE).replace("COSTS", f"file: {path.name}"))
    return study.load(file)


def of_failures(path: Path) -> object:
    file = path.parent / "s.yaml"
    file.write_text(
        STUDY.replace("FAILURES", f"kind: trace, path: {path.name}").replace("COSTS", "stall: 30s")
    )
    return study.load(file)


def of_results(path: Path) -> object:
    for name in (tables.RESULTS, tables.RECOVERIES):
        (path.parent / name).touch()
    return tables.load(path.rename(path.parent / tables.RUN).parent)


def of_results_table(path: Path) -> object:
    document = {"cells": [], "title": "", "question": "", "sha256": "", "seed": 1, "workload": "training"}
    (path.parent / tables.RUN).write_text(json.dumps(document | {"resolved": "", "versions": {}}))
    (path.parent / tables.RECOVERIES).touch()
    path.rename(path.parent / tables.RESULTS)
    return tables.load(path.parent)


def of_parts(path: Path) -> object:
    (path.parent / tables.PARTS).mkdir()
    path.rename(path.parent / tables.PARTS / "study.json")
    return sweep._parts(path.parent, {"the study": "a"})


def of_archive(path: Path) -> object:
    with tarfile.open(path.parent / "zones.tar", "w") as archive:
        archive.add(path, "zone/full.json")
    return priced.load(path.parent / "zones.tar")


READERS: dict[str, Callable[[Path], object]] = {
    "trace inspect": inspect,
    "faults": faults.load,
    "windows": capacity.load_windows,
    "counts": capacity.load_counts,
    "membership": membership.load,
    "requests": requests.load,
    "published figures": lambda path: published.expected(path, "deadline_ratio") or inspect(path),
    "zones with prices": of_archive,
    "policy.json": registry.from_policy_json,
    "measured.json of a study": of_costs,
    "trace of a study": of_failures,
    "timings": lambda path: calibrate._read(path),
    "measured.json of a plot": calibrate.load,
    "run.json": of_results,
    "results.parquet": of_results_table,
    "parts": of_parts,
}

DAMAGE: dict[str, bytes | None] = {
    "deep": b"[" * 100_000,
    "deep and closed": b'{"schema": 1, "a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "thousands of digits": b'{"schema": ' + b"1" * 5000 + b"}",
    "more than a float": b'{"schema": 1' + b"0" * 400 + b"}",
    "binary": bytes(range(256)),
    "utf-16": '{"schema": 1}'.encode("utf-16"),
    "a directory": None,
    "empty": b"",
    "other keys": b'{"schema": 1, "operation": "restore"}',
    "a list": b"[3]",
    "a number": b"7",
    "rows of nothing": b",,\n",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, reader: str, damage: str) -> None:
    path = tmp_path / "file.json"
    content = DAMAGE[damage]
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(SimError) as caught:
        READERS[reader](path)
    said = str(caught.value)
    # A study is read first, but it is not what is wrong; marks of other parts are those of the folder.
    names = (path.name, tables.RUN, tables.RESULTS, "zones.tar", "study.json", tmp_path.name)
    assert any(f"{name}'" in said for name in names)
    assert len(said.splitlines()) == 1 and len(said) < 600, "a sentence, not the file"
    assert "recursion" not in said and "int_max_str_digits" not in said, "no words of Python's"


@pytest.mark.parametrize(
    ("reader", "content", "why"),
    [
        ("run.json", {"schema": 1}, r"'.*/run\.json': it lacks 'cells'"),
        ("measured.json of a plot", {}, r"'.*/file\.json': it lacks 'schema'"),
        (
            "measured.json of a plot",
            {"schema": 1, "shares": calibrate.SHARES},
            r"'.*/file\.json': Object missing required field `engines`",
        ),
        ("measured.json of a study", {"shares": [0, 1]}, r"'.*/file\.json'.*it lacks 'phases'"),
        (
            "measured.json of a study",
            {"shares": [0, 1], "phases": {"stall": {"times_s": [1, 10**400]}}},
            r"'.*/file\.json'.*a number in it is too large",
        ),
        (
            "measured.json of a study",
            {"shares": [0, 1], "phases": {"stall": {"times_s": [1, float("inf")]}}},
            r"'.*/file\.json'.*give one time of 0 or more",
        ),
        (
            "timings",
            {"schema": 1, "operation": "restore", "total_s": 10**400},
            r"'.*/file\.json': total_s is 1000+\.\.\.0+, which is no time",
        ),
    ],
)
def test_what_is_missing_is_named_with_its_file(
    tmp_path: Path, reader: str, content: object, why: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SimError, match=why):
        READERS[reader](path)


def test_a_study_that_names_a_file_no_system_can_have_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(STUDY.replace("FAILURES", RATE).replace("COSTS", 'file: "a\\0b"'))
    with pytest.raises(SimError, match=r"costs\.file"):
        study.load(tmp_path / "s.yaml")
