"""`torpor ps`: the containers on this node that torpor restored."""

from __future__ import annotations

import json

import click
from rich.text import Text

from shim import bundle, state
from shim.cli import tables
from shim.cli.node import Node, name_only, short_time, this_node
from shim.errors import ShimError


def _rows(node: Node) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for path in sorted((node.config.state_path / "containers").glob(f"*/*/{state.STATE}")):
        try:
            found = state.load(path.parent)
        except ShimError as error:
            rows.append({"id": path.parent.name, "phase": "damaged", "cause": str(error)})
            continue
        if found is None:
            continue
        try:
            runtime_path = node.of_engine(found.engine).config.runtime_path
            runtime = bundle.runtime_state(runtime_path, found.root, found.container_id)
            status, pid = runtime.status, runtime.pid
        except ShimError:
            status, pid = "gone", 0
        rows.append(
            {
                "id": found.container_id,
                "phase": found.phase,
                "status": status,
                "pid": pid,
                "image": found.image,
                "use": found.use,
                "engine": found.engine,
                "created": found.created,
                "root": found.root,
            }
        )
    return rows


@click.command("ps")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def command(as_json: bool) -> None:
    """List the containers that were restored from a checkpoint image.

    PHASE is torpor's view (restoring, held until start, running), STATUS the runtime's.
    """
    rows = _rows(this_node())
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("no restored containers on this node")
        return
    table = tables.table("ID", "PHASE", "STATUS", "PID", "IMAGE", "USE", "ENGINE", "CREATED")
    for row in rows:
        keys = ("id", "phase", "status", "pid", "image", "use", "engine", "created")
        cells = {**row, "image": name_only(row.get("image")), "created": short_time(row.get("created"))}
        table.add_row(*(Text(str(cells.get(key, ""))) for key in keys))
    tables.console().print(table)
