"""How much will happen in one replication: a study that nobody could play is refused before it begins."""

from __future__ import annotations

import math

from sim.maths.laws import Constant, Exponential, Fixed, Law
from sim.studies.config import (
    Config,
    GroupFailures,
    Inference,
    JobClass,
    Maintenance,
    NodeFailures,
    Queue,
    SpotNotice,
    SpotWork,
    TraceFailures,
    Training,
)
from sim.studies.reading import Section

MOST = 10_000_000
"""Failures, notices, jobs, requests or ticks of a replication: more take many minutes or fill the memory."""

_STEPS = 400
_SMALLEST = 1e-15
"""Shares of a span that an integral looks at."""


def shortened(law: Law, span_s: float) -> float:
    """The mean of a time of the law, of which no more than the span counts: its survival, integrated."""
    if isinstance(law, Constant | Fixed):
        return min(law.mean, span_s)
    ratio = _SMALLEST ** (1 / _STEPS)
    total_s, later_s = 0.0, span_s
    for _ in range(_STEPS):
        earlier_s = later_s * ratio
        total_s += (later_s - earlier_s) * _survival(law, later_s)
        later_s = earlier_s
    return total_s


def _survival(law: Law, time_s: float) -> float:
    try:
        return law.survival(time_s)
    except OverflowError:
        return 0.0


def times(law: Law, span_s: float, between: Law | None = None) -> float:
    """How often something happens in a span, about: a time of the law, then one of `between`, and so on."""
    if isinstance(law, Exponential):
        # Drawn whether it is away or not.
        return span_s / law.mean
    cycle_s = shortened(law, span_s) + (shortened(between, span_s) if between is not None else 0.0)
    return span_s / cycle_s if cycle_s > 0 else math.inf


def check(top: Section, config: Config) -> None:
    """Check that so much can be played.

    Raises:
        StudyError: it cannot; the sentence has the path of what happens so often.

    """
    if isinstance(config.workload, SpotWork):
        return  # ticks, which were counted as they were read
    span_s = min(config.horizon_s, _length_s(config))
    kinds = [one["kind"] for one in top.resolved.get("failures", [])]
    places = [place for place, kind in enumerate(kinds) if kind != "none"]
    for place, failures in zip(places, config.failures, strict=True):
        path = f"failures[{place}]"
        match failures:
            case NodeFailures(law, process):
                repair = None if process else config.repair
                _few(top, path, config.cluster.machines * times(law, span_s, repair), span_s)
            case GroupFailures(scope, law, repair):
                count = config.cluster.racks if scope == "rack" else config.cluster.switches
                _few(top, path, count * times(law, span_s, repair or config.repair), span_s)
            case TraceFailures(faults=faults, span_s=long_s, repeat=repeat):
                _few(top, path, len(faults) * (span_s / long_s if repeat else 1.0), span_s)
    for place, notice in enumerate(config.notices):
        path = f"notices[{place}]"
        match notice:
            case Maintenance(every):
                _few(top, f"{path}.every", times(every, span_s), span_s)
            case SpotNotice(law, away):
                _few(top, path, config.cluster.machines * times(law, span_s, away), span_s)
            case _:
                pass
    _work(top, config, span_s)


def _work(top: Section, config: Config, span_s: float) -> None:
    match config.workload:
        case Queue(classes):
            for place, one in enumerate(classes):
                count = math.inf if one.gaps is None else times(one.gaps, span_s)
                count = min(count, math.inf if one.most is None else one.most)
                _few(top, f"queue.classes[{place}]", count, span_s)
        case Inference(requests) if not requests.times_s:
            rate = requests.per_s
            if requests.burst_every_s > 0:
                more = 1 + requests.per_s * (requests.burst_factor - 1) * requests.burst_s
                rate += more / requests.burst_every_s
            _few(top, "inference.requests", rate * span_s, span_s)
        case _:
            pass


def _length_s(config: Config) -> float:
    """How long a run takes at least where nothing ends it early: without an end for ever."""
    match config.workload:
        case Training(work_s=work_s):
            return work_s
        case Queue(classes):
            return max(map(_of_class_s, classes))
        case Inference(requests) if requests.times_s:
            return requests.times_s[-1]
        case _:
            return math.inf


def _of_class_s(kind: JobClass) -> float:
    if kind.most is None:
        return math.inf
    return kind.work.mean + kind.most * (0.0 if kind.gaps is None else kind.gaps.mean)


def _few(top: Section, path: str, count: float, span_s: float) -> None:
    if count > MOST:
        top.book.fail(
            path,
            f"comes to about {count:.2g} events in {span_s:g} s, more than the {MOST:,} that can be played; "
            "make them rarer, or the study shorter",
        )
