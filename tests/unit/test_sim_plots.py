"""Plots of studies with many cells: what is left out is said, and what is drawn can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.engine.ledger import Span
from sim.results import calibrate, plots, report
from sim.results.tables import Cell, Params, Results, write_atomically


def many(restarts: int) -> Results:
    cells: list[Cell] = []
    for restart in range(restarts):
        for policy, interval_s in (("periodic", 300.0), ("periodic", 900.0), ("exact", None)):
            own: Params = {} if interval_s is None else {"policy.interval": interval_s}
            values = {
                "ettr": [0.90, 0.92], "wall_s": [10.0, 10.0], "bucket.goodput": [9.0, 9.2],
                "bucket.waiting": [1.0, 0.8],
            }  # fmt: skip
            spans = [Span(0.0, 9.0, "job0", "work")]
            spans += [Span(1.0, 2.0, f"node{node}", "down") for node in range(12)]
            cell = Cell(
                f"{policy} {interval_s} {restart}", policy,
                {"policy": policy, **own, "costs.restart": 60.0 + restart},
                interval_s=interval_s or 500.0, values=values, recoveries_s=[60.0, 90.0], spans=spans,
            )  # fmt: skip
            cells.append(cell)
    return Results("many", "", "", 0, "training", "", cells)


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        ("interval", "8 of 10 curves, 8 of 10 intervals of closed forms"),
        ("badput", "24 of 30 cells"),
        ("recovery", "8 of 30 cells"),
        ("timeline", "6 of 30 cells, 10 of 12 nodes that changed their state"),
    ],
)
def test_what_a_plot_leaves_out_is_in_its_title(kind: str, left_out: str) -> None:
    draw = next(each.draw for each in plots.KINDS if each.name == kind)
    assert title(draw([many(10)])) == f"many\n{left_out}"
    if kind != "timeline":
        assert title(draw([many(2)])) == "many"


def title(figure: Any) -> str:
    return figure.axes[0].get_title()


@pytest.mark.parametrize("draw", [plots.interval, plots.recovery])
def test_no_legend_is_over_the_curves(draw: Any) -> None:
    figure = draw([many(10)])
    figure.draw_without_rendering()
    (axes,) = figure.axes
    legend, curves = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert legend.x0 >= curves.x1
    assert legend.x1 <= figure.bbox.x1 and legend.y0 >= 0, "all of it is on the page"


def test_bars_of_nodes_say_which_cell_they_are_of() -> None:
    (axes,) = plots.timeline([many(2)]).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert "periodic, interval 300, restart 60: node0" in names
    (axes,) = plots.timeline([Results("one", "", "", 0, "training", "", many(1).cells[:1])]).axes
    assert "node0" in [label.get_text() for label in axes.get_yticklabels()]


def test_axes_of_a_heat_map_are_in_the_units_of_what_is_swept() -> None:
    swept = {
        "failures[0].shape": ("", (0.5, 2.0), ("0.5", "2"), "failures[0].shape"),
        "storage[0].write": ("B/s", (1e10, 2e11), ("10", "200"), "storage[0].write (GB/s)"),
        "failures[0].mean": ("s", (86400.0, 1728000.0), ("1", "20"), "failures[0].mean (d)"),
        "costs.node_price": ("$/s", (1 / 3600, 2 / 3600), ("1", "2"), "costs.node_price ($/h)"),
    }
    for across, up in (("failures[0].shape", "storage[0].write"), ("failures[0].mean", "costs.node_price")):
        units = {key: swept[key][0] for key in (across, up) if swept[key][0]}
        cells = [
            Cell(f"{x} {y}", "daly", {"policy": "daly", across: x, up: y}, units, values={"ettr": [x, x]})
            for x in swept[across][1]
            for y in swept[up][1]
        ]
        axes = plots.heat([Results("heat", "", "", 0, "training", "", cells)]).axes[0]
        for key, ticks, name in (
            (across, axes.get_xticklabels(), axes.get_xlabel()),
            (up, axes.get_yticklabels(), axes.get_ylabel()),
        ):
            assert (tuple(tick.get_text() for tick in ticks), name) == swept[key][2:]


def test_results_go_into_what_is_there(tmp_path: Path):
    """A link or a device is not replaced by a file."""
    link, target = tmp_path / "link", tmp_path / "target"
    target.touch()
    link.symlink_to(target)
    write_atomically(link, b"page")
    assert link.is_symlink() and target.read_bytes() == b"page"
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    write_atomically(null, b"page")
    assert null.is_char_device()


def test_equal_curves_and_marks_are_told_apart_by_their_lines() -> None:
    axes = plots.interval([many(8)]).axes[0]
    curves = [line for line in axes.get_lines() if len(line.get_xdata()) == 2 and line.get_marker() == "o"]
    marks = [line for line in axes.get_lines() if line.get_marker() != "o"]
    for lines in (curves, marks):
        assert len({line.get_linestyle() + str(line._unscaled_dash_pattern) for line in lines}) == 8


def test_one_time_that_is_foretold_wrongly_does_not_set_the_axes() -> None:
    seen, told = (1.0, 2.0, 4.0), (1.1, 1e-9, 3.9)
    phase = calibrate.Phase(3, 2.3, (1.0,) * 11, calibrate.Fit(1.0, None), seen, told, 0.1)
    axes = plots.measured(calibrate.Calibration(("criu",), 3, 0, (1.0,) * 11, {"stall": phase}, ())).axes[0]
    assert axes.get_ylim() == axes.get_xlim() == (pytest.approx(1 / 1.5), pytest.approx(6.0))
    assert axes.get_title().endswith("2 of 3 times; others are at the edge")


def test_a_report_says_what_it_leaves_out() -> None:
    cells = [
        Cell(
            f"{number}",
            "daly",
            {"policy": "daly", "costs.restart": number},
            values={"ettr": [0.5, 0.6], "bucket.goodput": [5.0, 6.0]},
        )
        for number in range(61)
    ]
    said = report.page(Results("long", "", "", 0, "training", "", cells))
    assert "The first 24 of 61 tables" in said and "The first 60 of 61 cells" in said
    said = report.page(Results("short", "", "", 0, "training", "", cells[:24]))
    assert "The first" not in said
