"""`torpor conformance`: what of a container survives a checkpoint with an engine, on this node."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engines.api import EngineUnavailable
from engines.conformance import COURSES, Outcome, Plan, contract_tests, run, verdict
from engines.harness import load_profile
from engines.workloads.catalogue import WORKLOADS, Workload, find
from shim.cli import tables
from shim.conformance import reaper, report
from shim.conformance.dialect import Dialect, of_engine
from shim.conformance.place import RuntimePlace
from shim.errors import UsageError
from shim.toolchain.find import Tools, default_prefix, find_tools
from shim.version import VERSION

_COLOURS: Mapping[str, str] = {
    "pass": "green",
    "refused": "yellow",
    "fail": "bold red",
    "absent": "dim",
    "skipped": "dim",
}


@click.command("conformance")
@click.option("--engine", required=True, metavar="NAME", help="The engine, built in or of a package.")
@click.option("--workload", "names", multiple=True, metavar="NAME", help="Only this one; may be repeated.")
@click.option("--course", "courses", multiple=True, type=click.Choice(list(COURSES)), help="Only this one.")
@click.option(
    "--contract/--no-contract", default=None, help="The engine contract as well.  [default: all runs]"
)
@click.option("--heavy/--no-heavy", default=True, help="1 GiB of memory, PostgreSQL, Java and the like.")
@click.option(
    "--profile",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A JSON file that says what this host skips, and why.",
)
@click.option(
    "--report", "folder", type=click.Path(path_type=Path, file_okay=False), help="Write a report there."
)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--list", "only_list", is_flag=True, help="List the workloads and end.")
@click.pass_context
def command(
    ctx: click.Context,
    engine: str,
    names: tuple[str, ...],
    courses: tuple[str, ...],
    contract: bool | None,
    heavy: bool,
    profile: Path | None,
    folder: Path | None,
    as_json: bool,
    only_list: bool,
) -> None:
    """Run the engine contract and every workload with an engine.

    A workload passes, or is refused beforehand with a reason; anything else is a failure, and the exit status
    is 1. What this node cannot supply is absent.
    """
    chosen = _choose(names, heavy=heavy)
    if only_list:
        for workload in chosen:
            click.echo(f"{workload.name:18} {workload.summary}")
        return
    if os.geteuid() != 0:
        raise UsageError("could not run containers: this is not root; run it as root")
    tools = find_tools(default_prefix())
    dialect = of_engine(engine, tools)
    _check_node(engine, dialect, tools)
    plan = Plan(
        workloads=chosen,
        courses=courses or tuple(COURSES),
        contract=not names if contract is None else contract,
        skip=_profile(profile) if profile else {},
    )
    if folder:
        _check_folder(folder)
    reaper.go_on_below()
    started = time.monotonic()
    outcomes: list[Outcome] = []
    with Progress(
        TextColumn("{task.description:32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=as_json,
    ) as progress:
        bar = progress.add_task(engine, total=plan.size())
        for outcome in run(lambda: RuntimePlace(engine, dialect, tools, cache_path()), plan):
            outcomes.append(outcome)
            progress.update(bar, advance=1, description=f"{outcome.subject} {outcome.course}"[:32])
            if outcome.result == "fail" and not as_json:
                progress.console.print(f"[bold red]fail[/] {outcome.subject} {outcome.course}: ", end="")
                progress.console.print(outcome.reason, markup=False, highlight=False)
    content = report.document(
        engine, {"torpor": VERSION, **dialect.versions(tools)}, outcomes, time.monotonic() - started
    )
    if as_json:
        click.echo(json.dumps(content, indent=1))
    else:
        _print(outcomes)
    if folder:
        written = report.write(folder, content, outcomes)
        click.echo(f"report: {written[1]}", err=as_json)
    if any(outcome.result == "fail" for outcome in outcomes):
        ctx.exit(1)
    if not any(outcome.result in {"pass", "refused"} for outcome in outcomes):
        click.echo("nothing was tried: all of it is absent here, or skipped", err=True)
        ctx.exit(2)


def _profile(path: Path) -> dict[str, str]:
    """What a profile skips. Raises InvalidRequest, UsageError for a name that there is not."""
    skip = load_profile(path)
    names = {workload.name for workload in WORKLOADS}
    known = names | {f"{name}.{course}" for name in names for course in COURSES}
    unknown = sorted(set(skip) - known - {f"contract.{test}" for test in contract_tests()})
    if unknown:
        raise UsageError(f"could not use profile '{path}': there is no '{unknown[0]}' to skip; correct it")
    return skip


def _check_folder(folder: Path) -> None:
    """Raises UsageError if no report can be written there: not only after the whole run."""
    try:
        report.prepare(folder)
    except OSError as error:
        raise UsageError(
            f"could not write a report to {folder}: {error.strerror or error}; name another directory"
        ) from error


def cache_path() -> Path:
    """Where root file systems of services are kept."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file() and (checkout / "run").is_file():
        return checkout / "build" / "conformance"
    return Path("/var/cache/torpor/conformance")


def _check_node(engine: str, dialect: Dialect, tools: Tools) -> None:
    """Raises EngineUnavailable if the engine itself says that it cannot work on this node."""
    with RuntimePlace(engine, dialect, tools, cache_path()) as place:
        for finding in place.engine("probe").probe():
            if finding.severity == "refuse":
                raise EngineUnavailable(
                    f"could not try engine '{engine}': {finding.message}; {finding.remedy}"
                )


def _choose(names: tuple[str, ...], *, heavy: bool) -> list[Workload]:
    if not names:
        return [workload for workload in WORKLOADS if heavy or not workload.heavy]
    found: list[Workload] = []
    for name in names:
        workload = find(name)
        if workload is None:
            known = ", ".join(workload.name for workload in WORKLOADS)
            raise UsageError(f"could not find workload '{name}': there are {known}; choose one of them")
        found.append(workload)
    return found


def _print(outcomes: list[Outcome]) -> None:
    console = tables.console()
    subjects = report.by_subject(outcomes)
    contract = subjects.pop("contract", [])
    if subjects:
        table = Table(box=None, header_style="dim", pad_edge=False)
        for name in ("workload", "result", "reason"):
            table.add_column(name)
        for name, rows in subjects.items():
            result = verdict(rows)
            table.add_row(name, f"[{_COLOURS[result]}]{result}[/]", _plain(report.reason(rows)))
        console.print(table)
    for outcome in contract:
        if outcome.result != "pass":
            colour = _COLOURS[outcome.result]
            console.print(
                f"contract [{colour}]{outcome.result}[/] {outcome.course}: {_plain(outcome.reason)}"
            )
    if contract:
        good = sum(outcome.result == "pass" for outcome in contract)
        console.print(f"contract: {good} of {len(contract_tests())} tests pass")
    words = [f"{sum(verdict(rows) == word for rows in subjects.values())} {word}" for word in _COLOURS]
    if subjects:
        part = report.share(outcomes)
        share = (
            f"{part.percent:g} % of the {part.of} that apply here pass" if part.of else "none applies here"
        )
        console.print(f"workloads: {', '.join(words)}; {share}")


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
