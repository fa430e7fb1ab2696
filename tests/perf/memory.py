"""A process of 1 GiB falls asleep and wakes up: torpor beside runc and beside Podman.

Every source runs on after its checkpoint. Frozen time is told twice: by CRIU's statistics, and by the longest
gap between two ticks of the process itself. What waits to be written to disk is written before each
measurement, so that nobody pays for another's pages.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from engines.criu import wire
from tests.perf.figures import Figure, Series, in_turns, seconds
from tests.perf.place import Place, Sleeper, goes_on, longest_gap_s, place
from tests.support import oci
from tests.support.containers import Output, tool, until
from tests.support.podman import Podman

PROGRAM = "/workloads/memory.py"
TICK_S = 0.002
FILL_S = 120.0  # the longest that filling the memory may take


def measure(path: Path, tag: str, *, rounds: int, size_mib: int = 1024) -> list[Figure]:
    """Checkpoint and restore of a process that holds size_mib MiB.

    path: a short directory; tag: stands in it, and in all that Podman makes.
    """
    series = Series()
    argv = ["python", "-IS", "-u", PROGRAM, str(size_mib), str(TICK_S)]
    podman = Podman(path / "podman", tag, tool("runc"))
    try:
        with place(path / "lab") as ground:
            source = ground.source(argv, timeout_s=FILL_S)
            _start_podman(podman, size_mib, criu_config=ground.criu_config)
            for number in range(rounds):
                _runc_and_torpor(series, ground, source, argv, number)
                _podman(series, podman, number)
    finally:
        podman.close()
    return _figures(series, f"{size_mib} MiB")


def _runc_and_torpor(series: Series, ground: Place, source: Sleeper, argv: list[str], number: int) -> None:
    theirs, ours, work = (ground.path / f"{name}-{number}" for name in ("runc", "verb", "work"))

    def text() -> str:
        return source.output.text

    def frozen_in(directory: Path) -> float:
        stats = wire.dump_numbers(directory)
        assert stats is not None, directory
        return stats.frozen_s

    flags = ("checkpoint", "--leave-running", "--image-path")

    def dump_by_runc() -> None:
        _dump(series, "runc", lambda: ground.runc(*flags, theirs, "--work-path", work, source.id), text)
        series.add("runc frozen", frozen_in(work))

    def dump_into_store() -> None:
        _dump(series, "store", lambda: ground.checkpoint(source.id, "big"), text)
        timings = json.loads((ground.torpor.image_path("big") / "timings.json").read_bytes())
        series.add("store frozen", timings["dump"]["frozen_s"])

    def dump_by_verb() -> None:
        _dump(series, "verb", lambda: ground.torpor_runtime(*flags, ours, source.id), text)
        series.add("verb frozen", frozen_in(ours))

    for dump in in_turns((dump_by_runc, dump_into_store, dump_by_verb), number):
        dump()

    def by_runc(bundle: Path, container_id: str, output: Output) -> None:
        words = ("restore", "--detach", "--image-path", theirs, "--work-path", work)
        ground.runc(*words, "--bundle", bundle, container_id, output=output)

    def by_torpor(bundle: Path, container_id: str, output: Output) -> None:
        ground.torpor_runtime("create", "--bundle", bundle, container_id, output=output)
        ground.torpor_runtime("start", container_id)

    wakers = (("runc", by_runc, {}), ("torpor", by_torpor, {"restore_from": "big"}))
    for name, wake, wish in in_turns(wakers, number):
        container_id = ground.lab.new_id(name)
        bundle, output = ground.bundle(container_id, argv, **wish), Output()
        os.sync()
        start = time.perf_counter()
        wake(bundle, container_id, output)
        series.add(f"{name} restore", time.perf_counter() - start)
        goes_on(output)
        ground.remove(container_id)
    for used in (theirs, ours, work):
        shutil.rmtree(used)


def _start_podman(podman: Podman, size_mib: int, *, criu_config: Path) -> None:
    podman("load", f"--signature-policy={podman.path}/policy.json", "--input", oci.layout("python"))
    options = ("--detach", "--name=source", f"--cgroup-parent=/{podman.tag}/podman", "--network=none")
    # Podman keeps its environment from the runtime: here the setting of CRIU goes by annotation.
    options += (f"--annotation=org.criu.config={criu_config}",)
    # In its usual place the log grows while Podman packs it, and then the archive ends there.
    options += ("--log-driver=k8s-file", f"--log-opt=path={podman.path}/source.log")
    program = ("python3", "-IS", "-u", PROGRAM, str(size_mib), str(TICK_S))
    podman("run", *options, oci.reference("python"), *program)
    until(lambda: "tick" in podman("logs", "source").stdout, timeout_s=FILL_S, what="Podman's one counts")


def _podman(series: Series, podman: Podman, number: int) -> None:
    archive = podman.path / f"{number}.tar.zst"
    said = ""

    def checkpoint() -> None:
        nonlocal said
        words = ("--leave-running", "--print-stats", "--export", archive, "source")
        said = podman("container", "checkpoint", *words).stdout

    _dump(series, "podman", checkpoint, lambda: podman("logs", "source").stdout)
    (stats,) = json.loads(said)["container_statistics"]
    series.add("podman frozen", stats["criu_statistics"]["frozen_time"] / 1e6)
    os.sync()
    words = ("container", "restore", "--import", archive, "--name", f"woken-{number}")
    series.add("podman restore", seconds(lambda: podman(*words)))
    before = len(podman("logs", f"woken-{number}").stdout)
    until(lambda: len(podman("logs", f"woken-{number}").stdout) > before, what="the restored one counts")
    podman("rm", "--force", "--time=0", f"woken-{number}")
    archive.unlink()


def _dump(series: Series, name: str, action: Callable[[], object], text: Callable[[], str]) -> None:
    """Time a checkpoint, and find the gap that it made in what the process printed."""
    os.sync()
    since_s = time.monotonic()
    series.add(f"{name} checkpoint", seconds(action))
    until_s = time.monotonic()
    until(lambda: longest_gap_s(text(), until_s, until_s + FILL_S), what="it counts after the checkpoint")
    series.add(f"{name} gap", longest_gap_s(text(), since_s, until_s))


def _figures(series: Series, size: str) -> list[Figure]:
    kinds = {
        "checkpoint": "total",
        "frozen": "frozen, says CRIU",
        "gap": "frozen, says the process",
    }
    pairs = (
        ("torpor checkpoint", "store", "runc checkpoint", "runc"),
        ("torpor checkpoint", "store", "podman --export", "podman"),
        ("verb checkpoint", "verb", "runc checkpoint", "runc"),
        ("verb checkpoint", "verb", "podman --export", "podman"),
    )
    found = [
        series.figure(f"{size}: {name}, {words}", f"{ours} {kind}", f"{peer} {kind}", peer_name=peer_name)
        for kind, words in kinds.items()
        for name, ours, peer_name, peer in pairs
    ]
    for peer_name, peer in (("runc restore", "runc"), ("podman --import", "podman")):
        name = f"{size}: create and start of an image"
        found.append(series.figure(name, "torpor restore", f"{peer} restore", peer_name=peer_name))
    return found
