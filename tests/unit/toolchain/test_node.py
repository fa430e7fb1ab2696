"""What `torpor doctor` thinks of a node: kernel, cgroups, rights."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.api import Finding
from shim.toolchain import node


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine on which all is well."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/ns_last_pid").touch()
    (tmp_path / "proc/self/status").write_text("Name:\tx\nCapEff:\t000001ffffffffff\n")
    (tmp_path / "proc/filesystems").write_text("nodev\tproc\nnodev\toverlay\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").touch()
    return tmp_path


def look(root: Path) -> dict[str, Finding]:
    return {finding.rule.removeprefix("node."): finding for finding in node.check(root=root)}


def test_a_good_node(root: Path) -> None:
    found = look(root)
    assert not [finding for finding in found.values() if finding.severity == "refuse"]
    assert found["cgroups"].message == "cgroup v2"


def test_what_a_kernel_may_lack(root: Path) -> None:
    (root / "proc/sys/kernel/ns_last_pid").unlink()
    (root / "proc/filesystems").write_text("nodev\tproc\n")
    (root / "sys/fs/cgroup/cgroup.controllers").unlink()
    (root / "proc/self/status").write_text("CapEff:\t000001fffeffffff\n")
    found = look(root)
    assert found["kernel"].severity == "refuse"
    assert found["cgroups"].severity == "refuse"
    assert found["overlay"].severity == "warn"
    assert found["capabilities"].severity == "warn"
    assert all(f.remedy for f in found.values() if f.severity == "refuse")


def test_hybrid_cgroups_with_a_freezer_will_do(root: Path) -> None:
    (root / "sys/fs/cgroup/cgroup.controllers").unlink()
    for name in ("freezer", "unified"):
        (root / "sys/fs/cgroup" / name).mkdir()
    found = look(root)["cgroups"]
    assert found.severity == "ok"
    assert "hybrid" in found.message
