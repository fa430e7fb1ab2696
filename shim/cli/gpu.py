"""`torpor gpu`: take a running container off its GPUs, and put it back on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import click

from engines import registry
from engines.api import GpuEngine, GpuProcess
from shim import log, state
from shim.cli import tables
from shim.cli.node import Node, this_node
from shim.config import LONGEST_S, engine_settings
from shim.errors import ShimError, UsageError

ENGINE = "criu-cuda"
_WAIT_S = 5.0


class _Place:
    """A container with an engine that moves GPU memory."""

    def __init__(self, container: str, root: str | None, engine_name: str) -> None:
        whole = this_node().find_container(container, root)
        self.node: Node = whole.node
        self.container_id = whole.state.container_id
        self.directory = self.node.directory(whole.root, self.container_id)
        settings = engine_settings(self.node.config, self.node.tools, whole.root, self.directory)
        engine = registry.create(engine_name, settings)
        if not isinstance(engine, GpuEngine):
            raise ShimError(
                f"could not look at the GPUs of container '{self.container_id}': engine {engine_name} knows "
                f"none; use {ENGINE}"
            )
        self.engine = engine

    def tell(self, event: str, verdict: str) -> None:
        """Write to the audit log."""
        log.audit(self.node.config.store_path, event, container=self.container_id, verdict=verdict)


def _options(function: Callable[..., None]) -> Callable[..., None]:
    """The options that all these commands have."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON for machines."),
        click.option("--engine", default=ENGINE, show_default=True, help="Engine that moves the memory."),
        click.option("--root", help="State directory of the caller's runtime; looked for if not given."),
        click.argument("container"),
    ):
        function = option(function)
    return function


def _timeout(verb: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The option for the deadline, by default that of a verb."""

    def seconds(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
        if value is not None and not 0 < value <= LONGEST_S:
            raise click.BadParameter(f"it must be above 0 and at most {LONGEST_S:.0f} seconds")
        return value

    words = f"Seconds; by default those of a {verb}."
    return click.option("--timeout", "timeout_s", type=float, callback=seconds, help=words)


def _show(processes: Iterable[GpuProcess], *, as_json: bool) -> None:
    rows = tuple(processes)
    if as_json:
        documents = [
            {"pid": row.pid, "command": row.comm, "state": row.state, "gpus": dict(row.gpus)} for row in rows
        ]
        click.echo(json.dumps(documents, indent=2))
        return
    if not rows:
        click.echo("none of its processes uses a GPU")
        return
    table = tables.table("PID", "COMMAND", "STATE", "GPU", "MIB")
    for row in rows:
        for uuid, size in sorted(row.gpus.items()) or [("-", 0)]:
            table.add_row(str(row.pid), row.comm, row.state, uuid, str(size >> 20))
    tables.console().print(table)


@click.group("gpu")
def command() -> None:
    """Take a running container off its GPUs, so that another can have them, and put it back.

    The container runs on; its calls of the GPU wait until it is resumed.
    """


@command.command("ps")
@_options
def ps(container: str, root: str | None, engine: str, as_json: bool) -> None:
    """List the processes of CONTAINER that use a GPU, and what they hold on it."""
    place = _Place(container, root, engine)
    _show(place.engine.gpu_processes(place.container_id), as_json=as_json)


@command.command("suspend")
@_timeout("checkpoint")
@_options
def suspend(container: str, root: str | None, engine: str, as_json: bool, timeout_s: float | None) -> None:
    """Move the GPU memory of CONTAINER into host memory."""
    place = _Place(container, root, engine)
    wait_s = timeout_s or place.node.config.checkpoint_timeout_s
    with state.locked(place.directory, wait_s=_WAIT_S, create=True):
        state.note_engine(place.directory, engine)
        moved = place.engine.suspend(place.container_id, timeout_s=wait_s)
    place.tell("gpu suspend", "suspended")
    _show(moved, as_json=as_json)


@command.command("resume")
@click.option(
    "--gpu",
    "wanted",
    multiple=True,
    metavar="OLD=NEW",
    help="Put what was on the GPU with UUID OLD onto the one with UUID NEW; who is there swaps with it.",
)
@_timeout("restore")
@_options
def resume(
    container: str,
    root: str | None,
    engine: str,
    as_json: bool,
    wanted: tuple[str, ...],
    timeout_s: float | None,
) -> None:
    """Move the GPU memory of CONTAINER back onto its GPUs."""
    pairs: dict[str, str] = {}
    for text in wanted:
        old, sign, new = text.partition("=")
        if not (old and sign and new) or old in pairs:
            raise UsageError(f"--gpu {text} is not OLD=NEW, or names OLD twice; see `torpor gpu ps`")
        pairs[old] = new
    place = _Place(container, root, engine)
    wait_s = timeout_s or place.node.config.restore_timeout_s
    with state.locked(place.directory, wait_s=_WAIT_S, create=True):
        state.note_engine(place.directory, engine)
        moved = place.engine.resume(place.container_id, timeout_s=wait_s, pairs=pairs)
    place.tell("gpu resume", "running")
    _show(moved, as_json=as_json)
