"""Calls that are not ours load nothing but what Python itself needs, and three small files."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from shim.launcher import base_python, package_root

OURS = {"shim", "shim.argv", "shim.dialects", "shim.dialects.runc", "shim.entry"}

PASSING = [
    [],
    ["--version"],
    ["--help"],
    ["list"],
    ["events", "c1"],
    ["update", "c1"],
    ["spec"],
    ["run", "c1"],
    ["features", "--help"],
    ["create", "--bundle", "/nonexistent", "c1"],
    ["start", "c1"],
    ["state", "c1"],
    ["kill", "c1", "9"],
    ["delete", "--force", "c1"],
    ["exec", "--process", "/p", "c1"],
    ["pause", "c1"],
    ["resume", "c1"],
    ["ps", "--format", "json", "c1"],
    ["checkpoint", "--help"],
    ["restore", "--lsm-mount-context"],
]

# Runs the entry point with execv replaced by a print of what has been loaded until then.
PROBE = """
import sys
sys.path.insert(0, {root!r})
import os
before = set(sys.modules)
def execv(path, argv):
    os.write(1, "\\n".join(sorted(set(sys.modules) - before)).encode())
    os._exit(0)
os.execv = execv
from shim.entry import main
main("/nonexistent/runtime.conf", {handler!r}, "/nonexistent/runc")
"""


def _loaded(words: list[str], handler: str = "RUNTIME") -> set[str]:
    code = PROBE.format(root=str(package_root()), handler=handler)
    run = subprocess.run(
        [base_python(), "-IS", "-Xutf8", "-c", code, "0", "torpor-runtime", *words],
        capture_output=True,
        text=True,
        check=True,
        env={},
    )
    assert run.stderr == ""
    return set(run.stdout.split())


@pytest.mark.parametrize("words", PASSING, ids=" ".join)
def test_a_call_that_passes_through_loads_only_the_hot_path(words: list[str]) -> None:
    assert _loaded(words) == OURS


def test_runsc_loads_one_file_more() -> None:
    assert _loaded(["start", "c1"], "RUNSC") == OURS | {"shim.dialects.runsc"}


@pytest.mark.parametrize("name", ["entry", "argv", "dialects/runc", "dialects/crun", "dialects/runsc"])
def test_the_hot_path_imports_only_sys_and_os_at_its_head(name: str) -> None:
    tree = ast.parse((package_root() / "shim" / f"{name}.py").read_text())
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    assert found <= {"sys", "os", "shim.argv"}


@pytest.mark.parametrize(
    "module", ["checkpoint", "create", "delete", "features", "held", "restore", "start", "state"]
)
def test_what_serves_a_call_loads_no_netlink_library_by_itself(module: str) -> None:
    """It takes 130 ms, and is wanted only where an address moves, or beside a dump."""
    code = f"import sys, shim.verbs.{module}; print(*sorted(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=package_root()
    )
    assert f"shim.verbs.{module}" in run.stdout.split()
    loaded = set(run.stdout.split())
    assert not [name for name in loaded if name.startswith("pyroute2")]
    # Nor what a clone needs none of.
    assert not loaded & {"netmig.nft", "netmig.connections", "shim.adoption", "shim.peers"}


def test_the_launchers_interpreter_is_not_that_of_the_virtual_environment() -> None:
    """Starting through a venv costs a search for pyvenv.cfg and site."""
    run = subprocess.run(
        [base_python(), "-IS", "-c", "import sys, os; print(sys.prefix == sys.base_prefix)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "True"
