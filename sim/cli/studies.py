"""`torpor sim run`, `sweep`, `plot`, `report`, `recommend`, `calibrate`, `examples`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sim.cli.common import console, needs_extra
from sim.errors import SimError

if TYPE_CHECKING:
    from sim.results import judge
    from sim.results.tables import Results
    from sim.studies.study import Study

_STUDY = click.argument("study", type=click.Path(exists=True, dir_okay=False, path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="For machines.")
_TRACES = click.option(
    "--traces",
    "traces",
    envvar="TORPOR_TRACES",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder that trace files are named below; TORPOR_TRACES if not given.",
)
_OUT = click.Path(file_okay=False, path_type=Path)


@click.command("run")
@_STUDY
@_TRACES
@click.option("--out", "folder", type=_OUT, help="Keep results there, with a timeline of each cell.")
@_JSON
def run_command(study: Path, traces: Path | None, folder: Path | None, as_json: bool) -> None:
    """Run a study in this process and say which policy wins.

    Each cell (a combination of what the study sweeps) is run again and again with other failures until its
    95 % interval is as narrow as the study asks. All policies see the same failures, so they are compared
    failure by failure.
    """
    _run(study, traces, folder, as_json, backend="loky", jobs=1, timeline=folder is not None)


@click.command("sweep")
@_STUDY
@_TRACES
@click.option("--out", "folder", required=True, type=_OUT, help="Keep results there.")
@click.option("--jobs", type=click.IntRange(1, 4096), help="Processes.  [default: one a core]")
@click.option(
    "--backend",
    type=click.Choice(["loky", "ray", "dask"]),
    default="loky",
    show_default=True,
    help="loky: processes of this machine; ray, dask: the cluster of RAY_ADDRESS or DASK_SCHEDULER_ADDRESS.",
)
@_JSON
def sweep_command(
    study: Path, traces: Path | None, folder: Path, jobs: int | None, backend: Any, as_json: bool
) -> None:
    """Run a study on all cores, or on a cluster.

    Every finished part is kept: a sweep that was stopped goes on where it was when the same command is given
    again. Results have the same bytes on any backend and number of processes.
    """
    _run(study, traces, folder, as_json, backend=backend, jobs=jobs or len(os.sched_getaffinity(0)))


def _run(
    path: Path, traces: Path | None, folder: Path | None, as_json: bool, *,
    backend: Any, jobs: int, timeline: bool = False,
) -> None:  # fmt: skip
    needs_extra("run a study")
    from sim.results import judge, sweep

    loaded = _load(path, traces)
    with _Progress() as told:
        try:
            found = sweep.run(loaded, folder, backend=backend, jobs=jobs, timeline=timeline, progress=told)
        except KeyboardInterrupt:
            kept = (
                f"what was finished is in '{folder}'; give the same command to go on"
                if folder
                else "nothing is kept; use --out"
            )
            raise SimError(f"could not finish study '{path}': it was stopped; {kept}") from None
    if as_json:
        click.echo(json.dumps(_document(found), indent=2, ensure_ascii=False))
        return
    _show(found)
    if remark := judge.remark(found):
        console().print(remark, soft_wrap=True, highlight=False)
    if folder:
        console().print(f"results: {folder}", soft_wrap=True, highlight=False)


def _load(path: Path, traces: Path | None) -> Study:
    from sim.studies import study

    if traces:
        os.environ["TORPOR_TRACES"] = str(traces)
    return study.load(path)


class _Progress:
    """A bar on a screen; nothing where nobody looks."""

    def __init__(self) -> None:
        columns = (TextColumn("running"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        screen = console(error=True)
        self._bar = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)

    def __enter__(self) -> Callable[[int, int], None]:
        self._bar.start()
        task = self._bar.add_task("parts", total=None)
        return lambda done, total: self._bar.update(task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _document(results: Results) -> dict[str, Any]:
    """Results for machines: who wins, and a summary of every metric. A number that is none is null."""
    from sim.results import judge

    def clean(values: dict[str, Any]) -> dict[str, Any]:
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}

    return {
        "schema": 1,
        "title": results.title,
        "sha256": results.sha256,
        "seed": results.seed,
        "objective": judge.objective(results.workload).metric,
        "remark": judge.remark(results),
        "groups": [
            {
                "where": dict(group.where),
                "best": group.best.cell.name,
                "verdict": group.verdict(),
                "ranked": [
                    {
                        "cell": one.cell.name,
                        "tied": one.tied,
                        "flaw": one.flaw,
                        "behind": one.behind and clean(asdict(one.behind)),
                    }
                    for one in group.ranked
                ],
            }
            for group in judge.groups(results)
        ],
        "cells": [
            {
                "name": cell.name,
                "policy": cell.policy,
                "params": dict(cell.params),
                "metrics": {metric: clean(asdict(cell.summary(metric))) for metric in cell.values},
            }
            for cell in results.cells
        ],
    }


def _show(results: Results) -> None:
    """A table of cells with the figures that matter, and who wins."""
    from sim.results import judge

    screen = console()
    found = judge.groups(results)
    if len(found) > 1 and all(len(group.ranked) == 1 for group in found):
        # One policy in many places: one table says it.
        screen.print(_ranking(results, [(group.place, group.best, group.best.flaw) for group in found]))
        return
    for group in found:
        rows: list[tuple[str, judge.Ranked, str]] = []
        for one in group.ranked:
            rows.append((one.name, one, one.beside))
        if group.place:
            screen.print(group.place, highlight=False, soft_wrap=True)
        screen.print(_ranking(results, rows))
        screen.print(group.verdict(), highlight=False, soft_wrap=True)
        screen.print()


def _ranking(results: Results, rows: Sequence[tuple[str, judge.Ranked, str]]) -> Table:
    """A table of names, ranked cells and what is said of them."""
    from sim.results.drawing import short
    from sim.results.sweep import objective
    from sim.results.tables import unit

    def figure(one: judge.Ranked, name: str) -> str:
        mean = one.cell.summary(name).mean if name in one.cell.values else math.nan
        if name == "mttf_s" and (found := one.cell.mttf_s()):
            mean = found[0]
        return "" if math.isnan(mean) else short(mean, "s") if unit(name) == "s" else f"{mean:.4g}"

    known = dict.fromkeys(name for _, one, _ in rows for name in one.cell.values)
    extra = [
        name
        for wanted in _COLUMNS[results.workload]
        for name in (
            each for each in known if each == wanted or (wanted[-1] == "." and each.startswith(wanted))
        )
        # A deadline that was never met is what there is to say.
        if name == "deadline_met"
        or any(name in one.cell.values and any(one.cell.values[name]) for _, one, _ in rows)
    ]
    table = Table(box=None, pad_edge=False)
    table.add_column("POLICY", no_wrap=True)
    for name in (objective(results.workload).metric, "± 95 %", *extra, "runs"):
        table.add_column(name.removesuffix("_s").upper(), justify="right", no_wrap=True)
    if any(beside for _, _, beside in rows):
        compared = any(beside != one.flaw for _, one, beside in rows)
        table.add_column("BESIDE THE BEST" if compared else "REMARK", no_wrap=True)
    for name, one, beside in rows:
        s = one.summary
        figures = [f"{s.mean:.5g}", f"{s.ci95:.2g}", *(figure(one, each) for each in extra), str(s.n)]
        table.add_row(name, *figures, *([beside] if beside else []))
    return table


_COLUMNS = {
    "training": (
        "mttf_s", "recovery_s", "lost_work_s", "failures", "checkpoints", "swaps", "migrations", "cost_usd",
    ),
    "queue": ("time_in_system.", "slowdown", "preemptions", "failures", "lost_work_s", "cost_usd"),
    "inference": (
        "ttft_p50_s", "ttft_p95_s", "latency_p95_s", "replicas_mean", "starts_warm", "starts_cold",
        "cost_usd",
    ),
    "spot": ("deadline_met", "spot_work_s", "on_demand_work_s", "preemptions", "move_usd"),
}  # fmt: skip
"""What a table shows besides the metric that cells are judged by, where it is not always 0.

One that ends with a dot stands for all that begin so: one for each class of jobs.
"""


@click.command("plot")
@click.argument("results", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--out", "folder", type=_OUT, help="Where to.  [default: plots in the first RESULTS]")
@click.option("--kind", "kinds", multiple=True, metavar="KIND", help="Only this plot; may be repeated.")
@click.option(
    "--format", "suffix", type=click.Choice(["png", "svg", "pdf"]), default="png", show_default=True
)
def plot_command(results: tuple[Path, ...], folder: Path | None, kinds: tuple[str, ...], suffix: str) -> None:
    """Draw every plot that RESULTS has the figures for.

    RESULTS: folders of `run --out` or `sweep --out`; several are laid over each other where that makes sense
    (spares of a trace beside those of a Poisson model). Or one measured.json of `calibrate`.

    \b
    interval   ETTR against the interval between checkpoints, with the intervals of closed forms
    heat       what cells are judged by, over two swept keys
    mttf       mean time to failure against GPUs
    badput     where the time went
    recovery   distribution of recovery times
    timeline   states of jobs and nodes over time
    deadline   cost of a spot job against its deadline
    spares     spares against availability
    measured   foretold against measured, of a measured.json
    """
    needs_extra("plot")
    from sim.results import calibrate, plots, tables

    first = results[0]
    if first.is_file():
        if len(results) > 1 or {*kinds} - {"measured"}:
            raise SimError(
                f"could not plot '{first}': a measured.json has one plot, measured; give it alone, "
                "without another --kind"
            )
        path = (folder or first.parent) / f"measured.{suffix}"
        plots.save(plots.measured(calibrate.load(first)), path)
        click.echo(path)
        return
    if "measured" in kinds:
        raise SimError(
            "could not plot measured: it is of a measured.json of `torpor sim calibrate`; give that file "
            "instead of folders"
        )
    known = {kind.name: kind for kind in plots.KINDS}
    if odd := [name for name in kinds if name not in known]:
        raise SimError(f"could not plot '{odd[0]}': there is no such plot; there are {', '.join(known)}")
    place = folder or first / "plots"
    tables.check_place(next(each for each in (place, *place.parents) if each.exists()) / "plot")
    several = [tables.load(each) for each in results]
    drawn = 0
    for kind in [known[name] for name in kinds] or plots.KINDS:
        path = place / f"{kind.name}.{suffix}"
        try:
            plots.draw(several, kind, path)
        except plots.NotHere as why:
            if kinds:
                raise SimError(f"could not plot {kind.name}: {why}; see `torpor sim plot --help`") from why
            continue
        drawn += 1
        click.echo(path)
    if not drawn:
        raise SimError("could not plot: none of the plots fits these results; see `torpor sim plot --help`")


@click.command("report")
@click.argument("results", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "-o",
    "--out",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page.  [default: report.html in RESULTS]",
)
def report_command(results: Path, path: Path | None) -> None:
    """Write one page of HTML that needs nothing else.

    Question, who wins and by how much, tables with intervals, plots, what matters most, seeds, limits, and
    the study with every default.
    """
    needs_extra("write a report")
    from sim.results import report, tables

    target = path or results / "report.html"
    tables.check_place(target)
    page = report.page(tables.load(results))
    tables.write_atomically(target, page.encode())
    click.echo(target)


@click.command("recommend")
@_STUDY
@_TRACES
@click.option(
    "-o",
    "--out",
    "path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The policy.json.",
)
def recommend_command(study: Path, traces: Path | None, path: Path) -> None:
    """Run a study, and write its best policy as a policy.json for a node.

    It holds the policy and its options, the interval, levels and triggers that come of them, how far the
    cluster may differ before the choice is wrong by a hundredth, and the hashes of what it was made from.
    """
    needs_extra("recommend a policy")
    from sim.results import judge, recommend
    from sim.results.sweep import run
    from sim.results.tables import check_place, write_atomically

    check_place(path)
    loaded = _load(study, traces)
    recommend.check(loaded)
    with _Progress() as told:
        found = run(loaded, progress=told)
    document = recommend.recommend(loaded, found)
    write_atomically(path, (json.dumps(document, indent=2) + "\n").encode())
    click.echo(document["verdict"])
    if remark := judge.remark(found):
        click.echo(remark)
    click.echo(path)


@click.command("calibrate")
@click.argument("timings", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--out",
    "path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The measured.json.",
)
@_JSON
def calibrate_command(timings: tuple[Path, ...], path: Path, as_json: bool) -> None:
    """Make a measured.json of what checkpoints and restores really took.

    TIMINGS: timings.json files of images, or folders to look for them in: a store (/var/lib/torpor) has a
    history of the last 1,000. A study reads the result with `costs: {file: measured.json}`.
    """
    needs_extra("calibrate")
    from sim.results import calibrate
    from sim.results.tables import check_place

    check_place(path)
    found = calibrate.calibrate(timings)
    calibrate.save(found, path)
    if as_json:
        click.echo(json.dumps({"schema": 1, "shares": calibrate.SHARES, **asdict(found)}))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("PHASE", "N", "MEAN S", "5 %", "MEDIAN", "95 %", "BASE S", "MIB/S", "FORETOLD WITHIN"):
        table.add_column(heading, justify="left" if heading == "PHASE" else "right", no_wrap=True)
    for name, phase in found.phases.items():
        at = dict(zip(calibrate.SHARES, phase.times_s, strict=True))
        speed = f"{phase.fit.bytes_per_s / 2**20:.4g}" if phase.fit.bytes_per_s else ""
        error = phase.error
        off = "" if error is None else f"{100 * error:.0f} %" if error <= 1 else "over 100 %"
        figures = (phase.mean_s, at[0.05], at[0.5], at[0.95], phase.fit.base_s)
        table.add_row(name, str(phase.n), *(f"{value:.4g}" for value in figures), speed, off)
    screen = console()
    screen.print(table)
    screen.print(
        f"{found.checkpoints} checkpoints, {found.restores} restores of {', '.join(found.engines)}; {path}",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    if len(found.engines) > 1:
        click.echo(
            f"warning: times of {' and '.join(found.engines)} are mixed, and a study would draw from all of "
            "them; give the timings of one engine",
            err=True,
        )


@click.command("policies")
@_JSON
def policies_command(as_json: bool) -> None:
    """List the policies that a study can name, with their options; those of other packages, too."""
    from sim.policies import registry

    found: list[registry.Description | tuple[str, str]] = []
    for name in registry.names():
        try:
            found.append(registry.describe(name))
        except SimError as error:
            # Somebody's package that is broken takes nothing away from the others.
            found.append((name, str(error)))
    if as_json:
        every = [
            {"name": one[0], "broken": one[1]} if isinstance(one, tuple) else asdict(one) for one in found
        ]
        click.echo(json.dumps({"schema": 1, "policies": every}, indent=2, default=str))
        return

    table = Table(box=None, pad_edge=False)
    for heading in ("POLICY", "FOR", "OPTIONS", "WHAT IT DOES"):
        table.add_column(heading, no_wrap=True)
    for one in found:
        if isinstance(one, tuple):
            table.add_row(one[0], "", "", f"broken: {one[1]}", style="red")
            continue
        options = [each.name + ("" if each.required else "?") for each in one.parameters]
        table.add_row(one.name, " ".join(one.work) or "any", " ".join(options), one.summary)
    console().print(table)


@click.command("examples")
@click.argument("name", required=False)
@click.option("-o", "--out", "folder", type=_OUT, help="Copy it there.")
def examples_command(name: str | None, folder: Path | None) -> None:
    """List the studies that come with torpor, print one, or copy it."""
    found = {
        Path(entry.name).stem: entry.read_text(encoding="utf-8")
        for entry in sorted(resources.files("sim").joinpath("examples").iterdir(), key=lambda e: e.name)
        if entry.name.endswith(".yaml")
    }
    if name is None:
        for each, text in found.items():
            click.echo(f"{each:24} {text.splitlines()[0].lstrip('# ')}")
        return
    if name not in found:
        raise SimError(f"could not find example '{name}'; there are {', '.join(found)}")
    if folder is None:
        click.echo(found[name], nl=False)
        return
    target = folder / f"{name}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if target.exists():
            raise SimError(
                f"could not copy example '{name}': '{target}' is there already; give another folder"
            )
        target.write_text(found[name], encoding="utf-8")
    except OSError as error:
        raise SimError(
            f"could not write '{target}': {error.strerror or error}; give another folder"
        ) from error
    click.echo(target)
