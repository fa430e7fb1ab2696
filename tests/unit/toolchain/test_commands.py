"""`torpor toolchain` and `torpor doctor` as a user and a script see them, with false tools on PATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shim.cli.main import COMMANDS, main

TORPOR = [sys.executable, "-m", "shim.cli.main"]


def torpor(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TORPOR, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def false_tool(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from shim.cli.main import main\n"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "print([name for name in sys.modules if name.startswith('shim.cli.') and name != 'shim.cli.main'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_command_without_its_module_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "later", ("shim.cli.not_written", "Something."))
    assert "later" not in CliRunner().invoke(main, ["--help"]).output
    assert CliRunner().invoke(main, ["later"]).exit_code == 2
    assert CliRunner().invoke(main, ["toolchain", "--help"]).exit_code == 0


def test_env_is_understood_by_a_shell(tmp_path: Path) -> None:
    prefix = tmp_path / "with space 'and quote'"
    false_tool(prefix / "bin", "criu", "echo mine")
    false_tool(prefix / "cni", "bridge", "exit 0")
    printed = torpor("toolchain", "env", "--prefix", prefix)
    assert printed.returncode == 0, printed.stderr
    script = f'{printed.stdout}\ncriu; echo "$TORPOR_PREFIX"; echo "$CNI_PATH"'
    out = subprocess.run(["/bin/sh", "-euc", script], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["mine", str(prefix), str(prefix / "cni")]


def test_list_says_whose_a_tool_is(tmp_path: Path) -> None:
    own = false_tool(tmp_path / "prefix/bin", "criu", "echo Version: 4.9")
    systems = false_tool(tmp_path / "elsewhere", "runc", "echo runc version 1.2.3")
    done = torpor(
        "toolchain", "list", "--json", "--prefix", tmp_path / "prefix", PATH=str(tmp_path / "elsewhere")
    )
    rows = {row["unit"]: row for row in json.loads(done.stdout)["tools"]}
    assert (rows["criu"]["path"], rows["criu"]["origin"], rows["criu"]["version"]) == (
        str(own),
        "toolchain",
        "4.9",
    )
    assert (rows["runc"]["path"], rows["runc"]["origin"], rows["runc"]["version"]) == (
        str(systems),
        "system",
        "1.2.3",
    )
    assert rows["pycriu"]["origin"] in {"missing", "system"}


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    precious = false_tool(tmp_path / "bin", "criu", "exit 0")
    done = torpor("toolchain", "install", "--prefix", tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert str(tmp_path / "bin") in done.stderr
    assert precious.exists()
    assert not (tmp_path / "generations").exists()


@pytest.fixture
def old_node(tmp_path: Path) -> Path:
    """A prefix whose criu is Debian 12's: too old, and it does not start."""
    false_tool(tmp_path / "bin", "criu", '[ "$1" = --version ] && echo "Version: 3.17.1" || exit 1')
    return tmp_path


def test_doctor_tells_why_and_what_to_do(old_node: Path) -> None:
    done = torpor("doctor", "--prefix", old_node)
    assert done.returncode == 1
    assert "criu 3.17.1 is too old, 4.2 is needed" in done.stdout
    assert "remedy: torpor toolchain install" in done.stdout
    assert "torpor cannot work here" in done.stdout


def test_doctor_for_machines(old_node: Path) -> None:
    done = torpor("doctor", "--json", "--prefix", old_node)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["schema"] == 1
    assert report["ready"] is False
    assert any("criu" in reason for reason in report["obstacles"])
    criu = next(row for row in report["tools"] if row["unit"] == "criu")
    assert criu["path"] == str(old_node / "bin/criu")
    assert criu["severity"] == "refuse"
    assert {"rule", "severity", "message", "remedy"} == set(report["node"][0])


def test_doctor_asks_the_engine(tmp_path: Path) -> None:
    """What would make it refuse a call must not look well here."""
    false_tool(tmp_path / "bin", "runc", "exit 1")
    settings = tmp_path / ".criu/default.conf"
    settings.parent.mkdir()
    settings.write_text("exec-cmd\n")
    done = torpor("doctor", "--json", "--prefix", tmp_path, HOME=str(tmp_path))
    assert done.returncode == 1
    report = json.loads(done.stdout)
    refused = {row["rule"]: row["message"] for row in report["node"] if row["severity"] == "refuse"}
    assert f"{settings} sets exec-cmd" in refused["criu.config"]
    assert refused["criu.config"] in report["obstacles"]
