"""`torpor agent`: what other nodes talk to."""

from __future__ import annotations

from pathlib import Path

import click

from cluster import agent, config
from cluster.here import Here
from shim.cli.node import this_node


@click.command("agent")
@click.option(
    "--config",
    "config_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="agent.toml; by default what TORPOR_AGENT names, else /etc/torpor/agent.toml.",
)
@click.option(
    "--stdio", is_flag=True, help="Serve one peer on standard input and output, which reach it by SSH."
)
def command(config_path: Path | None, stdio: bool) -> None:
    """Take containers that other nodes send (`torpor migrate`), and settle migrations that were cut short.

    \b
      node = "node-a"
      listen = "10.0.0.1:7077"
      leases = "/etc/cni/net.d/10-podnet.conflist"
      via = ["10.0.0.1"]          # only where each node has a pod network of its own
      [tls]
      certificate = "/etc/torpor/node-a.pem"
      key = "/etc/torpor/node-a.key"
      authority = "/etc/torpor/ca.pem"
      [peers.node-b]
      address = "10.0.0.2:7077"
      may_push = true             # whoever may is root here
      [peers.node-c]
      command = ["ssh", "root@node-c", "torpor", "agent", "--stdio"]
    """
    here = Here(config=config.load(config.find(config_path)), node=this_node())
    if stdio:
        agent.stdio(here)
    else:
        agent.run(here)
