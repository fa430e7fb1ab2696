"""`torpor migrate`: what means nothing together, and what its list looks like to a program."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.cli import migrate as migrate_cli
from cluster.config import Config
from cluster.records import Departure, Record
from shim.errors import UsageError


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "agent.toml"
    path.write_text(f'node = "a"\nstate = "{tmp_path / "state"}"\n')
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--list", "web"], "CONTAINER means nothing with --list"),
        (["--list", "--resolve", "source"], "--resolve means nothing with --list"),
        (["--list", "--to", "b"], "--to means nothing with --list"),
        (["--list", "--dry-run", "--json"], "--dry-run means nothing with --list"),
        (["--resolve", "source", "0" * 16, "--json"], "--json means nothing with --resolve"),
        (["--resolve", "source", "0" * 16, "--to", "b"], "--to means nothing with --resolve"),
        (["--resolve", "source", "0" * 16, "--root", "/run/runc"], "--root means nothing with --resolve"),
        (["--resolve", "source", "0" * 16, "--as", "web"], "--as means nothing with --resolve"),
    ],
)
def test_nothing_that_is_asked_for_is_passed_by(config_path: Path, words: list[str], wrong: str) -> None:
    done = CliRunner().invoke(migrate_cli.command, [*words, "--config", str(config_path)])
    assert isinstance(done.exception, UsageError)
    assert wrong in str(done.exception)


def test_a_list_that_a_program_reads_is_not_cut(config_path: Path, tmp_path: Path) -> None:
    container_id = "0123456789abcdef" * 4
    record = Record(Config(node="a", state=tmp_path / "state").departures, "0" * 16)
    with record.begun():
        record.make(
            Departure(
                migration="0" * 16,
                container_id=container_id,
                root="/run/runc",
                directory="/run/torpor/c",
                bundle="/b",
                peer="a-node-with-a-long-name",
                engine="criu",
                netns="/run/netns/c",
                identity=b"{}",
                owner="c",
            )
        )
    done = CliRunner().invoke(migrate_cli.command, ["--list", "--config", str(config_path)])
    (line,) = [line for line in done.output.splitlines() if "0" * 16 in line]
    assert line.split() == ["0" * 16, container_id, "to", "a-node-with-a-long-name", "preparing"]
    assert len(line) < 200  # nor is it filled up
