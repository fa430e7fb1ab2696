"""The rules of the house: who may import whom, and what a wheel carries."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = {"cluster", "shim", "engines", "netmig", "compat", "sim"}


def test_imports_follow_the_rules() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_package_files_hold_a_docstring_only() -> None:
    for package in PACKAGES:
        for path in (CHECKOUT / package).rglob("__init__.py"):
            text = path.read_text().strip()
            assert text.startswith('"""') and text.endswith('"""') and text.count('"""') == 2, path


def test_a_wheel_carries_our_packages_and_their_files_only(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    done = subprocess.run(build, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
    assert len(top) == len(PACKAGES) + 1
    assert "shim/toolchain/toolchain.lock" in names
    assert "shim/conformance/report.css" in names
    assert "sim/validation/validation.csv" in names
    assert "sim/examples/llama3.yaml" in names
    assert "engines/workloads/programs/counter.py" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if name.endswith((".pyc", ".orig", ".rej"))]
