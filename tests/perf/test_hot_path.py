"""What torpor adds to a call that passes through: a ratio to the least that any Python could add.

Both run alternately in one test, so that a busy machine slows both, and only the ratio is judged: that of the
lower quartiles, since a run that was interrupted says nothing of either.
"""

from __future__ import annotations

import json
import os
import statistics
import sysconfig
import time
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from shim.launcher import base_python, package_root, write_launchers

LIMIT = 1.35
GLOBAL = ["--root", "/run/containerd/runc/k8s.io", "--log", "/nonexistent/log.json", "--log-format", "json"]
CALLS = {
    "create": ["create", "--bundle", "{bundle}", "--pid-file", "/nonexistent/init.pid", "c1"],
    "start": ["start", "c1"],
    "exec": ["exec", "--process", "/nonexistent/p", "--detach", "--pid-file", "/nonexistent/e", "c1"],
    "kill": ["kill", "c1", "9"],
    "delete": ["delete", "--force", "c1"],
}


def _run(argv: list[str]) -> float:
    """Seconds from the start of a program to its end."""
    start = time.perf_counter()
    pid = os.posix_spawn(argv[0], argv, os.environ)
    _, status = os.waitpid(pid, 0)
    elapsed = time.perf_counter() - start
    assert status == 0
    return elapsed


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_passes_through_costs_little(
    tmp_path: Path, benchmark: BenchmarkFixture, name: str
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"process": {"env": [f"VARIABLE_{number}={'x' * 80}" for number in range(200)]}})
    )
    write_launchers(
        tmp_path / "bin",
        python=base_python(),
        package_root=package_root(),
        site=Path(sysconfig.get_path("purelib")),
        settings={"RUNTIME": "/bin/true", "STATE": str(tmp_path / "state")},
    )
    words = [word.format(bundle=tmp_path) for word in CALLS[name]]
    ours = [str(tmp_path / "bin" / "torpor-runtime"), *GLOBAL, *words]
    peer = [str(base_python()), "-IS", "-c", 'import os; os.execv("/bin/true", ["true"])']
    pairs: list[tuple[float, float]] = []

    def both() -> None:
        pairs.append((_run(ours), _run(peer)))

    benchmark.pedantic(both, rounds=60, warmup_rounds=3)
    own, least = (statistics.quantiles(times, n=4)[0] for times in zip(*pairs, strict=True))
    benchmark.extra_info.update(own_s=own, peer_s=least, ratio=own / least)
    assert own / least < LIMIT
