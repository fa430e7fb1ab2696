"""What `torpor conformance` says before and after a run; nothing is run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from engines.conformance import Outcome
from shim.cli import conformance
from shim.errors import UsageError


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often a run began; all in it is absent."""
    begun: list[str] = []

    def run(*_: object) -> Iterator[Outcome]:
        begun.append("run")
        yield Outcome(subject="tcp", course="round-trip", result="absent", reason="no loopback")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(conformance, "_check_node", lambda *_: None)
    monkeypatch.setattr(conformance.reaper, "go_on_below", lambda: None)
    monkeypatch.setattr(conformance, "run", run)
    return begun


def invoke(*words: str | Path) -> Result:
    return CliRunner().invoke(
        conformance.command, ["--engine", "criu", "--workload", "tcp", *map(str, words)]
    )


def test_a_run_in_which_nothing_applies_is_no_success(ran: list[str]) -> None:
    done = invoke()
    assert done.exit_code == 2
    assert "none applies here" in done.output
    assert "nothing was tried" in done.output
    assert ran == ["run"]


def test_a_report_that_cannot_be_written_is_told_before_the_run(ran: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = invoke("--report", tmp_path / "file" / "below")
    assert isinstance(done.exception, UsageError)
    assert "could not write a report to" in str(done.exception)
    assert ran == []


def test_a_profile_that_skips_what_there_is_not_is_refused(ran: list[str], tmp_path: Path) -> None:
    profile = tmp_path / "p.json"
    profile.write_text(json.dumps({"schema": 1, "skip": {"tcpp": "no", "tcp.clones": "no"}}))
    done = invoke("--profile", profile)
    assert isinstance(done.exception, UsageError)
    assert "there is no 'tcp" in str(done.exception)
    assert ran == []
