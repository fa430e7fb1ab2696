"""A sweep of the simulator on two processes beside the same sweep in one."""

from __future__ import annotations

import shutil
from pathlib import Path

from sim.results import sweep
from tests.perf.figures import Figure, Series, in_turns, seconds
from tests.support.studies import grid


def measure(path: Path, *, rounds: int, cells: int = 400, replications: int = 200) -> list[Figure]:
    """The whole of it: replications, parts, tables and summary. The bound is a ratio of 1 / 1.5."""
    study = grid(cells // 20, 20, replications, hours=0.5)
    series = Series()
    processes = {"ours": 2, "peer": 1}
    # Workers start once and stay for a while, as they do in the sweeps of a day.
    sweep.run(grid(2, 1, 2), backend="loky", jobs=2)
    for number in range(rounds):
        for name in in_turns(list(processes), number):
            folder = path / name
            series.add(name, seconds(lambda: sweep.run(study, folder, jobs=processes[name])))
            shutil.rmtree(folder)
    name = f"sweep of {len(study.cells)} cells, {replications} replications, 2 processes"
    return [series.figure(name, "ours", "peer", peer_name="1 process")]
