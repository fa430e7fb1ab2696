"""`torpor audit`: who checkpointed, restored or was refused what."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.text import Text

from shim.cli import tables
from shim.cli.node import name_only, short_time, this_node


@click.command("audit")
@click.option(
    "-n", "count", type=click.IntRange(1), default=20, show_default=True, help="How many, newest last."
)
@click.option("--json", "as_json", is_flag=True, help="Print the lines as they are, one JSON object each.")
def command(count: int, as_json: bool) -> None:
    """Show the newest entries of this node's audit log."""
    path = this_node().config.store_path / "audit.log"
    try:
        lines = path.read_text("utf-8", "replace").splitlines()[-count:]
    except FileNotFoundError:
        lines = []
    if as_json:
        click.echo("\n".join(lines))
        return
    table = tables.table("TIME", "EVENT", "CONTAINER", "IMAGE", "BY", "VERDICT")
    for line in lines:
        table.add_row(*map(Text, _cells(line)))
    tables.console().print(table)


def _cells(line: str) -> list[str]:
    """What a line says, as plain text: names in it are chosen by containers."""
    try:
        entry: Any = json.loads(line)
        who: dict[str, Any] = entry.get("who") or {}
        cells = [
            short_time(entry.get("time")),
            entry.get("event", ""),
            entry.get("container", ""),
            name_only(entry.get("image")),
            f"{who.get('program', '')}[{who.get('pid', '')}]",
            entry.get("verdict", ""),
        ]
    except (ValueError, AttributeError):
        return ["", "damaged", "", "", "", line[:200]]
    return ["".join(sign for sign in str(cell) if sign.isprintable()) for cell in cells]
