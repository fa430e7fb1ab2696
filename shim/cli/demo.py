"""`torpor demo`: the main job, step by step."""

from __future__ import annotations

import os

import click

from shim.cli.node import this_node
from shim.errors import ShimError


@click.command("demo")
def command() -> None:
    """Show the main job on this machine: a container sleeps under containerd and wakes up in a new one.

    It starts a containerd of its own in a temporary directory, needs root, touches nothing else, and removes
    everything at the end.
    """
    from shim.demo import show

    if os.geteuid() != 0:
        raise ShimError("could not run the demo: containers need root; run it as root")
    show.run(this_node().tools, click.echo)
