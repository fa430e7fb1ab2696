"""Sections of a study file that say what happens to a cluster: laws, failures, notices, storage, costs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from sim.errors import BROKEN, SimError, why
from sim.maths.laws import Constant, Exponential, Law, Lognormal, Quantiles, Weibull
from sim.studies.config import (
    NO_TIME,
    Cluster,
    Costs,
    Failures,
    GroupFailures,
    Maintenance,
    NodeFailures,
    Notice,
    Predictor,
    Scope,
    SpotNotice,
    Storage,
    TraceFailures,
)
from sim.studies.reading import Section
from sim.traces import faults

DAY_S = 86400.0
MOST_MACHINES = 1_000_000
RAREST = 1e-5
"""Share of failures or of predictions: all that is between two has to be kept."""
LawKind = Literal["fixed", "exponential", "weibull", "lognormal", "quantiles"]
_LAWS: tuple[LawKind, ...] = ("fixed", "exponential", "weibull", "lognormal", "quantiles")
FailureLaw = Literal["exponential", "weibull", "lognormal"]
FAILURE_LAWS: tuple[FailureLaw, ...] = ("exponential", "weibull", "lognormal")


def law(section: Section, key: str, default: Law | None = None) -> Law:
    """A time that is the same always (`5m`), or one with a law: a mapping with `kind` and what it needs."""
    if not section.has(key) and default is not None:
        if isinstance(default, Constant):
            section.note(key, default.mean, f"{default.mean!r}s", "s")
        return default
    if not isinstance(section.get(key), dict):
        return Constant(section.time(key))
    inner = section.section(key)
    kind = inner.choice("kind", _LAWS)
    match kind:
        case "fixed":
            found: Law = Constant(inner.time("time"))
        case "quantiles":
            found = _quantiles(inner)
        case _:
            found = _of_kind(inner, kind, _mean(inner))
    inner.done()
    return found


def optional_law(section: Section, key: str) -> Law | None:
    """As `law`, None where it is not there."""
    return law(section, key) if section.has(key) else None


def _quantiles(section: Section) -> Law:
    pairs = section.get("points")
    if not isinstance(pairs, dict) or len(pairs) < 2:  # pyright: ignore[reportUnknownArgumentType]
        section.fail("points", "must map shares to times, from p0 to p100, like {p0: 20s, p100: 60s}")
    inner = section.section("points")
    found: list[tuple[float, float]] = []
    for key in inner.raw:
        if not key.startswith("p") or not key[1:].replace(".", "", 1).isdigit():
            inner.fail(key, "is no share; write it like p50")
        found.append((float(key[1:]) / 100, inner.time(key)))
    found.sort()
    return _made(section, "points", lambda: Quantiles(*zip(*found, strict=True)))  # type: ignore[arg-type]


def _made(section: Section, key: str, make: Any) -> Any:
    try:
        return make()
    except SimError as error:
        section.fail(key, f"is wrong: {error}")


def _mean(section: Section) -> float | None:
    return section.time("mean", least="above 0") if section.has("mean") else None


def _of_kind(section: Section, kind: str, mean_s: float | None) -> Law:
    """An exponential, Weibull or lognormal law with its mean; a lognormal one may have a median instead."""
    if kind == "lognormal":
        sigma = section.number("sigma", above=True, most=20)
        if mean_s is None and section.has("median"):
            mean_s = section.time("median", least="above 0") * math.exp(sigma**2 / 2)
        if mean_s is None:
            section.fail("mean", "is missing; give it, or a median")
        return Lognormal(mean_s, sigma)
    if mean_s is None:
        section.fail("mean", "is missing; give it")
    if kind == "weibull":
        return Weibull(section.number("shape", least=0.05), mean_s)
    return Exponential(mean_s)


def _gaps(section: Section, kind: FailureLaw, what: str) -> Law:
    """The law of failures of one thing: its mean, or how many there are of 1000 things in a day."""
    rate_key = f"rate_per_1000_{what}_days"
    mean_s = _mean(section)
    if section.has(rate_key):
        if mean_s is not None:
            section.fail(rate_key, "is there beside mean; give one of them")
        mean_s = 1000 * DAY_S / section.number(rate_key, above=True)
    elif mean_s is None and not section.has("median"):
        section.fail(rate_key, "is missing; give it, or a mean")
    return _of_kind(section, kind, mean_s)


def read_cluster(section: Section) -> Cluster:
    """The machines."""
    found = Cluster(
        nodes=section.count("nodes", least=1, most=MOST_MACHINES),
        gpus_per_node=section.count("gpus_per_node", 8, least=1),
        spares=section.count("spares", 0, most=MOST_MACHINES),
        racks=section.count("racks", 0),
        switches=section.count("switches", 0),
    )
    section.done()
    for key, count in (("racks", found.racks), ("switches", found.switches)):
        if count > found.nodes:
            section.fail(key, f"is {count}, more than the {found.nodes} nodes; use fewer")
    return found


def read_failures(sections: Sequence[Section], cluster: Cluster) -> tuple[Failures, ...]:
    """All sources of failures."""
    found = [_one_failures(section, cluster) for section in sections]
    return tuple(one for one in found if one is not None)


def _there_are(section: Section, key: str, scope: Scope, cluster: Cluster) -> None:
    """The cluster has racks or switches, where they are spoken of."""
    if scope == "rack" and not cluster.racks:
        section.fail(key, "is rack, of which the cluster has none; set cluster.racks")
    if scope == "switch" and not cluster.switches:
        section.fail(key, "is switch, of which the cluster has none; set cluster.switches")


def _one_failures(section: Section, cluster: Cluster) -> Failures | None:
    kind = section.choice("kind", ("none", *FAILURE_LAWS, "group", "trace"))
    found: Failures | None = None
    if kind == "group":
        scopes: tuple[Literal["rack", "switch"], ...] = ("rack", "switch")
        scope = section.choice("scope", scopes)
        _there_are(section, "scope", scope, cluster)
        gaps = _gaps(section, section.choice("law", FAILURE_LAWS, "exponential"), scope)
        found = GroupFailures(scope, gaps, optional_law(section, "repair"))
    elif kind == "trace":
        found = _trace(section, cluster)
    elif kind != "none":
        gaps = _gaps(section, kind, "node")  # type: ignore[arg-type]
        found = NodeFailures(gaps, section.choice("scope", ("node", "process"), "node") == "process")
    section.done()
    return found


def trace_file(section: Section, key: str) -> Path:
    """A file beside the study, or below the folder of traces."""
    name = section.text(key)
    folders = [section.book.study.parent]
    if traces := os.environ.get("TORPOR_TRACES"):
        folders.append(Path(traces))
    found = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if found is None:
        where = " or ".join(f"'{folder}'" for folder in folders)
        section.fail(
            key, f"is '{name}', and there is no such file in {where}; give --traces or TORPOR_TRACES"
        )
    section.book.uses(name, found)
    return found


def _trace(section: Section, cluster: Cluster) -> TraceFailures:
    path = trace_file(section, "path")
    found = _made(section, "path", lambda: faults.load(path))
    numbers = faults.numbered(found)
    nodes = section.count_or("nodes", max(numbers.values()) + 1, least=1)
    if nodes > cluster.machines:
        section.fail(
            "nodes", f"is {nodes}, more than the {cluster.machines} machines; make the cluster larger"
        )
    if max(numbers.values()) >= nodes:
        section.fail("nodes", f"is {nodes}, and the trace has a node {max(numbers.values())}; set more")
    span_s = faults.span_d(found) * DAY_S
    start_s, repeat = section.time("start", 0.0), section.flag("repeat", False)
    if section.get("offset", "0s") == "random":
        section.note("offset", "random", "random")
        offset_s = None
        if not repeat:
            section.fail("offset", "is random, which needs a trace without an end; set repeat: true")
    else:
        offset_s = section.time("offset", 0.0)
    if start_s >= span_s and not repeat:
        section.fail(
            "start",
            f"is {start_s / DAY_S:g} days, past the end of the trace ({span_s / DAY_S:g} days); make it "
            "earlier, or set repeat: true",
        )
    # Where a node has two faults at once it is down until both are over.
    down = sorted((start_d, end_d, numbers[node]) for node, start_d, end_d in faults.down(found))
    return TraceFailures(
        str(path),
        tuple((start_d * DAY_S, (end_d - start_d) * DAY_S, node) for start_d, end_d, node in down),
        span_s,
        start_s,
        offset_s,
        repeat,
    )


def read_notices(
    sections: Sequence[Section], cluster: Cluster, failures: Sequence[Failures]
) -> tuple[Notice, ...]:
    """What is told before it happens."""
    found: list[Notice] = []
    for section in sections:
        kind = section.choice("kind", ("maintenance", "spot", "predictor"))
        if kind == "maintenance":
            nodes = section.count("nodes", 1, least=1)
            if nodes > cluster.machines:
                section.fail("nodes", f"is {nodes}, more than the {cluster.machines} machines; use fewer")
            every = law(section, "every")
            if not every.mean > 0:
                section.fail("every", "is 0; it must be above 0")
            found.append(Maintenance(every, nodes, section.time("lead"), law(section, "lasting")))
        elif kind == "spot":
            gaps = _gaps(section, section.choice("law", FAILURE_LAWS, "exponential"), "node")
            found.append(
                SpotNotice(
                    gaps,
                    law(section, "away"),
                    section.time("lead"),
                    section.number("coverage", 1.0, most=1.0),
                    section.time("poll", 0.0),
                )
            )
        else:
            if not failures:
                section.fail("kind", "is predictor, and there are no failures to predict; give failures")
            if any(isinstance(other, Predictor) for other in found):
                section.fail("kind", "is predictor once more; give one")
            precision = section.number("precision", least=RAREST, most=1.0)
            recall = section.number("recall", most=1.0)
            if 0 < recall < RAREST:
                section.fail("recall", f"is {recall:g}; it must be 0, or {RAREST:g} or more")
            found.append(Predictor(precision, recall, section.time("lead")))
        section.done()
    return tuple(found)


def read_storage(
    sections: Sequence[Section], cluster: Cluster, costs: Section, measured: dict[str, Law], *, needed: bool
) -> tuple[Storage, ...]:
    """Levels of checkpoints; without any, one with the costs of `costs`. `needed`: there must be one."""
    general = {key: optional_law(costs, key) or measured.get(key) for key in ("stall", "persist", "restore")}
    if not sections:
        if general["stall"] is None and not needed:
            return ()
        if general["stall"] is None:
            costs.fail("stall", "is missing; give what a checkpoint stalls, or storage")
        return (Storage("storage", stall=general["stall"], persist=general["persist"],
                        restore=general["restore"] or NO_TIME),)  # fmt: skip
    found: list[Storage] = []
    for section in sections:
        name = section.text("name")
        if name in ("memory", *(other.name for other in found)):
            section.fail("name", f"is '{name}', which is taken; choose another one")
        scopes: tuple[Scope, ...] = ("nothing", "node", "rack", "switch")
        lost_with: Scope = section.choice("lost_with", scopes, "nothing")
        _there_are(section, "lost_with", lost_with, cluster)
        write_bps = section.bandwidth("write") if section.has("write") else math.inf
        read_bps = section.bandwidth("read") if section.has("read") else write_bps
        own = {key: optional_law(section, key) for key in general}
        if math.isinf(write_bps):
            # What its bandwidth does not say, the general costs do.
            own = {key: own[key] or general[key] for key in own}
            if own["stall"] is None:
                section.fail("write", "is missing; give it, or what a checkpoint there stalls")
            own["restore"] = own["restore"] or NO_TIME
        shared = section.flag("shared", False)
        if shared and math.isinf(write_bps):
            section.fail("shared", "is true, and there is no bandwidth to share; give write, or leave it out")
        section.done()
        found.append(Storage(name, write_bps, read_bps, shared, lost_with, **own))
    if all(math.isfinite(one.write_bps) for one in found):
        for key in ("file", *general):
            if costs.has(key):
                costs.fail(key, "is there beside storage, each level of which has a bandwidth; leave it out")
    return tuple(found)


def read_costs(section: Section) -> Costs:
    """What else takes time and money. Its checkpoint costs are read with the storage."""
    found = Costs(
        startup=law(section, "startup", NO_TIME),
        detection=law(section, "detection", NO_TIME),
        restart=law(section, "restart", NO_TIME),
        async_stall=optional_law(section, "async_stall"),
        increment=section.number("increment", 1.0, above=True, most=1.0),
        replica_stall=optional_law(section, "replica_stall"),
        replica_restore=law(section, "replica_restore", NO_TIME),
        jit_save=optional_law(section, "jit_save"),
        migrate=optional_law(section, "migrate"),
        swap=optional_law(section, "swap"),
        requeue=law(section, "requeue", NO_TIME),
        node_usd_per_s=section.price("node_price", 0.0),
    )
    section.done()
    return found


def read_measured(section: Section) -> dict[str, Law]:
    """Laws of stall, persist and restore from a measured.json, where `file` names one."""
    if not section.has("file"):
        return {}
    name = section.text("file")
    path = section.book.study.parent / name
    section.book.uses(name, path)
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        shares, phases = tuple(document["shares"]), document["phases"]
        # A phase that was always as long as another time is a law, too.
        found: dict[str, Law] = {
            name: Quantiles(shares, tuple(0.0 + time_s for time_s in phases[name]["times_s"]))
            for name in ("stall", "persist", "restore")
            if name in phases
        }
    except BROKEN as error:
        section.fail(
            "file",
            f"is '{path}', which is no measured.json ({why(error)}); make it with `torpor sim calibrate`",
        )
    except SimError as error:
        section.fail("file", f"is '{path}', which cannot be used: {error}")
    return found
