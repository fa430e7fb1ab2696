"""Plots of results: what people who read such studies expect to see."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sim.engine.ledger import Span
from sim.errors import SimError
from sim.maths.statistics import Summary, summarise
from sim.results.calibrate import PERSIST, RESTORE, STALL, Calibration
from sim.results.drawing import (
    BUCKET_COLOURS,
    COLOURS,
    STYLES,
    axis_scale,
    band,
    entitle,
    label,
    legend_beside,
    lines,
    numeric,
    plain_log,
    scale,
    short,
    some,
    swept,
)  # fmt: skip
from sim.results.drawing import (
    figure as new_figure,
)
from sim.results.sweep import objective
from sim.results.tables import BUCKET, Cell, Results

FORMULAS = ("young", "daly-first", "daly", "exact")
"""Policies whose interval is a closed form: marks on the curve over intervals."""

SIZES = ("cluster.nodes", "job.gpus", "job.nodes")
RELIABILITY = ("failures", "mtbf", "mttf", "rate", "mean")
COST = ("stall", "persist", "cost", "write", "bytes")


class NotHere(SimError):
    """A plot needs what these results do not have. The message says what."""


@dataclass(frozen=True)
class Kind:
    """A plot: its name, what it shows, what a study must have for it, and what draws it."""

    name: str
    shows: str
    needs: str
    draw: Callable[[Sequence[Results]], Any]


def _only(several: Sequence[Results]) -> Results:
    if len(several) != 1:
        raise NotHere("this plot is of one folder of results")
    return several[0]


def interval(several: Sequence[Results]) -> Any:
    """ETTR against the interval, with the intervals of closed forms marked."""
    results = _only(several)
    if results.workload != "training":
        raise NotHere("only training jobs have an interval between checkpoints")
    key = swept(results, ("policy.interval", "interval"))
    if key is None:
        raise NotHere("it takes a sweep over the interval of a policy")
    every = lines(results, key)
    # Of more than can be told apart, some from everywhere; so below.
    curves = {name: every[name] for name in some(list(every), len(COLOURS))}
    longest = max(float(cell.params[key]) for cells in curves.values() for cell in cells)
    size, name = scale(longest / 4)
    figure, axes = new_figure()
    for colour, style, (line, cells) in zip(COLOURS, STYLES, curves.items(), strict=False):
        xs = [float(c.params[key]) / size for c in cells]
        band(axes, xs, cells, "ettr", color=colour, linestyle=style, label=line)
    marks = [cell for cell in results.cells if cell.policy in FORMULAS and cell.interval_s]
    formulas = some(marks, 2 * len(FORMULAS))
    for style, cell in zip(STYLES[::-1], formulas, strict=False):
        s, at = cell.summary("ettr"), (cell.interval_s or 0.0) / size
        name_it = f"{label(cell)}: {at:.3g} {name}, ETTR {s.mean:.4f} ± {s.ci95:.1g}"
        axes.axvline(at, color="#000000", linestyle=style, linewidth=0.9, label=name_it)
    axes.set_xscale("log")
    plain_log(axes.xaxis)
    axes.set_xlabel(f"work between two checkpoints ({name})")
    axes.set_ylabel("ETTR, with 95 % interval")
    legend_beside(figure, axes)
    entitle(
        axes, results.title, (len(curves), len(every), "curves"),
        (len(formulas), len(marks), "intervals of closed forms"),
    )  # fmt: skip
    return figure


def heat(several: Sequence[Results]) -> Any:
    """What cells are judged by, over two swept keys: rarity of failures against cost of checkpoints."""
    results = _only(several)
    keys = numeric(results)
    across = swept(results, RELIABILITY) or (keys[0] if keys else None)
    rest = [key for key in keys if key != across]
    up = next((key for key in rest if any(name in key for name in COST)), rest[0] if rest else None)
    if across is None or up is None:
        raise NotHere("it takes a sweep over two keys")
    panels: dict[str, list[Cell]] = {}
    for cell in results.cells:
        if across in cell.params and up in cell.params:
            panels.setdefault(label(cell, across, up), []).append(cell)
    shown = dict(itertools.islice(panels.items(), 4))
    judged = objective(results.workload)
    means = {
        id(cell): cell.summary(judged.metric).mean for cells in shown.values() for cell in cells
    }  # fmt: skip
    figure, axes = new_figure(3.6 * len(shown) + 1.4, 4.2, len(shown))
    drawn: Any = None
    for each, (name, cells) in zip([axes] if len(shown) == 1 else axes, shown.items(), strict=True):
        xs = sorted({float(cell.params[across]) for cell in cells})
        ys = sorted({float(cell.params[up]) for cell in cells})
        grid = [[math.nan] * len(xs) for _ in ys]
        for cell in cells:
            value = means[id(cell)]
            x, y = xs.index(float(cell.params[across])), ys.index(float(cell.params[up]))
            grid[y][x] = value
        drawn = each.imshow(
            grid, origin="lower", aspect="auto", cmap="viridis" if judged.more else "viridis_r",
            vmin=min(means.values()), vmax=max(means.values()),
        )  # fmt: skip
        middle = (min(means.values()) + max(means.values())) / 2
        if len(xs) * len(ys) <= 64:
            for y, row in enumerate(grid):
                for x, value in enumerate(row):
                    dark = (value < middle) == judged.more
                    each.text(
                        x, y, f"{value:.3g}", ha="center", va="center", fontsize=7,
                        color="white" if dark else "black",
                    )  # fmt: skip
        each.grid(visible=False)
        (wide, wide_name), (high, high_name) = (
            axis_scale(values, cells[0].units.get(key, "")) for key, values in ((across, xs), (up, ys))
        )
        each.set_xticks(range(len(xs)), [f"{x / wide:.3g}" for x in xs], rotation=45, fontsize=8)
        each.set_yticks(range(len(ys)), [f"{y / high:.3g}" for y in ys], fontsize=8)
        each.set_xlabel(f"{across} ({wide_name})" if wide_name else across)
        each.set_ylabel(f"{up} ({high_name})" if high_name else up)
        each.set_title(name, fontsize=9)
    figure.colorbar(drawn, ax=axes, label=judged.words)
    left_out = f", {len(shown)} of {len(panels)} panels" if len(shown) < len(panels) else ""
    figure.suptitle(results.title + left_out, fontsize=10)
    return figure


def mttf(several: Sequence[Results]) -> Any:
    """Mean time to failure of a job against its GPUs, and what 1/N makes of the smallest one."""
    results = _only(several)
    key = swept(results, SIZES)
    if key is None or results.workload != "training":
        raise NotHere("it takes a sweep over the size of a training job")
    per_node = 1 if key == "job.gpus" else _gpus_per_node(results)
    # Failures do not depend on the policy: one of them says it.
    curves: dict[str, dict[float, Cell]] = {}
    for cell in results.cells:
        rest = [k for k in cell.params if k not in ("policy", key) and not k.startswith("policy.")]
        name = ", ".join(f"{k} {short(cell.params[k], cell.units.get(k, ''))}" for k in rest)
        curves.setdefault(name or "simulated", {}).setdefault(float(cell.params[key]) * per_node, cell)
    figure, axes = new_figure()
    drawn = False
    for colour, (line, cells) in zip(itertools.cycle(COLOURS), curves.items(), strict=False):
        seen = {gpus: found for gpus, cell in sorted(cells.items()) if (found := cell.mttf_s())}
        if not seen:
            continue
        hours = [mean_s / 3600 for mean_s, _ in seen.values()]
        widths = [half_s / 3600 for _, half_s in seen.values()]
        axes.errorbar(
            list(seen), hours, yerr=widths, fmt="o", markersize=4, capsize=2, color=colour, label=line
        )
        # From the one that failed most often, whose mean is known best.
        last = list(seen)[-1]
        axes.plot(
            list(seen), [hours[-1] * last / x for x in seen], "--", color=colour, linewidth=1, alpha=0.7
        )
        drawn = True
    if not drawn:
        raise NotHere("no job failed often enough to tell its mean time to failure")
    axes.plot([], [], "--", color="#888888", label="1/N from the largest")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    plain_log(axes.xaxis, 2)
    plain_log(axes.yaxis)
    axes.set_xlabel("GPUs of the job" if per_node > 1 or key == "job.gpus" else "nodes of the job")
    axes.set_ylabel("mean time to failure (h), with 95 % interval")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(results.title, fontsize=10)
    return figure


def _gpus_per_node(results: Results) -> int:
    """Of the study; 1 where it is swept, or not told."""
    document = yaml.safe_load(results.resolved)
    per_node = document.get("cluster", {}).get("gpus_per_node") if isinstance(document, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return per_node if isinstance(per_node, int) else 1


def badput(several: Sequence[Results]) -> Any:
    """Where each cell's time went, as shares of it."""
    every = [cell for results in several for cell in results.cells]
    cells = [(cell, label(cell)) for cell in some(every, 24)]
    rows: list[tuple[str, dict[str, float]]] = []
    for cell, name in cells:
        shares = {
            metric.removeprefix(BUCKET): math.fsum(values)
            for metric, values in cell.values.items()
            if metric.startswith(BUCKET)
        }
        total = math.fsum(shares.values())
        rows.append((name, {bucket: value / total for bucket, value in shares.items()} if total else shares))
    used = [
        b for b in dict.fromkeys(b for _, shares in rows for b in shares) if any(s.get(b) for _, s in rows)
    ]
    least = min((shares.get("goodput", 0.0) for _, shares in rows), default=0.0)
    # Where nearly all is useful, what matters is the end of the bar.
    begin = math.floor(20 * max(0.0, least - 0.05)) / 20 if least > 0.6 else 0.0
    longest = max(len(name) for name, _ in rows)
    figure, axes = new_figure(6.0 + 0.06 * longest, 1.3 + 0.32 * max(3, len(rows)))
    left = [0.0] * len(rows)
    places = list(range(len(rows)))[::-1]
    for number, bucket in enumerate(used):
        widths = [shares.get(bucket, 0.0) for _, shares in rows]
        colour = BUCKET_COLOURS.get(bucket, COLOURS[number % len(COLOURS)])
        axes.barh(places, widths, left=left, color=colour, label=bucket.replace("_", " "), height=0.75)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_yticks(places, [name for name, _ in rows], fontsize=8)
    axes.set_xlim(begin, 1)
    axes.set_xlabel("share of time" + (f" (the axis begins at {begin:.2f})" if begin else ""))
    axes.grid(axis="y", visible=False)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    entitle(axes, several[0].title, (len(cells), len(every), "cells"))
    return figure


def recovery(several: Sequence[Results]) -> Any:
    """How long recoveries take: the share of them that were shorter."""
    every = [cell for results in several for cell in results.cells if cell.recoveries_s]
    if not every:
        raise NotHere("nothing failed, so nothing recovered")
    cells = some(every, len(COLOURS))
    longest = max(max(cell.recoveries_s) for cell in cells)
    size, name = scale(longest / 10)
    figure, axes = new_figure()
    for colour, style, cell in zip(COLOURS, STYLES, cells, strict=False):
        xs = sorted(value / size for value in cell.recoveries_s)
        ys = [(number + 1) / len(xs) for number in range(len(xs))]
        name_it = f"{label(cell)} (n = {len(xs)})"
        axes.step(xs, ys, where="post", color=colour, linestyle=style, linewidth=1.4, label=name_it)
    shortest = min(min(cell.recoveries_s) for cell in cells)
    if shortest > 0 and longest / shortest > 30:
        axes.set_xscale("log")
        plain_log(axes.xaxis)
    axes.set_ylim(0, 1.01)
    axes.set_xlabel(f"recovery time ({name}): from the failure to useful work again")
    axes.set_ylabel("share of recoveries that took no longer")
    legend_beside(figure, axes)
    entitle(axes, several[0].title, (len(cells), len(every), "cells"))
    return figure


def timeline(several: Sequence[Results]) -> Any:
    """Who was in which state when, in the first replication of a few cells."""
    results = _only(several)
    every = [cell for cell in results.cells if cell.spans]
    if not every:
        raise NotHere(
            "these results have no timeline; make them with `torpor sim run --out`, which keeps one"
        )
    # Of more than fit, some from everywhere. Machines do not depend on the policy: those of the first.
    cells = some(every, 6)
    lanes: list[tuple[str, list[Span]]] = []
    nodes: list[tuple[str, list[Span]]] = []
    jobs = 0
    for cell in cells:
        found: dict[str, list[Span]] = {}
        for span in cell.spans:
            found.setdefault(span.who, []).append(span)
        busiest = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
        workers = [(who, spans) for who, spans in busiest if not who.startswith("node")]
        most, whose = max(1, 12 // len(cells)), f"{label(cell)}: " if len(cells) > 1 else ""
        jobs += len(workers)
        lanes += [(whose + who, spans) for who, spans in workers[:most]]
        if cell is cells[0]:
            nodes = [(whose + who, spans) for who, spans in busiest if who.startswith("node")]
    shown = len(lanes)
    lanes += nodes[:10]
    end = max(span.t1_s for _, spans in lanes for span in spans)
    size, name = scale(end)
    states = list(dict.fromkeys(span.state for _, spans in lanes for span in spans))
    taken = {BUCKET_COLOURS[state] for state in states if state in BUCKET_COLOURS}
    spare = itertools.cycle([colour for colour in COLOURS if colour not in taken] or COLOURS)
    colours = {state: BUCKET_COLOURS.get(state) or next(spare) for state in states}
    longest = max(len(lane) for lane, _ in lanes)
    figure, axes = new_figure(7.0 + 0.06 * longest, 1.2 + 0.3 * max(3, len(lanes)))
    for place, (_, spans) in enumerate(reversed(lanes)):
        for state in states:
            bars = [(s.t0_s / size, (s.t1_s - s.t0_s) / size) for s in spans if s.state == state]
            axes.broken_barh(bars, (place - 0.4, 0.8), color=colours[state], linewidth=0)
    for state in states:
        axes.plot([], [], color=colours[state], linewidth=6, label=state.replace("_", " "))
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.set_yticks(range(len(lanes)), [lane for lane, _ in reversed(lanes)], fontsize=8)
    axes.set_xlim(0, end / size)
    axes.set_xlabel(f"time ({name})")
    axes.grid(axis="y", visible=False)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    entitle(
        axes, results.title, (len(cells), len(every), "cells"), (shown, jobs, "jobs or replicas of these"),
        (min(10, len(nodes)), len(nodes), "nodes that changed their state"),
    )  # fmt: skip
    return figure


def deadline(several: Sequence[Results]) -> Any:
    """Cost of a job on spot and on-demand machines against its deadline."""
    results = _only(several)
    key = swept(results, ("spot.deadline", "deadline"))
    if key is None or results.workload != "spot":
        raise NotHere("it takes a sweep over the deadline of a spot job")
    size, name = scale(max(float(c.params[key]) for c in results.cells if key in c.params) / 4)
    if name == "d":
        size, name = 3600.0, "h"
    figure, axes = new_figure()
    drawn = zip(itertools.cycle(COLOURS), itertools.cycle(STYLES), lines(results, key).items(), strict=False)
    for colour, style, (line, cells) in drawn:
        xs = [float(c.params[key]) / size for c in cells]
        band(axes, xs, cells, "cost_usd", color=colour, linestyle=style, label=line)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"deadline ({name})")
    axes.set_ylabel("cost of the job ($), with 95 % interval")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(results.title, fontsize=10)
    return figure


def spares(several: Sequence[Results]) -> Any:
    """How much of the time a job has all its nodes, against spares; studies side by side."""
    figure, axes = new_figure()
    looks = itertools.cycle(zip(COLOURS, STYLES, strict=True))
    drawn = False
    for results in several:
        key = swept(results, ("cluster.spares",))
        if key is None or results.workload != "training":
            continue
        for line, cells in lines(results, key).items():
            found = [_there(cell) for cell in cells]
            xs = [float(cell.params[key]) for cell in cells]
            widths = [0.0 if math.isnan(s.ci95) else s.ci95 for s in found]
            means = [s.mean for s in found]
            low = [mean - width for mean, width in zip(means, widths, strict=True)]
            high = [mean + width for mean, width in zip(means, widths, strict=True)]
            colour, style = next(looks)
            name = f"{results.title}: {line}" if len(several) > 1 else line
            axes.plot(xs, means, marker="o", linestyle=style, markersize=4, color=colour, label=name)
            axes.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)
            drawn = True
    if not drawn:
        raise NotHere("it takes a sweep over cluster.spares of a training job")
    axes.set_xlabel("spare nodes")
    axes.set_ylabel("share of time with enough nodes, 95 % interval")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.set_title("spares against availability", fontsize=10)
    return figure


def _there(cell: Cell) -> Summary:
    """The share of time that a cell's job did not wait for a node."""
    pairs = zip(cell.values[BUCKET + "waiting"], cell.values["wall_s"], strict=True)
    return summarise([1 - waited / wall for waited, wall in pairs])


def measured(calibration: Calibration) -> Any:
    """What the fit of a calibration foretells against what was measured, and a band of a tenth."""
    figure, axes = new_figure(5.4, 5.0)
    main = (name for name in (STALL, PERSIST, RESTORE) if name in calibration.phases)
    points = [(name, phase) for name in main if (phase := calibration.phases[name]).observed_s]
    seen = [value for _, phase in points for value in phase.observed_s if value > 0]
    if not seen:
        raise NotHere("no phase was measured often enough to foretell one of its times from the others")
    # By what was measured: one time that is foretold as next to nothing would set the axes for all others.
    low, high = min(seen) / 1.5, max(seen) * 1.5
    within = there = 0
    for colour, mark, (name, phase) in zip(COLOURS, "osD^v<>P", points, strict=False):
        foretold = [min(max(value, low), high) for value in phase.predicted_s]
        axes.plot(
            phase.observed_s, foretold, mark, color=colour, markersize=4, alpha=0.8,
            label=f"{name} (n = {phase.n})",
        )  # fmt: skip
        there += len(foretold)
        within += sum(low <= value <= high for value in phase.predicted_s)
    axes.plot([low, high], [low, high], color="#444444", linewidth=1)
    axes.fill_between(
        [low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high],
        color="#888888", alpha=0.25, linewidth=0, label="within a tenth",
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_log(axes.xaxis)
    plain_log(axes.yaxis)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("measured (s)")
    axes.set_ylabel("foretold from the other measurements (s)")
    axes.legend(fontsize=8, frameon=False)
    entitle(
        axes, "simulated against measured", (within, there, "times; others are at the edge")
    )  # fmt: skip
    return figure


KINDS = (
    Kind("interval", "ETTR against the interval between checkpoints", "a sweep over an interval", interval),
    Kind("heat", "heat map over two swept keys", "a sweep over two keys", heat),
    Kind("mttf", "mean time to failure against GPUs", "a sweep over the size of a job", mttf),
    Kind("badput", "where the time went", "any study", badput),
    Kind("recovery", "distribution of recovery times", "failures", recovery),
    Kind("timeline", "states of jobs and nodes over time", "results of `run --out`", timeline),
    Kind("deadline", "cost against deadline", "a sweep over the deadline of a spot job", deadline),
    Kind("spares", "spares against availability", "a sweep over cluster.spares", spares),
)


def draw(several: Sequence[Results], kind: Kind, path: Path) -> None:
    """Draw a plot into a file whose name says its format: png, svg or pdf.

    Raises:
        NotHere: the results do not have what it needs.
        SimError: the file cannot be written.

    """
    save(kind.draw(several), path)


def save(figure: Any, path: Path) -> None:
    """Write a figure without anything that differs from one run to the next."""
    metadata = {"Software": None} if path.suffix == ".png" else {"Date": None}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata=metadata if path.suffix in (".png", ".svg") else None)
    except (OSError, ValueError) as error:
        raise SimError(f"could not write plot '{path}': {error}; give a path that ends in .png") from error
