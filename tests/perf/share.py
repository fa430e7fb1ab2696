"""Torpor's own share of a call: its time without that of the runtime that it drives, for a small container.

The real runtime is wrapped in a few lines of bash that note when it begins and ends. The start of bash, about
1 ms, counts as torpor's. What torpor does while CRIU waits for it is the runtime's time here, so each
verb stands beside the bare runtime as well.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from tests.perf.figures import Figure, Series, seconds
from tests.perf.place import Place, Sleeper, goes_on, place
from tests.support.containers import Output, tool

# No shell that starts `sleep`: one in a hundred dumps would find it in vfork, which CRIU cannot seize.
COUNTER = ("python", "-IS", "-u", "/workloads/memory.py", "0", "0.02")

# begin end argument...
_WRAPPER = """#!/bin/bash
begin=$EPOCHREALTIME
{runtime} "$@"
status=$?
echo "$begin $EPOCHREALTIME $*" >>{log}
exit $status
"""


def measure(path: Path, *, rounds: int) -> list[Figure]:
    """Checkpoint, and restore by create and start, of a process that counts. path: an absent directory."""
    path.mkdir()
    log = path / "calls"
    wrapper = path / "runc"
    wrapper.write_text(_WRAPPER.format(runtime=tool("runc"), log=log))
    wrapper.chmod(0o755)
    series = Series()
    with place(path / "lab", runtime=wrapper) as ground:
        source = ground.source(COUNTER)
        for number in range(rounds + 1):
            # The first round warms the caches: it is measured for nobody.
            _checkpoints(series if number else Series(), ground, source, log, number)
            _restores(series if number else Series(), ground, log, number)
            for name in ("runc", "verb", "work"):
                shutil.rmtree(path / "lab" / f"{name}-{number}")
    return _figures(series)


def _checkpoints(series: Series, ground: Place, source: Sleeper, log: Path, number: int) -> None:
    theirs, ours, work = (ground.path / f"{name}-{number}" for name in ("runc", "verb", "work"))
    flags = ("checkpoint", "--leave-running", "--image-path")
    bare = (*flags, theirs, "--work-path", work, source.id)
    series.add("runc checkpoint", seconds(lambda: ground.runc(*bare)) * 1000)
    verb_s = seconds(lambda: ground.torpor_runtime(*flags, ours, source.id))
    series.add("verb checkpoint", verb_s * 1000)
    series.add("verb share", (verb_s - _runtime_s(log, "checkpoint")) * 1000)
    store_s = seconds(lambda: ground.checkpoint(source.id, "small"))
    series.add("store checkpoint", store_s * 1000)
    series.add("store share", (store_s - _runtime_s(log, "checkpoint")) * 1000)


def _restores(series: Series, ground: Place, log: Path, number: int) -> None:
    container_id = ground.lab.new_id("runc")
    bundle, output = ground.bundle(container_id, COUNTER), Output()
    words = ("restore", "--detach", "--image-path", ground.path / f"runc-{number}")
    words += ("--work-path", ground.path / f"work-{number}", "--bundle", bundle, container_id)
    series.add("runc restore", seconds(lambda: ground.runc(*words, output=output)) * 1000)
    goes_on(output)
    ground.remove(container_id)

    container_id = ground.lab.new_id("torpor")
    bundle, output = ground.bundle(container_id, COUNTER, restore_from="small"), Output()
    start = time.perf_counter()
    ground.torpor_runtime("create", "--bundle", bundle, container_id, output=output)
    created = time.perf_counter()
    ground.torpor_runtime("start", container_id)
    started = time.perf_counter()
    inside_s = _runtime_s(log, "restore")
    series.add("torpor create", (created - start) * 1000)
    series.add("torpor create share", (created - start - inside_s) * 1000)
    series.add("torpor start", (started - created) * 1000)
    series.add("torpor restore", (started - start) * 1000)
    series.add("torpor restore share", (started - start - inside_s) * 1000)
    goes_on(output)
    ground.remove(container_id)


def _runtime_s(log: Path, verb: str) -> float:
    """Seconds that the runtime took for a verb since this was last asked."""
    total_s = 0.0
    for line in log.read_text().splitlines():
        begin, end, *argv = line.split()
        if verb in argv:
            total_s += float(end) - float(begin)
    log.unlink()
    return total_s


def _figures(series: Series) -> list[Figure]:
    rows = (
        ("small: torpor-runtime checkpoint", "verb checkpoint", "runc checkpoint"),
        ("small: torpor-runtime checkpoint, own share", "verb share", "runc checkpoint"),
        ("small: torpor checkpoint", "store checkpoint", "runc checkpoint"),
        ("small: torpor checkpoint, own share", "store share", "runc checkpoint"),
        ("small: create of an image", "torpor create", "runc restore"),
        ("small: create of an image, own share", "torpor create share", "runc restore"),
        ("small: start of an image", "torpor start", "runc restore"),
        ("small: create and start of an image", "torpor restore", "runc restore"),
        ("small: create and start of an image, own share", "torpor restore share", "runc restore"),
    )
    return [series.figure(name, ours, peer, peer_name=peer, unit="ms") for name, ours, peer in rows]
