"""The network lab in its short form: connected clients must not notice that a pod slept or moved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.netlab import room
from tests.netlab.scenarios import SHORT
from tests.support.containers import CHECKOUT, cgroup_hierarchies, processes_with, until

pytestmark = pytest.mark.engine


def start(*words: str | Path) -> subprocess.Popen[str]:
    argv = room.words([sys.executable, "-m", "tests.netlab", "--short", *words])
    return subprocess.Popen(
        argv,
        env=room.environment(),
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the lab wrote; its output is shown where a test fails."""
    output = tmp_path_factory.mktemp("netlab") / "netlab.json"
    with start("--output", output) as lab:
        text, _ = lab.communicate(timeout=600)
    print(text)
    yield json.loads(output.read_text()) | {"text": text}
    assert not processes_with(f"netlab-{os.getpid()}")


@pytest.mark.parametrize("name", SHORT)
def test_no_byte_is_lost_and_no_connection_broken(played: dict[str, Any], name: str) -> None:
    rows = [row for row in played["rows"] if row["scenario"] == name]
    assert rows, played["text"]
    for row in rows:
        assert row["good"], (row["problem"], row["errors"])
        assert row["bytes_lost"] == row["bytes_repeated"] == 0


def test_its_last_line_has_the_figures(played: dict[str, Any]) -> None:
    last = played["text"].splitlines()[-1]
    assert last.startswith("netlab: ")
    assert "0 bytes lost, 0 twice or out of order, 0 connections broken" in last


def test_a_killed_lab_leaves_nothing(tmp_path: Path) -> None:
    """Not a process, and no namespace, mount or link, since those are the lab's own."""
    tag = room.environment()[room.VARIABLE]
    with start("--only", "suspend", "--output", tmp_path / "netlab.json") as lab:
        until(lambda: processes_with(f"{tag}/"), timeout_s=60, what="the lab has a container")
        lab.send_signal(signal.SIGKILL)
        lab.wait()
        until(lambda: not processes_with(tag), what="its containers are gone")
    until(lambda: not processes_with(str(tmp_path)), what="the lab itself is gone")

    def removed() -> bool:
        room.remove_cgroups(tag)  # what has died stays in them for a moment
        return not [group for each in cgroup_hierarchies() for group in each.glob(tag)]

    until(removed, what="its cgroups are empty")
