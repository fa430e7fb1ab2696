"""What the parts of a study must agree on: keys that contradict each other or do nothing are errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from sim.policies import registry
from sim.studies.config import (
    NO_TIME,
    Config,
    Costs,
    Inference,
    PolicySpec,
    Queue,
    SpotWork,
    TraceFailures,
    Training,
)
from sim.studies.reading import Book, Section

_COSTS = {
    "migrate": "migrate",
    "just-in-time": "jit_save",
    "in-memory": "replica_stall",
    "asynchronous": "async_stall",
}
"""What a policy does takes a time that has no default."""


def sections(top: Section, study: Section, config: Config) -> None:
    """Check what sections must agree on.

    Raises:
        StudyError: they do not.

    """
    work, horizon_s = config.workload, config.horizon_s
    if config.warmup_s and (config.warmup_s >= horizon_s or not isinstance(work, Queue | Inference)):
        study.fail(
            "warmup", "is for a queue or a service, and shorter than the horizon; leave it out, or shorten it"
        )
    endless = (
        (isinstance(work, Training) and math.isinf(work.work_s))
        or (isinstance(work, Queue) and any(one.most is None for one in work.classes))
        or (isinstance(work, Inference) and not work.requests.times_s)
    )
    if math.isinf(horizon_s) and endless:
        study.fail("horizon", "is missing, and the work has no end; give a horizon, or work with an end")
    if isinstance(work, Training | Queue) and not work.state_bytes:
        for number, storage in enumerate(config.storage):
            if storage.stall is None:
                kind = "job" if isinstance(work, Training) else "queue"
                top.book.fail(
                    f"{kind}.state",
                    f"is missing, which storage[{number}].write needs; give it, or a stall there",
                )
    if isinstance(work, SpotWork):
        _spot(top, config, work)
    _offsets(top, config)


def _spot(top: Section, config: Config, work: SpotWork) -> None:
    named = bool(top.raw.get("storage"))
    for key, there in (
        ("failures", config.failures),
        ("repair", config.repair != NO_TIME),
        ("notices", config.notices),
        ("storage", named),
        ("costs", config.costs != Costs() or (config.storage and not named)),
    ):
        if there:
            top.fail(key, "decides nothing for a spot job, whose machines come and go as its regions say; "
                     "leave it out")  # fmt: skip
    ticks = math.ceil(work.deadline_s / work.tick_s - 1e-9)
    start = max(work.starts[: config.replications.least], default=0)
    shortest = min(len(region.available) for region in work.regions)
    if start + ticks > shortest:
        top.book.fail(
            "spot.deadline",
            f"is {work.deadline_s:g} s, and {(shortest - start) * work.tick_s:g} s after the last window "
            "begins capacity is not given any more; shorten it, or use fewer replications",
        )


def _offsets(top: Section, config: Config) -> None:
    raw = cast("list[dict[str, Any]]", top.raw.get("failures") or [])
    sources = [number for number, one in enumerate(raw) if one.get("kind") != "none"]
    for number, failures in zip(sources, config.failures, strict=True):
        if not isinstance(failures, TraceFailures) or failures.repeat or not failures.offset_s:
            continue
        last_s = failures.start_s + (config.replications.least - 1) * failures.offset_s
        if last_s >= failures.span_s:
            top.book.fail(
                f"failures[{number}].offset",
                f"is {failures.offset_s:g} s, so replication {config.replications.least - 1} begins past the "
                f"end of the trace of {failures.span_s:g} s; shorten it, or set repeat: true",
            )


def policy(book: Book, path: str, spec: PolicySpec, config: Config) -> None:
    """Check what a policy, and those that it is built on, need of the rest.

    Raises:
        StudyError: they do not get it, or would do nothing.

    """
    for where, name, options in _inside(path, spec.name, spec.options):
        cost = _COSTS.get(name)
        if cost is not None and getattr(config.costs, cost) is None:
            book.fail(f"costs.{cost}", f"is missing, which policy '{name}' at {where} needs; give it")
        if name in ("kv-restore", "kv-cheaper"):
            _caches(book, name, config.workload)
        if isinstance(config.workload, Training):
            _training(book, where, name, options, config.workload)


def _training(book: Book, where: str, name: str, options: Mapping[str, Any], job: Training) -> None:
    interval_s = options.get("interval")
    if isinstance(interval_s, float):
        if interval_s >= job.work_s:
            book.fail(
                f"{where}.interval",
                f"is {interval_s:g} s, longer than the work of {job.work_s:g} s; shorten it",
            )
        if interval_s < job.step_s:
            book.fail(
                f"{where}.interval",
                f"is {interval_s:g} s, shorter than job.step of {job.step_s:g} s; make it longer",
            )
    copies = options.get("copies", 2) if name == "in-memory" else 0
    if copies > job.nodes:
        book.fail(
            f"{where}.copies",
            f"is {copies}, each on another node, and the job has {job.nodes}; use fewer, or more nodes",
        )
    if name == "just-in-time" and job.replicas < 2:
        book.fail("job.replicas", f"is 1, of which policy '{name}' at {where} can save none; give 2 or more")


def _caches(book: Book, name: str, service: object) -> None:
    """Loading a cache takes time, or it would win for nothing."""
    assert isinstance(service, Inference)
    for key, missing in (
        ("cache_per_token", not service.cache_bytes_per_token),
        ("cache_read", math.isinf(service.cache_read_bps)),
    ):
        if missing:
            book.fail(f"inference.{key}", f"is missing or 0, which policy '{name}' needs; give it")


def _inside(path: str, name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """A policy and those in its options, each with its path, its name and its options."""
    yield path, name, options
    described = registry.describe(name)
    for key, value in options.items():
        parameter = described.parameter(key)
        if parameter is None or parameter.kind != "policy":
            continue
        if isinstance(value, str) and value != "auto":
            yield f"{path}.{key}", value, {}
        elif isinstance(value, Mapping):
            inner = cast("Mapping[str, Any]", value)
            rest = {one: each for one, each in inner.items() if one != "name"}
            yield from _inside(f"{path}.{key}", str(inner["name"]), rest)
