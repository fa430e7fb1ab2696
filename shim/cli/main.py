"""The `torpor` command: a group of commands, each imported only when it is used."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import click

from engines.api import EngineError
from shim.errors import ShimError
from shim.signals import Ended, end_once

COMMANDS: dict[str, tuple[str, str]] = {
    "agent": ("cluster.cli.agent", "Take containers that other nodes send."),
    "audit": ("shim.cli.audit", "Show what was checkpointed, restored and refused."),
    "checkpoint": ("shim.cli.checkpoint", "Put a running container to sleep."),
    "compat": ("shim.cli.compat", "Say whether an image restores on a node, and why not."),
    "conformance": ("shim.cli.conformance", "Say what survives a checkpoint with an engine."),
    "demo": ("shim.cli.demo", "Show a container falling asleep and waking up."),
    "doctor": ("shim.cli.doctor", "Say whether this node can do all that, and what it lacks."),
    "gpu": ("shim.cli.gpu", "Take a running container off its GPUs, and put it back."),
    "images": ("shim.cli.images", "List, inspect, verify, import and remove images."),
    "install": ("shim.cli.install", "Set torpor up for containerd, CRI-O or Podman."),
    "migrate": ("cluster.cli.migrate", "Move a running container to another node."),
    "net": ("shim.cli.net", "Look at pods' addresses, keep them, and clean up after killed calls."),
    "ps": ("shim.cli.ps", "List the containers that torpor knows."),
    "restore": ("shim.cli.restore", "Wake a container up from an image."),
    "sim": ("sim.cli.main", "Simulate clusters: what a fault-tolerance policy is worth there."),
    "toolchain": ("shim.cli.toolchain", "Install CRIU, runc and the other tools."),
}
"""Command name to its module, whose `command` it is, and a summary, so that help imports none of them.

A command whose module is not there is not listed.
"""


class LazyGroup(click.Group):
    """A group that imports a command when it is asked for, so that one command does not pay for another."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands whose module exists, sorted."""
        return [name for name, (module, _) in sorted(COMMANDS.items()) if _exists(module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, None if there is no such command."""
        module, _ = COMMANDS.get(cmd_name, ("", ""))
        if not module or not _exists(module):
            return None
        command = importlib.import_module(module).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}.command is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error of ours becomes one sentence on stderr and exit status 1."""
        end_once()
        try:
            return super().invoke(ctx)
        except Ended as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(128 + error.number)
        except PermissionError as error:
            if os.geteuid() == 0:
                raise click.ClickException(f"could not use {error.filename}: {error.strerror}") from error
            raise click.ClickException(
                f"could not use {error.filename}: containers and images are root's; run this as root"
            ) from error
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(
                f"could not run `torpor {ctx.invoked_subcommand}`: {where}{error.strerror}"
            ) from error
        except (EngineError, ShimError) as error:
            log_path = getattr(error, "log_path", None)
            message = str(error)
            if log_path is not None and str(log_path) not in message:
                message = f"{message} (log: {log_path})"
            raise click.ClickException(message) from error


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="torpor")
def main() -> None:
    """Put running containers to sleep and wake them up elsewhere."""


if __name__ == "__main__":
    main()
