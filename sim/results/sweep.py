"""Running a study: every cell until its interval is narrow enough, on as many cores or machines as wanted.

A task is a block of replications of one cell. Which blocks there are depends on the study and on what came
out, never on the machine, and results are put together in the study's order: any backend gives the same
bytes. Each task's part is written as soon as it is there, so that a sweep that was stopped goes on where it
was.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from sim.engine import dispatch
from sim.engine.probe import opening
from sim.errors import BROKEN, SimError, why
from sim.maths.statistics import wanted
from sim.policies import registry
from sim.results import tables as results
from sim.results.tables import Results
from sim.studies.config import Inference, Queue, SpotWork, Training
from sim.studies.study import Cell, Study

Backend = Literal["loky", "ray", "dask"]

BLOCK = 100
"""Replications of one task at most."""

Progress = Callable[[int, int], None]
"""Told after each task: tasks done, tasks known of."""


@dataclass(frozen=True)
class Objective:
    """What cells are judged by: a metric, and whether more of it is better."""

    metric: str
    more: bool
    words: str


OBJECTIVES: dict[type, tuple[str, Objective]] = {
    Training: ("training", Objective("ettr", True, "share of time spent on work that is kept")),
    Queue: ("queue", Objective("node_goodput", True, "share of node time spent on work that is kept")),
    Inference: (
        "inference",
        Objective("ttft_p99_s", False, "time to the first token that one request in a hundred exceeds"),
    ),
    SpotWork: ("spot", Objective("cost_usd", False, "cost of the job")),
}


def objective(workload: str) -> Objective:
    """What cells of that kind of work are judged by."""
    return next(found for name, found in OBJECTIVES.values() if name == workload)


def workload(study: Study) -> str:
    """The kind of work of a study."""
    return OBJECTIVES[type(study.cells[0].config.workload)][0]


@dataclass(frozen=True)
class _Task:
    index: int
    cell: Cell
    start: int
    stop: int
    sha256: str
    timeline: bool

    @property
    def file(self) -> str:
        return f"{self.index:05d}-{self.start:06d}-{self.stop:06d}.parquet"


def _compute(task: _Task) -> tuple[_Task, results.Cell, bytes]:
    """Run a task; anywhere."""
    found = results.Cell(task.cell.name, str(task.cell.params["policy"]), dict(task.cell.params))
    for replication in range(task.start, task.stop):
        timeline = task.timeline and replication == 0
        found.add(dispatch.simulate(task.cell, replication, timeline=timeline), replication)
    return task, found, results.part_bytes(task.sha256, found, task.start)


def _empty(cell: Cell, units: Mapping[str, str]) -> results.Cell:
    own = {key: unit for key, unit in units.items() if key in cell.params}
    return results.Cell(
        cell.name, str(cell.params["policy"]), dict(cell.params), own, opening(cell).interval_s
    )


def run(
    study: Study,
    folder: Path | None = None,
    *,
    backend: Backend = "loky",
    jobs: int = 1,
    timeline: bool = False,
    progress: Progress = lambda done, total: None,
) -> Results:
    """Run every cell of a study, and save what comes out.

    Args:
        study: what to run.
        folder: where results go; one that holds parts of the same study, files, policies and versions is
            gone on from. None saves nothing.
        backend: of joblib: loky runs processes of this machine; ray and dask a cluster that their own
            variables name (RAY_ADDRESS, DASK_SCHEDULER_ADDRESS), or a local one.
        jobs: processes; 1 with loky runs all of it in this one.
        timeline: whether to keep who was in which state in each cell's first replication.
        progress: told of each task.

    Raises:
        SimError: the folder holds another study, a backend is not installed, or a replication failed.

    """
    made_from = _made_from(study, timeline)
    sha256 = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
    parts = _parts(folder, made_from) if folder else None
    metric = OBJECTIVES[type(study.cells[0].config.workload)][1].metric
    found = [_empty(cell, study.units) for cell in study.cells]
    # More workers than there can be tasks would only be started.
    jobs = min(jobs, sum(math.ceil(cell.config.replications.most / BLOCK) for cell in study.cells))
    done = total = 0
    with _pool(backend, jobs) as compute:
        while tasks := _round(study, found, metric, sha256, timeline):
            total += len(tasks)
            blocks: dict[tuple[int, int], results.Cell] = {}
            left: list[_Task] = []
            for task in tasks:
                held = results.read_part(parts / task.file, sha256, found[task.index]) if parts else None
                if held is None:
                    left.append(task)
                else:
                    blocks[task.index, task.start] = held
                    done += 1
            progress(done, total)
            for task, cell, data in compute(left):
                if parts:
                    results.write_atomically(parts / task.file, data)
                blocks[task.index, task.start] = cell
                done += 1
                progress(done, total)
            for (index, _), block in sorted(blocks.items(), key=lambda item: item[0]):
                found[index].extend(block)
    collected = Results(
        study.name, study.question, study.sha256, study.cells[0].config.seed, workload(study),
        study.resolved, found, versions(),
    )  # fmt: skip
    if folder:
        results.save(collected, folder)
    return collected


def versions() -> dict[str, str]:
    """Of what figures depend on."""
    named = {name: importlib.metadata.version(name) for name in ("torpor", "numpy", "simpy")}
    return {"python": platform.python_version(), **named}


def _made_from(study: Study, timeline: bool) -> dict[str, str]:
    """What a part must be of to be used: all that figures depend on, by name, and what is kept."""
    words = {
        word
        for cell in study.cells
        for word in (cell.config.policy.name, *_words(cell.config.policy.options))
    }
    return {
        _STUDY: study.sha256,
        _TIMELINES: str(timeline),
        **{f"'{name}'": sha256 for name, sha256 in sorted(study.files.items())},
        **{f"policy '{name}'": sha256 for name, sha256 in registry.code(words).items()},
        "the simulator": registry.digest("sim"),
        **versions(),
    }


_STUDY, _TIMELINES = "the study", "timelines"


def _words(value: object) -> Iterator[str]:
    """Every text in the options of a policy, which may name others."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in cast("Mapping[str, object]", value).values():
            yield from _words(inner)
    elif isinstance(value, list | tuple):
        for inner in cast("Sequence[object]", value):
            yield from _words(inner)


def _round(
    study: Study, found: Sequence[results.Cell], metric: str, sha256: str, timeline: bool
) -> list[_Task]:
    """The next tasks: none once every cell has enough."""
    tasks: list[_Task] = []
    for index, (cell, have) in enumerate(zip(study.cells, found, strict=True)):
        rule = cell.config.replications
        values = have.values.get(metric, [])
        if have.replications and (not values or any(map(math.isnan, values))):
            raise SimError(
                f"could not judge {cell.name}: a run has no {metric}, as nothing ended in it; "
                "give it a longer horizon"
            )
        target = wanted(values, rule.rel_half_width, rule.least, rule.most)
        for start in range(have.replications, target, BLOCK):
            tasks.append(_Task(index, cell, start, min(start + BLOCK, target), sha256, timeline))
    return tasks


def _parts(folder: Path, made_from: Mapping[str, str]) -> Path:
    """The folder of parts, marked with what they are made from."""
    parts = folder / results.PARTS
    mark = parts / "study.json"
    try:
        parts.mkdir(parents=True, exist_ok=True)
        if not mark.exists():
            results.write_atomically(mark, json.dumps(made_from).encode())
            return parts
        held: Any = json.loads(mark.read_bytes())
        if not isinstance(held, dict):
            raise TypeError("it is no mapping")
    except BROKEN as error:
        raise SimError(f"could not use '{mark}': {why(error)}; give another folder") from error
    earlier = cast("dict[str, str]", held)
    changed = [name for name in {**earlier, **made_from} if earlier.get(name) != made_from.get(name)]
    if changed:
        reason = (
            "it holds results of another study, or with other options"
            if {_STUDY, _TIMELINES} & {*changed}
            else f"its results are from before {', '.join(changed)} changed"
        )
        raise SimError(f"could not go on in '{folder}': {reason}; give another folder, or remove this one")
    return parts


Compute = Callable[[Sequence[_Task]], Iterable[tuple[_Task, results.Cell, bytes]]]


@contextlib.contextmanager
def _pool(backend: Backend, jobs: int) -> Generator[Compute]:
    """Something that runs tasks, and is closed at the end."""
    if backend == "loky" and jobs == 1:
        yield lambda tasks: map(_compute, tasks)
        return
    joblib = _library("joblib", "sim")
    with contextlib.ExitStack() as stack:
        if backend == "ray":
            stack.callback(_start_ray(jobs))
        elif backend == "dask":
            stack.callback(_start_dask(jobs))
        # One thread in each process: replications are what runs side by side.
        options: dict[str, Any] = {"inner_max_num_threads": 1} if backend == "loky" else {}
        stack.enter_context(joblib.parallel_config(backend=backend, n_jobs=jobs, **options))

        def compute(tasks: Sequence[_Task]) -> Iterator[tuple[_Task, results.Cell, bytes]]:
            # Ray's backend hands results over at the end of a call only: so calls are short.
            whole = backend != "ray"
            size = max(1, len(tasks)) if whole else 8 * jobs
            form = "generator_unordered" if whole else "list"
            for first in range(0, len(tasks), size):
                some = tasks[first : first + size]
                parallel = joblib.Parallel(n_jobs=min(jobs, len(some)), return_as=form)
                yield from parallel(joblib.delayed(_compute)(task) for task in some)

        yield compute


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SimError(
            f"could not start workers: {name} is missing; pip install '.[{extra}]', or run with --jobs 1"
        ) from error


def _start_ray(jobs: int) -> Callable[[], None]:
    """Begin to use Ray: the cluster of RAY_ADDRESS, or one of this machine."""
    ray = _library("ray", "ray")
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=jobs, include_dashboard=False, log_to_driver=False, logging_level="error")
    _library("ray.util.joblib", "ray").register_ray()
    return ray.shutdown if started else lambda: None


def _start_dask(jobs: int) -> Callable[[], None]:
    """Begin to use dask: the scheduler of DASK_SCHEDULER_ADDRESS, or one of this machine."""
    distributed = _library("distributed", "dask")
    address = _library("dask", "dask").config.get("scheduler-address", None)
    if address:
        return distributed.Client(address).close
    cluster = distributed.LocalCluster(n_workers=jobs, threads_per_worker=1, dashboard_address=None)
    client = distributed.Client(cluster)

    def close() -> None:
        client.close()
        cluster.close()

    return close
