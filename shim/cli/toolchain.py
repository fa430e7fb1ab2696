"""`torpor toolchain`: install the tools that torpor drives, and say where they are."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import msgspec
from rich.table import Table

from shim.cli import tables
from shim.toolchain import apt, lock, smoke
from shim.toolchain.find import default_prefix, find_tools
from shim.toolchain.install import LOCK_NAME, install, read_record
from shim.toolchain.packages import Source
from shim.toolchain.units import UNITS, ask_version

_PREFIX = click.option(
    "--prefix",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Its folder.  [default: $TORPOR_PREFIX, .toolchain in a checkout, else /opt/torpor/toolchain]",
)


@click.group()
def command() -> None:
    """Install CRIU, runc, containerd and the other tools, and say where they are."""


@command.command("install")
@_PREFIX
@click.option("--unlocked", is_flag=True, help="Take the newest packages instead of the locked ones.")
@click.option("--mirror", default=None, help="URI of the Debian archive.  [default: the system's own]")
@click.option(
    "--cache", type=click.Path(path_type=Path, file_okay=False), help="Keep packages here, by hash."
)
@click.option("--private", is_flag=True, help="Use none of the system's tools, however good.")
@click.option("--accept-expired", is_flag=True, help="With --unlocked: accept an index past its date.")
@click.option("--force", is_flag=True, help="Install again although everything is there.")
def install_command(
    prefix: Path | None,
    unlocked: bool,
    mirror: str | None,
    cache: Path | None,
    private: bool,
    accept_expired: bool,
    force: bool,
) -> None:
    """Install the toolchain into a private prefix; the system is left alone.

    Tools of the system that are new enough and pass a smoke test are used as they are. Packages are verified
    by the distribution's keyring and must be the locked ones.
    """
    source = Source(
        mirror=(mirror or apt.system_mirror()).rstrip("/"), cache=cache, accept_expired=accept_expired
    )
    done = install(
        prefix or default_prefix(),
        source,
        None if unlocked else lock.read(),
        use_system=not private,
        force=force,
        say=lambda line: click.echo(line, err=True),
    )
    for finding in done.findings:
        if finding.severity != "ok":
            click.echo(f"{finding.severity}: {finding.message}", err=True)
    if done.changed:
        click.echo(f'the toolchain in {done.prefix} is ready; for a shell: eval "$(torpor toolchain env)"')
        if unlocked:
            click.echo(f"what was taken is locked in {done.prefix / 'current' / LOCK_NAME}")
    else:
        click.echo(f"the toolchain in {done.prefix} is up to date")


@command.command("env")
@_PREFIX
def env_command(prefix: Path | None) -> None:
    """Print the environment for a shell: eval "$(torpor toolchain env)"."""
    tools = find_tools(prefix)
    variables = {"TORPOR_PREFIX": str(tools.prefix)}
    if tools.cni_path is not None:
        variables["CNI_PATH"] = str(tools.cni_path)
    configuration = tools.prefix / "etc" / "containers" / "containers.conf"
    if configuration.is_file():
        variables["CONTAINERS_CONF"] = str(configuration)
    click.echo(f'export PATH={shlex.quote(str(tools.prefix / "bin"))}:"$PATH"')
    for name, value in variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")


@command.command("list")
@_PREFIX
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def list_command(prefix: Path | None, as_json: bool) -> None:
    """List the tools: version, and whose they are."""
    tools = find_tools(prefix)
    record = read_record(tools.prefix)
    rows: list[dict[str, str | None]] = []
    for unit in UNITS:
        program = smoke.program_of(unit, tools)
        own = program is not None and program.is_relative_to(tools.prefix)
        version = record.versions.get(unit.name) if own and record else None
        if version is None and program is not None and unit.program and unit.version_args:
            version = ask_version(unit, program)[1]
        origin = "toolchain" if own else "system" if program else "missing"
        rows.append(
            {
                "unit": unit.name,
                "version": version,
                "origin": origin,
                "path": str(program) if program else None,
            }
        )
    if as_json:
        click.echo(msgspec.json.encode({"schema": 1, "prefix": str(tools.prefix), "tools": rows}))
        return
    table = Table("tool", "version", "whose", "path", box=None)
    for row in rows:
        table.add_row(row["unit"], row["version"] or "-", row["origin"], row["path"] or "-")
    tables.console().print(table)
