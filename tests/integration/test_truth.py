"""The short form of `./run truth`: what the verdict says of real images is what really happens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.containers import CHECKOUT, cgroup_hierarchies, mounts_under, processes_with

pytestmark = pytest.mark.engine


def test_the_verdict_is_the_truth(tmp_path: Path) -> None:
    output = tmp_path / "truth.json"
    words = [sys.executable, "-m", "tests.truth", "--short", "--output", output]
    played = subprocess.run(words, cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=900)
    assert played.returncode == 0, played.stdout + played.stderr
    document = json.loads(output.read_text())
    ends = [row["happened"] for row in document["scenarios"]]
    assert {"restored", "failed"} == set(ends), "it saw both ends"
    counts = document["confusion"]
    assert counts["yes"] == {"restored": ends.count("restored"), "failed": 0}
    assert counts["no"] == {"restored": 0, "failed": ends.count("failed")}
    assert "torpor said" in "".join(played.stdout.splitlines()[-9:]), "the table comes last"
    tag = document["tag"]
    assert not processes_with(tag)
    assert not mounts_under(tag)
    assert not [path for top in cgroup_hierarchies() for path in top.glob(f"tt-{tag}")]


def test_an_unknown_scenario_is_an_error(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.truth", "--only", "of no such name", "--output", tmp_path / "t"]
    played = subprocess.run(words, cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=60)
    assert played.returncode == 2
    assert "no scenario" in played.stderr
