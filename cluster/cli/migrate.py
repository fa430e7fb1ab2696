"""`torpor migrate`: move a running container to another node, with its address and connections."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import click
from rich.console import Console
from rich.table import Table

from cluster import config
from cluster.arrival import ended_with_its_node, what_is_left
from cluster.away import Absent
from cluster.departure import Report, migrate
from cluster.here import Here
from cluster.records import STANDING, VERDICT, Arrival, Departure, Record, all_of
from cluster.settle import resolve, told
from netmig.errors import NetworkError
from shim.cli.node import this_node
from shim.errors import ShimError, UsageError

T = TypeVar("T", Departure, Arrival, Absent)

_ONE_LINE = 10_000  # columns
_PHASES = ("prepare", "pre-dump", "dump", "transfer", "restore", "switch", "plug", "release")


@click.command("migrate")
@click.argument("container", required=False)
@click.option("--to", "peer", help="The node to move it to, by its name in agent.toml.")
@click.option(
    "--as",
    "name",
    default="",
    help="For a container in a pod of containerd: the image that the pod names which is made on the other "
    "node, with the annotations torpor.dev/restore-from and torpor.dev/network: keep.",
)
@click.option("--root", help="State directory of the container's runtime; looked for if not given.")
@click.option("--dry-run", is_flag=True, help="Only ask whether it would do; nothing is touched.")
@click.option(
    "--resolve",
    type=click.Choice(["source", "target"]),
    help="Decide where the container of a migration runs that is in doubt; in place of CONTAINER stands its "
    "name. Say the same on both nodes, or only on one: the other follows when the link is back.",
)
@click.option("--list", "listing", is_flag=True, help="List the migrations that this node knows.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="agent.toml; by default what TORPOR_AGENT names, else /etc/torpor/agent.toml.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def command(
    container: str | None,
    peer: str | None,
    name: str,
    root: str | None,
    dry_run: bool,
    resolve: str | None,
    listing: bool,
    config_path: Path | None,
    as_json: bool,
) -> None:
    """Move the running CONTAINER to another node, where `torpor agent` listens.

    It keeps its address and its connections, and runs on one node only at any time. If anything fails before
    it is decided, it runs on here.

    \b
      torpor migrate web --to node-b
      torpor migrate --resolve target 5f0c7d1e9a3b2468
    """
    _check(container, peer, name, root, dry_run=dry_run, resolve=resolve, listing=listing, as_json=as_json)
    here = Here(config=config.load(config.find(config_path)), node=this_node())
    if listing:
        try:
            _list(here, as_json=as_json)
        except OSError as error:
            raise ShimError(f"could not list migrations: {told(error)}") from error
        return
    if not container:
        raise UsageError("could not migrate nothing: name a container, or with --resolve a migration")
    if resolve:
        click.echo(_resolve(here, container, "source" if resolve == "source" else "target"))
        return
    if not peer:
        raise UsageError(f"could not migrate container '{container}': name the node with --to")
    found = here.node.find_container(container, root)
    with Console(stderr=True).status(f"migrating {found.state.container_id}") as status:
        tell: Callable[[str], None] = status.update
        if not status.console.is_terminal:
            tell = _say
        try:
            report = migrate(here, found, peer, name=name, trial=dry_run, tell=tell)
        except NetworkError as error:
            raise ShimError(str(error)) from error
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
    else:
        _show(report)


def _check(
    container: str | None,
    peer: str | None,
    name: str,
    root: str | None,
    *,
    dry_run: bool,
    resolve: str | None,
    listing: bool,
    as_json: bool,
) -> None:
    """Raises UsageError for what means nothing beside --list or --resolve, rather than pass it by."""
    given = {
        "CONTAINER": container and not resolve,
        "--to": peer,
        "--as": name,
        "--root": root,
        "--dry-run": dry_run,
        "--resolve": resolve and listing,
        "--json": as_json and not listing,
    }
    what = "--list" if listing else "--resolve" if resolve else ""
    if what and (wrong := next((option for option, is_given in given.items() if is_given), "")):
        raise UsageError(f"could not migrate: {wrong} means nothing with {what}; leave one of them out")


def _say(words: str) -> None:
    click.echo(words, err=True)


def _resolve(here: Here, migration: str, wish: str) -> str:
    try:
        return resolve(here, migration, "source" if wish == "source" else "target")
    except (NetworkError, OSError) as error:
        raise ShimError(told(error)) from error


def _show(report: Report) -> None:
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    if report.trial:
        click.echo(f"node '{report.target}' would take container '{report.container_id}'")
        return
    phases = ", ".join(f"{name} {report.phases_ms[name]:.0f}" for name in _PHASES if name in report.phases_ms)
    before = (
        f", {report.frozen_bytes / 2**20:.1f} of them meanwhile" if "pre-dump" in report.phases_ms else ""
    )
    click.echo(
        f"container '{report.container_id}' runs on node '{report.target}'; it stood still for "
        f"{report.downtime_ms:.0f} ms, {report.image_bytes / 2**20:.1f} MiB moved{before}\nms: {phases}"
    )


def _list(here: Here, *, as_json: bool) -> None:
    rows: list[dict[str, str]] = []
    for record in filter(Record.exists, all_of(here.config.departures)):
        if (plan := _plan(record, Departure, rows)) is None:
            continue
        state = {"hold": "in doubt", "commit": "leaving", "": "preparing"}.get(
            record.read(VERDICT), "staying"
        )
        rows.append(_row(record.migration, plan.container_id, f"to {plan.peer}", state))
    for record in filter(Record.exists, all_of(here.config.arrivals)):
        if (plan := _plan(record, Arrival, rows)) is None:
            continue
        standing = record.read(STANDING)
        state = {"prepared": "in doubt", "settled": "here"}.get(standing, standing)
        if standing in ("running", "settled") and ended_with_its_node(record, plan):
            click.echo(f"warning: {what_is_left(record, plan)}", err=True)
            state = "ended"
        rows.append(_row(record.migration, plan.container_id, f"from {plan.peer}", state))
    known = {row["migration"] for row in rows}
    for record in filter(Record.exists, all_of(here.config.away)):
        if record.migration not in known and (plan := _plan(record, Absent, rows)) is not None:
            container_id = plan.container_id or plan.owner
            rows.append(_row(record.migration, container_id, f"to {plan.peer}", "away"))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None)
    for title in ("MIGRATION", "CONTAINER", "WAY", "STATE"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    # A program reads lines: one for each, whatever its length.
    Console(width=None if sys.stdout.isatty() else _ONE_LINE).print(table)


def _plan(record: Record, kind: type[T], rows: list[dict[str, str]]) -> T | None:
    """What a migration is about; None, with a row that says so, if its record is damaged."""
    try:
        return record.plan(kind)
    except ShimError as error:
        click.echo(f"warning: {error}", err=True)
        rows.append(_row(record.migration, "", "", "damaged"))
        return None


def _row(migration: str, container_id: str, way: str, state: str) -> dict[str, str]:
    return {"migration": migration, "container": container_id, "way": way, "state": state}
