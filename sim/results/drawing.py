"""What plots are made of: figures, colours, axes, and words for parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from sim.errors import SimError
from sim.results.tables import Cell, Results

_One = TypeVar("_One")

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
"""Okabe and Ito's, which most colour-blind people can tell apart."""

STYLES = (
    "-", (0, (4, 2)), (0, (1, 1)), (0, (6, 2, 1, 2)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3)),
    (0, (6, 1, 3, 1)),
)  # fmt: skip
"""Of lines: each its own, so that of equal ones each shows through the next."""

BUCKET_COLOURS = {
    "goodput": "#009E73", "startup": "#999999", "checkpoint_stall": "#0072B2", "lost_work": "#D55E00",
    "detection": "#F0E442", "save_after_failure": "#7A5195", "restart": "#E69F00", "restore": "#B07D00",
    "waiting": "#CC79A7", "preempted": "#8C2D04", "migration": "#56B4E9", "idle": "#DDDDDD",
    "work": "#009E73", "working": "#009E73", "saving": "#0072B2", "starting": "#999999",
    "detecting": "#F0E442", "spot": "#009E73", "on-demand": "#0072B2", "down": "#7A5195",
}  # fmt: skip


def figure(width: float = 7.2, height: float = 4.4, panels: int = 1) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SimError("could not plot: matplotlib is missing; pip install '.[sim]'") from error

    made: Any = Figure(figsize=(width, height), dpi=130, layout="constrained")
    axes: Any = made.subplots(1, panels, squeeze=False)[0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(color="#dddddd", linewidth=0.6)
        each.set_axisbelow(True)
    return made, axes[0] if panels == 1 else axes


def _plain(value: float, _: int | None) -> str:
    return f"{value:,.6g}"


def plain_log(axis: Any, base: int = 10) -> None:
    """A logarithmic axis whose ticks are plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    subs: Any = (1.0, 2.0, 5.0) if base == 10 else (1.0,)
    axis.set_major_locator(LogLocator(base=base, subs=subs))
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_formatter(NullFormatter())


def scale(seconds: float) -> tuple[float, str]:
    """A unit in which a time is a number that people read: how many seconds it has, and its name."""
    for size, name, least in ((86400.0, "d", 4), (3600.0, "h", 2), (60.0, "min", 2)):
        if seconds >= least * size or seconds == size:
            return size, name
    return (1.0, "s") if seconds >= 0.5 else (1e-3, "ms")


def short(value: object, unit: str = "") -> str:
    """A parameter's value, short, in a unit that people read."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if value == 0:
        return "0"
    if unit == "s" and math.isfinite(value):
        size, name = scale(value)
        return f"{value / size:.4g} {name}"
    if unit == "$/s":
        return f"$ {3600 * value:.4g}/h"
    if unit.startswith("B") and math.isfinite(value):
        size, name = _bytes(value, unit)
        return f"{value / size:.4g} {name}"
    return f"{value:.6g}" + (f" {unit}" if unit else "")


def _bytes(value: float, unit: str) -> tuple[float, str]:
    power = min(4, max(0, int(math.log10(max(value, 1)) // 3)))
    return 1000.0**power, ("B", "kB", "MB", "GB", "TB")[power] + unit[1:]


def axis_scale(values: Sequence[float], unit: str) -> tuple[float, str]:
    """What an axis of such values divides them by, and the name of its unit; "" for bare numbers."""
    most = max(values)
    if unit == "s":
        return scale(most / 4)
    if unit == "$/s":
        return 1 / 3600, "$/h"
    return _bytes(most, unit) if unit.startswith("B") else (1.0, unit)


def label(cell: Cell, *without: str) -> str:
    """The policy and what else is swept, without those keys."""
    rest = [
        f"{key.rpartition('.')[2]} {short(value, cell.units.get(key, ''))}"
        for key, value in cell.params.items()
        if key != "policy" and key not in without
    ]
    return ", ".join([cell.policy, *rest])


def some(cells: Sequence[_One], most: int) -> list[_One]:
    """All cells, or as many as that, from everywhere among them."""
    if len(cells) <= most:
        return list(cells)
    return [cells[round(number * (len(cells) - 1) / (most - 1))] for number in range(most)]


def entitle(axes: Any, title: str, *parts: tuple[int, int, str]) -> None:
    """A title, and what is left out: of each sort of thing how many are shown, of how many."""
    left_out = [f"{shown} of {there} {what}" for shown, there, what in parts if shown < there]
    axes.set_title("\n".join([title, ", ".join(left_out)] if left_out else [title]), fontsize=10)


def legend_beside(figure: Any, axes: Any) -> None:
    """A legend to the right of the curves, for which the figure grows."""
    labels = axes.get_legend_handles_labels()[1]
    width, height = figure.get_size_inches()
    figure.set_size_inches(width + 0.4 + 0.06 * max(map(len, labels)), max(height, 0.6 + 0.2 * len(labels)))
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def swept(results: Results, names: Sequence[str]) -> str | None:
    """The first key with several numbers that is, or else contains, one of the names."""
    keys = numeric(results)
    exact = (key for name in names for key in keys if key == name)
    return next(exact, next((key for name in names for key in keys if name in key), None))


def numeric(results: Results) -> list[str]:
    """Keys that are swept over several numbers."""
    values: dict[str, set[float]] = {}
    for cell in results.cells:
        for key, value in cell.params.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(key, set()).add(float(value))
    return [key for key, several in values.items() if len(several) > 1]


def lines(results: Results, key: str) -> dict[str, list[Cell]]:
    """Cells by what else is swept, each in order of the key."""
    found: dict[str, list[Cell]] = {}
    for cell in results.cells:
        if key in cell.params:
            found.setdefault(label(cell, key), []).append(cell)
    return {name: sorted(cells, key=lambda c: float(c.params[key])) for name, cells in found.items()}


def band(axes: Any, xs: Sequence[float], cells: Sequence[Cell], metric: str, **style: Any) -> None:
    """Means of a metric, and their intervals as a band."""
    found = [cell.summary(metric) for cell in cells]
    axes.plot(xs, [s.mean for s in found], marker="o", markersize=3.5, linewidth=1.5, **style)
    # Of one replication there is no interval.
    widths = [0.0 if math.isnan(s.ci95) else s.ci95 for s in found]
    low = [s.mean - width for s, width in zip(found, widths, strict=True)]
    high = [s.mean + width for s, width in zip(found, widths, strict=True)]
    axes.fill_between(xs, low, high, color=style.get("color"), alpha=0.2, linewidth=0)
