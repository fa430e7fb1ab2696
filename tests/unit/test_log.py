"""Errors reach callers in the form that they decode; the audit log never stops a container."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from shim import log


def test_a_caller_can_decode_the_whole_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.json"
    path.write_text('{"level":"warning","msg":"from runc","time":"2026-01-01T00:00:00Z"}\n')
    log.runtime_error('first line\nsecond "line" \udcff', log_path=str(path), log_format="json")
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["level"] for entry in entries] == ["warning", "error"]
    assert entries[1]["msg"].startswith('first line second "line"')
    datetime.fromisoformat(entries[1]["time"])
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_text_format(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log.runtime_error("broken", log_path=str(path), log_format="text")
    assert "level=error" in path.read_text()


def test_audit_appends_json_for_root_only(tmp_path: Path) -> None:
    log.audit(tmp_path, "restore", container="c1", image="web", verdict="held")
    log.audit(tmp_path, "start", container="c1")
    path = tmp_path / "audit.log"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["event"] == "restore"
    assert first["who"]["uid"] == 0 or first["who"]["uid"] > 0
    assert second["container"] == "c1"
    assert path.stat().st_mode & 0o777 == 0o600


def test_audit_turns_over_and_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "AUDIT_MAX_BYTES", 10)
    for number in range(3):
        log.audit(tmp_path, "start", container=str(number))
    assert (tmp_path / "audit.log.1").exists()
    log.audit(tmp_path / "absent", "start")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "audit.log").symlink_to(tmp_path / "victim")
    log.audit(tmp_path / "link", "start")
    assert not (tmp_path / "victim").exists()
