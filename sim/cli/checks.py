"""`torpor sim validate` and `torpor sim trace`: the simulator held against what is known, and traces."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from sim.cli.common import console, needs_extra
from sim.traces.inspect import inspect

if TYPE_CHECKING:
    from sim.validation.validate import Checked, Verdict


@click.command("validate")
@click.option(
    "--traces",
    "folder",
    envvar="TORPOR_TRACES",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of public traces; TORPOR_TRACES if not given.",
)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def validate_command(folder: Path | None, as_json: bool) -> None:
    """Hold the simulator against theory, papers and traces, line by line.

    Exit status: 0 if every line passed, 1 if one failed, 3 if none failed but some could not be checked.
    """
    needs_extra("validate the simulator")
    from sim.validation.validate import check, status

    screen = console()
    with screen.status("checking") if screen.is_terminal and not as_json else contextlib.nullcontext():
        checked = list(check(folder))
    verdicts: Counter[Verdict] = Counter(line.verdict for line in checked)
    if as_json:
        click.echo(json.dumps({"schema": 1, "lines": [asdict(line) for line in checked]}, indent=2))
        raise SystemExit(status(verdicts))
    screen.print(_table(checked))
    for why, count in Counter(line.why for line in checked if line.why).items():
        screen.print(f"not checked, {count} lines: {why}", soft_wrap=True, highlight=False)
    parts = [f"{verdicts['pass']} passed", f"{verdicts['fail']} failed"]
    parts += [f"{verdicts['no trace']} no trace"] if verdicts["no trace"] else []
    screen.print(f"{len(checked)} lines: {', '.join(parts)}", soft_wrap=True, highlight=False)
    raise SystemExit(status(verdicts))


def _table(checked: list[Checked]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("LINE", "EXPECTED", "SEEN", "ERROR", "UNIT", "TOLERANCE", "VERDICT"):
        justify = "right" if column in ("EXPECTED", "SEEN", "ERROR") else "left"
        table.add_column(column, justify=justify, no_wrap=True)
    table.add_column("WHAT", no_wrap=True)
    for line in checked:
        row = line.row
        table.add_row(
            row.row,
            f"{row.expected:.7g}",
            "" if line.seen is None else f"{line.seen:.7g}",
            "" if line.error is None else f"{line.error:.1g}",
            row.unit,
            row.tolerance,
            f"[red]{line.verdict}[/red]" if line.verdict == "fail" else line.verdict,
            row.topic,
        )
    return table


@click.group("trace")
def trace() -> None:
    """Look into public traces."""


@trace.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--one-is",
    type=click.Choice(["available", "preempted"]),
    default="available",
    help="What 1 stands for in a file of 0 and 1 that does not say it.",
)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def inspect_command(file: Path, one_is: Any, as_json: bool) -> None:
    """Counts, rates, fits, gaps and polarity of a trace file; its kind is found from its content."""
    found = inspect(file, one_is)
    if as_json:
        click.echo(json.dumps({"schema": 1, "figures": dict(found)}, indent=2))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for label, value in found:
        table.add_row(label, value)
    console().print(table)
