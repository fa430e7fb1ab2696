"""The worked example of CONTRIBUTING: somebody else's engine, installed from its own package, passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.containers import CHECKOUT, PREFIX

PACKAGE = CHECKOUT / "tests" / "data" / "thirdparty-engine"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The Python of a new virtual environment with torpor and the example in it. Works offline."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
    ours = sysconfig.get_path("purelib")
    (site / "torpor.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    interpreter = place / "bin" / "python"
    copy = tmp_path / "package"
    copy.mkdir()
    for file in PACKAGE.iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    install = ["-m", "pip", "--disable-pip-version-check", "--python", str(interpreter), "install", "--quiet"]
    options = ["--no-deps", "--no-index", "--no-build-isolation", str(copy)]
    done = subprocess.run([sys.executable, *install, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return interpreter


@pytest.mark.engine
def test_it_passes_the_contract(python: Path):
    words = [
        "--engine",
        "criu-sealed",
        "--workload",
        "counter",
        "--course",
        "round-trip",
        "--contract",
        "--json",
    ]
    done = subprocess.run(
        [python, "-m", "shim.cli.main", "conformance", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=CHECKOUT,
        env={**os.environ, "TORPOR_PREFIX": str(PREFIX)},
    )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert [row for row in document["outcomes"] if row["result"] == "fail"] == []
    assert document["contract"]["pass"] >= 25
    assert document["workloads"]["counter"]["result"] == "pass"
    assert done.returncode == 0


def test_it_is_as_small_as_promised():
    lines = (PACKAGE / "sealed_engine.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 65
