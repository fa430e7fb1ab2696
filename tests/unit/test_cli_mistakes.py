"""What is wrong with a command line or a setting is told in one sentence, with the right exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shim.cli.main import main

SECONDS = "it must be above 0 and at most 86400 seconds"


@pytest.fixture(autouse=True)
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings of an empty node."""
    path = tmp_path / "runtime.conf"
    text = "RUNTIME=/bin/true\nSTORE={0}/store\nSTATE={0}/state\nTOOLS={0}\nCONFIG={0}/config.toml\n"
    path.write_text(text.format(tmp_path))
    monkeypatch.setenv("TORPOR_CONF", str(path))
    return path


def torpor(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def refused(*words: str | Path, status: int = 1) -> str:
    """What a call says that ends with a status and one sentence."""
    done = torpor(*words)
    assert (done.exit_code, done.stdout) == (status, ""), done.output
    assert "Error: " in done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.partition("Error: ")[2]


@pytest.mark.parametrize(
    "modes", [["--print", "--write"], ["--dry-run", "--print"], ["--write", "--dry-run"]]
)
def test_an_installation_is_either_written_or_shown(tmp_path: Path, modes: list[str]):
    where = ["--caller", "crio", "--etc", tmp_path / "etc", "--bin-dir", tmp_path / "bin"]
    assert "exclude each other" in refused("install", *where, *modes, status=2)
    assert not (tmp_path / "etc").exists()


@pytest.mark.parametrize("verb", ["suspend", "resume"])
@pytest.mark.parametrize("value", ["nan", "-1", "0", "inf", "1e400"])
def test_a_deadline_is_a_time(verb: str, value: str):
    assert SECONDS in refused("gpu", verb, "web", "--timeout", value, status=2)


def test_a_settings_file_that_is_none(tmp_path: Path):
    (tmp_path / "config.toml").mkdir(mode=0o755)
    said = refused("images", "ls")
    assert said == f"could not run `torpor images`: {tmp_path}/config.toml: Is a directory\n"


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('engine = "nope"', "there is no engine 'nope'; known engines: criu, criu-cuda, gvisor"),
        ('overruled = ["cpu.nope"]', "there is no rule 'cpu.nope' to overrule; known: "),
    ],
)
def test_settings_name_what_there_is(tmp_path: Path, toml: str, said: str):
    path = tmp_path / "config.toml"
    path.write_text(toml)
    path.chmod(0o644)
    assert f"{path}: {said}" in refused("images", "ls")
    path.write_text('engine = "criu-cuda"\noverruled = ["cpu.features", "cpu.state"]')
    assert torpor("images", "ls").exit_code == 0


@pytest.mark.parametrize("words", [[], ["--netns", "/x", "--container", "y"]])
def test_a_pod_is_named_in_one_way(words: list[str]):
    assert "give one of --container and --netns" in refused("net", "show", *words)


def test_leases_that_are_nowhere(tmp_path: Path):
    (tmp_path / "file").touch()
    for words in (
        ["--data-dir", tmp_path / "none"],
        ["--data-dir", tmp_path / "file"],
        ["--free", "no-such"],
    ):
        assert "there is no directory /" in refused("net", "leases", *words)


def test_an_image_to_verify_that_is_not_there():
    assert refused("images", "verify", "nosuch").startswith("could not find image 'nosuch'")


@pytest.mark.parametrize("verb", ["restore", "checkpoint"])
def test_a_dry_run_of_a_wrong_question_ends_with_3(verb: str):
    """2 is the answer "not known"."""
    assert "No such option" in refused(verb, "x", "--no-such-option", "--dry-run", status=3)
    refused(verb, "x", "--no-such-option", status=2)


def test_contradictions_in_a_dry_run(tmp_path: Path):
    words = ("restore", "x", "--bundle", tmp_path, "--keep-tcp", "--network", "new")
    assert "contradicts" in refused(*words, "--dry-run", status=3)
    refused(*words, status=1)


def test_a_row_is_a_line_where_nobody_looks_at_a_screen(tmp_path: Path):
    entry = {"time": "2026-01-01T00:00:00Z", "event": "refused", "container": "web", "verdict": "no " * 200}
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "audit.log").write_text(json.dumps(entry) + "\n")
    lines = torpor("audit").stdout.splitlines()
    assert len(lines) == 2
    assert lines[1].count("no ") >= 199
