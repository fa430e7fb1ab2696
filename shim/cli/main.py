"""The `torpor` command: a group of commands, each imported only when it is used."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import click

from engines.api import EngineError
from shim.errors import ShimError

COMMANDS: dict[str, str] = {
    "audit": "shim.cli.audit:command",
    "checkpoint": "shim.cli.checkpoint:command",
    "demo": "shim.cli.demo:command",
    "doctor": "shim.cli.doctor:command",
    "images": "shim.cli.images:command",
    "install": "shim.cli.install:command",
    "ps": "shim.cli.ps:command",
    "restore": "shim.cli.restore:command",
    "toolchain": "shim.cli.toolchain:command",
}
"""Command name to "module:attribute"; a command whose module is not there is not listed."""


class LazyGroup(click.Group):
    """A group that imports a command when it is asked for, so that one command does not pay for another."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands whose module exists, sorted."""
        return [name for name, target in sorted(COMMANDS.items()) if _exists(target)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, None if there is no such command."""
        target = COMMANDS.get(cmd_name)
        if target is None or not _exists(target):
            return None
        module, _, attribute = target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{target} is not a click command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error of ours becomes one sentence on stderr and exit status 1."""
        try:
            return super().invoke(ctx)
        except (EngineError, ShimError) as error:
            log_path = getattr(error, "log_path", None)
            message = str(error)
            if log_path is not None and str(log_path) not in message:
                message = f"{message} (log: {log_path})"
            raise click.ClickException(message) from error


def _exists(target: str) -> bool:
    return importlib.util.find_spec(target.partition(":")[0]) is not None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="torpor")
def main() -> None:
    """Put running containers to sleep and wake them up elsewhere."""


if __name__ == "__main__":
    main()
