"""A sweep gives the same bytes in one process, in several, on dask, on Ray, and with any hash seed."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from sim.results import sweep
from sim.results.sweep import Backend
from tests.support.studies import grid

CHECKOUT = Path(__file__).resolve().parents[2]


def digests(folder: Path) -> dict[str, str]:
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert {"results.parquet", "summary.csv", "run.json"} < files.keys()
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("alone")
    sweep.run(grid(3, 2, 110, hours=6), folder)
    return digests(folder)


@pytest.mark.parametrize(
    ("backend", "library"), [("loky", "joblib"), ("dask", "distributed"), ("ray", "ray")]
)
def test_a_backend_gives_the_same_bytes(
    backend: Backend, library: str, alone: dict[str, str], tmp_path: Path
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install '.[{backend}]'")
    sweep.run(grid(3, 2, 110, hours=6), tmp_path, backend=backend, jobs=2)
    assert digests(tmp_path) == alone


def test_the_bytes_do_not_depend_on_the_hash_seed(alone: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from sim.results import sweep; from tests.support.studies import grid\n"
        "sweep.run(grid(3, 2, 110, hours=6), Path(sys.argv[1]))\n"
    )
    for seed in ("1", "77"):
        folder = tmp_path / seed
        subprocess.run(
            [sys.executable, "-c", code, folder], cwd=CHECKOUT, env={"PYTHONHASHSEED": seed}, check=True
        )
        assert digests(folder) == alone
