"""Sections of a study file that say what work there is: training, a queue, a service, a spot job."""

from __future__ import annotations

import math
from typing import Any, cast

from sim.errors import SimError
from sim.studies import foreseen
from sim.studies.config import (
    NO_TIME,
    Cluster,
    Inference,
    JobClass,
    Queue,
    RegionCapacity,
    Requests,
    SpotWork,
    Training,
    Workload,
)
from sim.studies.reading import Section, shown
from sim.studies.sections import law, optional_law, trace_file
from sim.traces import capacity, priced, requests, synthetic
from sim.traces.capacity import Windows

KINDS = ("job", "queue", "inference", "spot")


def read_workload(top: Section, cluster: Cluster, seed: int) -> Workload:
    """The one kind of work of a study, which has that seed."""
    there = [kind for kind in KINDS if top.has(kind)]
    if len(there) != 1:
        says = "has no work" if not there else f"has {' and '.join(there)}"
        top.book.fail("the file", f"{says}; give one of {', '.join(KINDS)}")
    section = top.section(there[0])
    match there[0]:
        case "job":
            found: Workload = _training(section, cluster)
        case "queue":
            found = _queue(section, cluster)
        case "inference":
            found = _inference(section, cluster)
        case _:
            found = _spot(section, seed)
    section.done()
    return found


def _nodes(section: Section, cluster: Cluster, default: int | None = None) -> int:
    """Machines of a job, as nodes or as GPUs."""
    if section.has("gpus"):
        if section.has("nodes"):
            section.fail("gpus", "is there beside nodes; give one of them")
        gpus = section.count("gpus", least=1)
        if gpus % cluster.gpus_per_node:
            section.fail(
                "gpus", f"is {gpus}, no multiple of the {cluster.gpus_per_node} of a node; change it"
            )
        nodes, key = gpus // cluster.gpus_per_node, "gpus"
    else:
        nodes = (
            section.count("nodes", least=1)
            if default is None
            else section.count_or("nodes", default, least=1)
        )
        key = "nodes"
    if nodes > cluster.nodes:
        section.fail(key, f"asks for {nodes} nodes, and the cluster has {cluster.nodes}; make it larger")
    return nodes


def _training(section: Section, cluster: Cluster) -> Training:
    count = section.count("count", 1, least=1)
    nodes = _nodes(section, cluster, max(1, cluster.nodes // count))
    if nodes * count > cluster.nodes:
        section.fail(
            "count", f"is {count}: {count * nodes} nodes, and the cluster has {cluster.nodes}; make it larger"
        )
    found = Training(
        nodes=nodes,
        work_s=section.time("work", math.inf, least="above 0"),
        replicas=section.count("replicas", 1, least=1),
        step_s=section.time("step", 0.0),
        state_bytes=section.size("state", 0.0),
        count=count,
        final_checkpoint=section.flag("final_checkpoint", False),
    )
    if nodes % found.replicas:
        section.fail("replicas", f"is {found.replicas}, which does not divide {nodes} nodes; change it")
    if found.step_s > found.work_s:
        section.fail("step", f"is longer than the work of {found.work_s:g} s; make it shorter")
    return found


def _queue(section: Section, cluster: Cluster) -> Queue:
    classes: list[JobClass] = []
    for inner in section.sections("classes"):
        name = inner.text("name")
        if name in [one.name for one in classes]:
            inner.fail("name", f"is '{name}', which is taken; choose another one")
        gaps = optional_law(inner, "every")
        if gaps is not None and not gaps.mean > 0:
            inner.fail("every", "is 0; it must be above 0")
        most = inner.count("most", least=1) if inner.has("most") else None
        if gaps is None and most is None:
            inner.fail("every", "is missing; give it, or `most` jobs at the beginning")
        work = law(inner, "work")
        if not work.mean > 0:
            inner.fail("work", "is 0; it must be above 0")
        classes.append(JobClass(name, _nodes(inner, cluster), work, inner.count("priority", 0), gaps, most))
        inner.done()
    if not classes:
        section.fail("classes", "is empty; give one class of jobs or more")
    return Queue(tuple(classes), section.size("state", 0.0))


def _inference(section: Section, cluster: Cluster) -> Inference:
    inner = section.section("requests")
    if inner.has("trace"):
        path = trace_file(inner, "trace")
        try:
            rows = requests.load(path)
        except SimError as error:
            inner.fail("trace", f"cannot be used: {error}")
        asked = Requests(
            str(path),
            tuple(row.time_s for row in rows),
            tuple(row.context_tokens for row in rows),
            tuple(row.generated_tokens for row in rows),
        )
    else:
        asked = Requests(
            per_s=inner.rate("rate"),
            burst_every_s=inner.time("burst_every", 0.0),
            burst_s=inner.time("burst_for", 0.0),
            burst_factor=inner.number("burst_factor", 1.0, least=1.0),
            mean_context=inner.number("mean_context", 1024.0, least=1.0),
            mean_generated=inner.number("mean_generated", 128.0, least=1.0),
        )
        bursts = {
            "burst_every": asked.burst_every_s > 0,
            "burst_for": asked.burst_s > 0,
            "burst_factor": asked.burst_factor > 1,
        }
        if any(bursts.values()) and not all(bursts.values()):
            missing, given = (
                next(key for key, is_ in bursts.items() if is_ == known) for known in (False, True)
            )
            inner.fail(missing, f"is missing, without which {given} does nothing; give it")
    inner.done()
    least, most = section.count("least", 0), section.count_or("most", cluster.nodes, least=1)
    if least > most:
        section.fail("least", f"is {least}, more than the {most} of most; make it smaller")
    if most > cluster.machines:
        section.fail("most", f"is {most}, and the cluster has {cluster.machines}; make it larger")
    return Inference(
        requests=asked,
        least=least,
        most=most,
        slots=section.count("slots", 1, least=1),
        prefill_tps=section.number("prefill", 10_000.0, above=True),
        decode_tps=section.number("decode", 1_000.0, above=True),
        cold=law(section, "cold", NO_TIME),
        warm=optional_law(section, "warm"),
        cache_bytes_per_token=section.size("cache_per_token", 0.0),
        cache_read_bps=section.bandwidth("cache_read") if section.has("cache_read") else math.inf,
        keep_share=section.number("keep_share", 0.0, most=1.0),
    )


def _spot(section: Section, seed: int) -> SpotWork:
    work_s, deadline_s = section.time("work", least="above 0"), section.time("deadline", least="above 0")
    restart_s = section.time("restart", 0.0)
    if work_s + restart_s > deadline_s:
        section.fail(
            "deadline", f"is {deadline_s:g} s, less than {work_s:g} s of work and a start; allow more time"
        )
    prices = (
        section.price("spot_price") if section.has("spot_price") else None,
        section.price("on_demand_price") if section.has("on_demand_price") else None,
    )
    if section.has("trace"):
        tick_s, regions, starts = _traced(section, prices, deadline_s)
    else:
        tick_s, regions, starts = _made_up(section, prices, deadline_s, seed)
    needed_s = math.ceil((work_s + restart_s) / tick_s - 1e-9) * tick_s
    if needed_s > deadline_s + 1e-3:
        section.fail(
            "deadline",
            f"is {deadline_s:g} s, and work and a start take {needed_s:g} s in whole ticks of {tick_s:g} s; "
            "allow more time, or make the tick shorter",
        )
    return SpotWork(
        work_s,
        deadline_s,
        restart_s,
        tick_s,
        regions,
        section.size("state", 0.0),
        section.price_of_size("move_price", 0.0),
        starts,
    )


Prices = tuple[float | None, float | None]


def _traced(
    section: Section, prices: Prices, deadline_s: float
) -> tuple[float, tuple[RegionCapacity, ...], tuple[int, ...]]:
    path = trace_file(section, "trace")
    zones: Any = section.get("zones", [])
    wanted = cast("list[Any]", [zones] if isinstance(zones, str) else zones)
    if not isinstance(zones, str | list) or not all(isinstance(name, str) for name in wanted):
        section.fail("zones", f"is {shown(zones)}; it must be names of zones")  # pyright: ignore[reportUnknownArgumentType]
    section.resolved["zones"] = wanted
    try:
        if path.suffix == ".json":
            windows: Windows = capacity.load_windows(path)
            if None in prices:
                section.fail("spot_price", "is missing, and the trace has no prices; give both prices")
            first = min(zone.first_tick for zone in windows.zones)
            # All begin at one tick; no window reaches before the first one of a zone.
            found = {
                zone.name: RegionCapacity(
                    zone.name,
                    (*[0] * (zone.first_tick - first), *zone.available),
                    prices[0] or 0.0,
                    prices[1] or 0.0,
                )
                for zone in windows.zones
            }
            tick_s, starts = windows.tick_s, tuple(start - first for start in windows.starts)
        else:
            loaded = priced.load(path)
            tick_s = next(iter(loaded.values())).tick_s
            # One window after another, as many as the shortest zone holds.
            ticks, length = math.ceil(deadline_s / tick_s), min(len(z.available) for z in loaded.values())
            starts = tuple(range(0, length - ticks + 1, ticks))
            if not starts:
                section.fail("deadline", f"is longer than the trace of {length * tick_s:g} s; shorten it")
            found = {
                name: RegionCapacity(
                    name,
                    tuple(zone.available),
                    zone.spot_price / 3600 if prices[0] is None else prices[0],
                    zone.on_demand_price / 3600 if prices[1] is None else prices[1],
                )
                for name, zone in loaded.items()
            }
    except SimError as error:
        if type(error) is not SimError:
            raise
        section.fail("trace", f"cannot be used: {error}")
    for name in wanted:
        if name not in found:
            section.fail("zones", f"holds '{name}', which the trace has not; it has {', '.join(found)}")
    return tick_s, tuple(found[name] for name in wanted or found), starts


def _made_up(
    section: Section, prices: Prices, deadline_s: float, seed: int
) -> tuple[float, tuple[RegionCapacity, ...], tuple[int, ...]]:
    tick_s = section.time("tick", 600.0, least="above 0")
    windows = section.count("windows", 100, least=1)
    if (count := (deadline_s / tick_s + 2) * windows) > foreseen.MOST:
        section.fail(
            "windows" if section.has("windows") else "tick",
            f"comes to {count:.2g} ticks in {windows:g} windows, more than the {foreseen.MOST:,} that can be "
            "played; use fewer windows, or longer ticks",
        )
    # As many windows as a study asks for at most, each as long as the deadline and a tick to spare.
    ticks = math.ceil(deadline_s / tick_s) + 1
    regions: list[RegionCapacity] = []
    for number, inner in enumerate(section.sections("regions")):
        up_s, down_s = inner.time("mean_up", least="above 0"), inner.time("mean_down", least="above 0")
        name, own = inner.text("name"), inner.count("seed", number)
        for key, mean_s in (("mean_up", up_s), ("mean_down", down_s)):
            if mean_s < tick_s:
                inner.fail(key, f"is {mean_s:g} s, shorter than a tick of {tick_s:g} s; make it longer")
        regions.append(
            RegionCapacity(
                name,
                tuple(synthetic.zone(ticks * windows, up_s / tick_s, down_s / tick_s, f"{seed} {own}")),
                _price(inner, "spot_price", prices[0]),
                _price(inner, "on_demand_price", prices[1]),
            )
        )
        inner.done()
    if not regions:
        section.fail("regions", "is empty; give regions, or a trace")
    return tick_s, tuple(regions), tuple(range(0, ticks * windows, ticks))


def _price(section: Section, key: str, general: float | None) -> float:
    if general is None or section.has(key):
        return section.price(key)
    return general
