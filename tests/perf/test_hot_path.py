"""What torpor adds to a call that passes through: a ratio to the least that any Python could add.

Both run alternately in one test. Judged is the processor time: neither program waits for anything, and on a
busy machine the clock mostly measures the others. The clock's ratio is reported beside it.
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


def _run(argv: list[str]) -> tuple[float, float]:
    """Seconds of processor time and of the clock that a program takes."""
    start = time.perf_counter()
    pid = os.posix_spawn(argv[0], argv, os.environ)
    _, status, usage = os.wait4(pid, 0)
    elapsed = time.perf_counter() - start
    assert status == 0
    return usage.ru_utime + usage.ru_stime, elapsed


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
    own: list[tuple[float, float]] = []
    least: list[tuple[float, float]] = []

    def both() -> None:
        own.append(_run(ours))
        least.append(_run(peer))

    benchmark.pedantic(both, rounds=60, warmup_rounds=3)
    cpu, clock = (
        statistics.median(times) / statistics.median(others)
        for times, others in zip(zip(*own, strict=True), zip(*least, strict=True), strict=True)
    )
    benchmark.extra_info.update(cpu_ratio=cpu, clock_ratio=clock)
    assert cpu < LIMIT
