"""However broken torpor is, the calls that stop containers reach the real runtime."""

import subprocess
from pathlib import Path

import pytest

from shim.argv import parse
from shim.launcher import base_python, package_root
from shim.verbs.dispatch import serve


@pytest.mark.parametrize(
    ("verb", "status"),
    [("delete", None), ("kill", None), ("state", None), ("features", None), ("start", 1), ("exec", 255)],
)
def test_a_misspelt_setting_stops_no_container_from_stopping(
    tmp_path: Path, verb: str, status: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text("colour = 1")
    (tmp_path / "config.toml").chmod(0o644)
    settings = {"RUNTIME": "/bin/true", "STATE": str(tmp_path), "CONFIG": str(tmp_path / "config.toml")}
    words = [verb] if verb == "features" else [verb, "c1"]
    assert serve(parse(words), settings) == status
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("words", [["delete", "--force", "c1"], ["kill", "c1", "KILL"]])
def test_a_damaged_state_keeps_no_container_from_stopping(tmp_path: Path, words: list[str]) -> None:
    root = tmp_path / "root"
    directory = tmp_path / "containers" / str(root).replace("/", "%2F") / "c1"
    directory.mkdir(parents=True)
    (directory / "state.json").write_text("{")
    settings = {"RUNTIME": "/bin/true", "STATE": str(tmp_path), "CONFIG": str(tmp_path / "none")}
    assert serve(parse(["--root", str(root), *words]), settings) is None


@pytest.mark.parametrize(("verb", "status"), [("kill", 0), ("start", 1)])
def test_a_lost_dependency_stops_no_container_from_stopping(tmp_path: Path, verb: str, status: int) -> None:
    conf, root = tmp_path / "runtime.conf", tmp_path / "root"
    conf.write_text(f"RUNSC=/bin/true\nSTATE={tmp_path}\n")
    directory = tmp_path / "containers" / str(root).replace("/", "%2F") / "c1"
    directory.mkdir(parents=True)
    (directory / "held").touch()
    code = f"import sys; sys.path.insert(0, {str(package_root())!r}); from shim.entry import main"
    words = ["-IS", "-c", f"{code}; main({str(conf)!r}, 'RUNSC', '')", "0", "torpor-runtime-runsc"]
    run = subprocess.run(
        [base_python(), *words, "--root", str(root), verb, "c1"], check=False, capture_output=True
    )
    assert run.returncode == status, run.stderr


def test_what_kill_says_itself_is_the_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The real runtime would say it in words that callers do not know."""
    runsc = tmp_path / "runsc"
    runsc.write_text("#!/bin/sh\necho 'sandbox is not running' >&2\nexit 128\n")
    runsc.chmod(0o755)
    settings = {
        "HANDLER": "RUNSC",
        "RUNSC": str(runsc),
        "STATE": str(tmp_path),
        "CONFIG": str(tmp_path / "none"),
    }
    assert serve(parse(["kill", "c1", "KILL"], "runsc"), settings) == 1
    assert capfd.readouterr().err == "torpor: could not kill container 'c1': container not running\n"
