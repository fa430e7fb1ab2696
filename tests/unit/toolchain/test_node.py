"""What `torpor doctor` thinks of a node: dangers in CRIU's own configuration files, cgroups, rights."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from engines.api import Finding
from shim.toolchain import node
from shim.toolchain.find import Tools, find_tools


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine on which all is well."""
    (tmp_path / "etc/criu").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/ns_last_pid").touch()
    (tmp_path / "proc/self/status").write_text("Name:\tx\nCapEff:\t000001ffffffffff\n")
    (tmp_path / "proc/filesystems").write_text("nodev\tproc\nnodev\toverlay\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").touch()
    return tmp_path


@pytest.fixture
def tools() -> Tools:
    return replace(find_tools(Path("/nonexistent")), criu=None)


def look(tools: Tools, root: Path) -> dict[str, Finding]:
    return {finding.rule.removeprefix("node."): finding for finding in node.check(tools, root=root)}


def test_a_good_node(tools: Tools, root: Path) -> None:
    found = look(tools, root)
    assert not [f for name, f in found.items() if f.severity == "refuse" and name != "root"]
    assert found["cgroups"].message == "cgroup v2"


@pytest.mark.parametrize(
    "line",
    ["action-script /tmp/x.sh", "images-dir=/tmp", "--images-dir /x", "log-file /x # why", "  leave-running"],
)
@pytest.mark.parametrize("name", ["runc.conf", "default.conf"])
def test_a_dangerous_option_is_refused(tools: Tools, root: Path, name: str, line: str) -> None:
    path = root / "etc/criu" / name
    path.write_text(f"# a comment with action-script\ntcp-established\n{line}\n")
    found = look(tools, root)["criu-configuration"]
    assert found.severity == "refuse"
    assert str(path) in found.message
    assert str(path) in found.remedy


def test_a_harmless_option_is_a_warning(tools: Tools, root: Path) -> None:
    (root / "etc/criu/runc.conf").write_text("tcp-established\n")
    assert look(tools, root)["criu-configuration"].severity == "warn"


def test_comments_alone_are_fine(tools: Tools, root: Path) -> None:
    (root / "etc/criu/runc.conf").write_text("# action-script /x\n\n")
    assert look(tools, root)["criu-configuration"].severity == "ok"


def test_a_file_that_others_can_write_is_refused(tools: Tools, root: Path) -> None:
    path = root / "etc/criu/runc.conf"
    path.touch()
    path.chmod(0o666)
    found = look(tools, root)["criu-configuration"]
    assert found.severity == "refuse"
    assert "chmod 644" in found.remedy


def test_what_a_kernel_may_lack(tools: Tools, root: Path) -> None:
    (root / "proc/sys/kernel/ns_last_pid").unlink()
    (root / "proc/filesystems").write_text("nodev\tproc\n")
    (root / "sys/fs/cgroup/cgroup.controllers").unlink()
    (root / "proc/self/status").write_text("CapEff:\t000001fffeffffff\n")
    found = look(tools, root)
    assert found["kernel"].severity == "refuse"
    assert found["cgroups"].severity == "refuse"
    assert found["overlay"].severity == "warn"
    assert found["capabilities"].severity == "warn"
    assert all(f.remedy for f in found.values() if f.severity == "refuse")


def test_hybrid_cgroups_with_a_freezer_will_do(tools: Tools, root: Path) -> None:
    (root / "sys/fs/cgroup/cgroup.controllers").unlink()
    for name in ("freezer", "unified"):
        (root / "sys/fs/cgroup" / name).mkdir()
    found = look(tools, root)["cgroups"]
    assert found.severity == "ok"
    assert "hybrid" in found.message


def test_tar_is_needed(tools: Tools, root: Path) -> None:
    found = look(replace(tools, search_path=str(root)), root)["tar"]
    assert found.severity == "refuse"


def test_root_is_needed(tools: Tools, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert look(tools, root)["root"].severity == "refuse"
