"""What torpor adds to a call that passes through: beside the least that any Python could add."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from shim.launcher import base_python, package_root, write_launchers
from tests.perf.figures import Figure, Series, spawn_s

START = ("--root", "/run/containerd/runc/k8s.io", "--log", "/nonexistent/log.json", "start", "c1")


def measure(path: Path, *, rounds: int) -> list[Figure]:
    """`start` of a container that torpor does not know, with /bin/true as the real runtime."""
    write_launchers(
        path / "bin",
        python=base_python(),
        package_root=package_root(),
        site=Path(sysconfig.get_path("purelib")),
        settings={"RUNTIME": "/bin/true", "STATE": str(path / "state")},
    )
    ours = [path / "bin" / "torpor-runtime", *START]
    peer = [base_python(), "-IS", "-c", 'import os; os.execv("/bin/true", ["true"])']
    series = Series()
    for _ in range(rounds):
        series.add("ours", spawn_s(ours) * 1000)
        series.add("peer", spawn_s(peer) * 1000)
    name = "call that passes through"
    return [series.figure(name, "ours", "peer", peer_name="python -IS, execv", unit="ms")]
