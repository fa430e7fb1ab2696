"""Results that a folder holds are gone on from only while all that they were made from is as it was."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shim.cli.main import main
from sim.results import sweep
from sim.results.calibrate import SHARES

STUDY = """
schema: 1
study: {name: stale, replications: {min: 2, max: 2}, horizon: 5d}
cluster: {nodes: 4}
failures: [{kind: exponential, mean: 2d}]
costs: {restart: 5m, file: measured.json}
job: {}
policies: [{name: event, on: [spot], base: {name: mine, interval: 1h}}]
"""

POLICY = """
from sim.policies.base import SetInterval
from mine.factor import FACTOR


class Mine:
    name = "mine"

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s

    def on_event(self, state, event):
        return [SetInterval(self._interval_s * FACTOR)] if event.kind == "start" else []
"""


def measured(stall_s: float) -> str:
    return json.dumps({"shares": SHARES, "phases": {"stall": {"times_s": [stall_s] * len(SHARES)}}})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text(POLICY)
    (tmp_path / "mine/factor.py").write_text("FACTOR = 1.0\n")
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torpor.policies]\nmine = mine:Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine", "mine.factor"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "measured.json").write_text(measured(30.0))
    (tmp_path / "study.yaml").write_text(STUDY)
    return tmp_path


def again(folder: Path) -> str:
    words = ["sim", "sweep", str(folder / "study.yaml"), "--out", str(folder / "r"), "--jobs", "1"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code in (0, 1), done.output
    return done.output if done.exit_code else ""


def test_measured_costs_that_changed_are_not_passed_over(folder: Path) -> None:
    assert again(folder) == again(folder) == ""
    (folder / "measured.json").write_text(measured(600.0))
    said = again(folder)
    assert "its results are from before 'measured.json' changed; give another folder" in said
    (folder / "measured.json").write_text(measured(30.0))
    assert again(folder) == ""


def test_a_base_of_another_package_that_changed_is_not_passed_over(folder: Path) -> None:
    assert again(folder) == ""
    (folder / "mine/factor.py").write_text("FACTOR = 2.0\n")
    assert "its results are from before policy 'mine' changed" in again(folder)


def test_another_version_does_not_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert again(folder) == ""
    other = {**sweep.versions(), "torpor": "999"}
    monkeypatch.setattr(sweep, "versions", lambda: other)
    assert "its results are from before torpor changed" in again(folder)
    mark = folder / "r/parts/study.json"
    mark.write_text("[]")
    assert "could not use" in again(folder)
