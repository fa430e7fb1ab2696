"""`torpor sim`: what a policy is worth on a cluster."""

from __future__ import annotations

from typing import Any

import click

from sim.cli import checks, studies
from sim.errors import SimError


class SimGroup(click.Group):
    """A group whose errors are one sentence on stderr and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SimError as error:
            raise click.ClickException(str(error)) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which people need them."""
        return list(self.commands)


@click.group(cls=SimGroup)
def command() -> None:
    """Say what a fault-tolerance policy is worth on a cluster, before anybody runs it there.

    A study is a YAML file: a cluster, how it fails, what checkpoints cost, the work, and policies to compare.
    Lists in it are swept. Start with one of the examples:

    \b
      torpor sim examples                     what there is
      torpor sim examples llama3 -o .         copy one
      torpor sim run llama3.yaml              run it, print who wins
      torpor sim sweep llama3.yaml --out r    on all cores, into a folder, to go on from if it is stopped
      torpor sim plot r; torpor sim report r  pictures, and one page for others
    """


for each in (
    studies.examples_command,
    studies.policies_command,
    studies.run_command,
    studies.sweep_command,
    studies.plot_command,
    studies.report_command,
    studies.recommend_command,
    studies.calibrate_command,
    checks.validate_command,
    checks.trace,
):
    command.add_command(each)
