"""Policies of other packages that are wrong: a sentence, whoever asks them, and no harm to the others."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shim.cli.main import main

MODULE = """
import sys

from sim.policies.base import Checkpoint


class Wrong:
    name = "wrong"

    def __init__(self, how: str = "none") -> None:
        if how == "born":
            raise RuntimeError("no home")
        self.how = how

    def on_event(self, state, event):
        if self.how == "raises":
            raise KeyError("gone")
        if self.how == "exits":
            sys.exit(7)
        return {"none": None, "texts": ["hello"], "before": [Checkpoint(delay_s=-5000)]}[self.how]


class Unknown:
    name = "unknown"

    def __init__(self, when: "Nowhere") -> None: ...
"""

HEAD = """
schema: 1
study: {{name: x, replications: {{min: 2, max: 2}}, horizon: 2d}}
cluster: {{nodes: 4}}
costs: {{stall: 30s, restart: 5m}}
failures: [{{kind: exponential, rate_per_1000_node_days: 900}}]
repair: 1h
policies: [{{name: {name}}}]
"""

WORK = {
    "job": "job: {nodes: 4}",
    "queue": "queue: {classes: [{name: a, nodes: 2, work: 1h, every: 30m}]}",
    "inference": "inference: {requests: {rate: 0.1/s}, least: 0, cold: 2m, warm: 5s}",
    "zone": "spot: {work: 9h, deadline: 12h, restart: 5m, spot_price: $1/h, on_demand_price: $3/h, "
    "regions: [{name: a, mean_up: 5h, mean_down: 1h}]}",
}


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrongs.py").write_text(MODULE)
    info = tmp_path / "wrongs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrongs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[torpor.policies]\nwrong = wrongs:Wrong\nunknown = wrongs:Unknown\nabsent = wrongs:Absent\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wrongs", raising=False)


def said(folder: Path, work: str, policy: str) -> str:
    study = folder / "study.yaml"
    head = HEAD.format(name=policy)
    if "spot" in work:
        head = "\n".join(
            line for line in head.splitlines() if not re.match("cluster|fail|repair|costs", line)
        )
        head = head.replace(", horizon: 2d", "")
    study.write_text(f"{head}\n{work}\n")
    done = CliRunner().invoke(main, ["sim", "run", str(study)], env={"TORPOR_TRACES": None})
    assert done.exit_code == 1, done.output
    assert len(done.output.splitlines()) == 1
    return done.output


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("none", r"answers None, which is no list of actions; correct the policy"),
        ("texts", r"answers 'hello', which is no action; correct the policy"),
        ("raises", r"raises KeyError: 'gone'; correct the policy"),
        ("exits", r"raises SystemExit: 7; correct the policy"),
        ("before", r"asks for a checkpoint in -5000 s; correct the policy"),
    ],
)
def test_a_wrong_answer_is_one_sentence_from_each_engine(
    tmp_path: Path, work: str, how: str, why: str
) -> None:
    found = said(tmp_path, WORK[work], f"wrong, how: {how}")
    assert re.search(rf"could not use policy 'wrong': told of '\w+' it {why}", found), found


def test_a_base_that_is_wrong_is_named(tmp_path: Path) -> None:
    found = said(tmp_path, WORK["job"], "event, on: [spot], base: {name: wrong, how: texts}")
    assert "could not use policy 'wrong': told of 'start' it answers 'hello'" in found


def test_one_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    found = said(tmp_path, WORK["job"], "wrong, how: born")
    assert "could not make policy 'wrong': it raises RuntimeError: no home; correct" in found


def test_broken_packages_are_marked_among_the_others() -> None:
    done = CliRunner().invoke(main, ["sim", "policies"])
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line for line in done.output.splitlines()}
    assert "periodic" in rows and "how?" in rows["wrong"]
    assert "broken: could not make policy 'absent': wrongs:Absent does not load" in rows["absent"]
    assert "broken: could not make policy 'unknown': its arguments cannot be read" in rows["unknown"]
    listed = json.loads(CliRunner().invoke(main, ["sim", "policies", "--json"]).output)["policies"]
    assert {one["name"] for one in listed if "broken" in one} == {"absent", "unknown"}
