"""`torpor doctor`: can this node put containers to sleep and wake them up, and if not, why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
import msgspec

from engines import registry
from engines.api import EngineSettings, Finding
from shim.toolchain import node, smoke
from shim.toolchain.find import Tools, default_prefix, find_tools
from shim.toolchain.install import read_record
from shim.toolchain.units import UNITS, Unit, ask_version

CALLERS = ("containerd", "podman")
"""One of these must work, or nobody would call torpor."""

NVIDIA = Path("/proc/driver/nvidia")
"""Is there where the kernel has NVIDIA's driver."""

_MARKS = {
    "ok": ("ok", "green"),
    "warn": ("warn", "yellow"),
    "unknown": ("?", "yellow"),
    "refuse": ("no", "red"),
}


@click.command()
@click.option(
    "--prefix",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="The toolchain's folder.  [default: as for `torpor toolchain`]",
)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.pass_context
def command(ctx: click.Context, prefix: Path | None, as_json: bool) -> None:
    """Look at the node and try every tool.

    The exit status is 0 only if a container can sleep and wake here.
    """
    tools = find_tools(prefix or default_prefix())
    rows = [
        _tool_row(unit, tools, finding) for unit, finding in zip(UNITS, smoke.run(tools, UNITS), strict=True)
    ]
    findings = (*node.check(), *_engine(tools))
    reasons = obstacles(rows, findings)
    if as_json:
        document = {
            "schema": 1,
            "ready": not reasons,
            "obstacles": reasons,
            "prefix": str(tools.prefix),
            "tools": rows,
            "node": [msgspec.to_builtins(finding) for finding in findings],
        }
        click.echo(msgspec.json.format(msgspec.json.encode(document)))
    else:
        _print(rows, findings, reasons)
    if reasons:
        ctx.exit(1)


def obstacles(rows: list[dict[str, str]], findings: tuple[Finding, ...]) -> list[str]:
    """Why the main job cannot run here; empty if it can."""
    good = {row["unit"] for row in rows if row["severity"] == "ok"}
    reasons = [finding.message for finding in findings if finding.severity == "refuse"]
    reasons += [row["message"] for row in rows if row["unit"] in smoke.REQUIRED and row["unit"] not in good]
    if not good.intersection(CALLERS):
        reasons.append("neither containerd nor Podman works here")
    return reasons


def _engine(tools: Tools) -> tuple[Finding, ...]:
    """What the CRIU engine says of this node: it judges calls by the same rules. So for GPUs."""
    nowhere = Path("/nonexistent")
    settings = EngineSettings(
        runtime_path=tools.runc or nowhere,
        root_path=nowhere,
        state_path=nowhere,
        search_path=tools.search_path,
        python_path=tools.python_path,
    )
    found = registry.create("criu", settings).probe()
    if NVIDIA.exists():
        theirs = registry.create("criu-cuda", settings).probe()
        # A node with GPUs serves containers without them too: what is missing for GPUs is no obstacle.
        found += tuple(
            replace(finding, severity="warn") if finding.severity == "refuse" else finding
            for finding in theirs
            if finding.rule.startswith("gpu.")
        )
    return found


def _tool_row(unit: Unit, tools: Tools, finding: Finding) -> dict[str, str]:
    program = smoke.program_of(unit, tools)
    row = {
        "unit": unit.name,
        "path": str(program) if program else "",
        "origin": "missing",
        "version": "",
        "severity": finding.severity,
        "message": finding.message,
        "remedy": finding.remedy,
    }
    if program is None:
        return row
    row["origin"] = "toolchain" if program.is_relative_to(tools.prefix) else "system"
    record = read_record(tools.prefix)
    if row["origin"] == "toolchain" and record is not None:
        row["version"] = record.versions.get(unit.name, "")
    if unit.program and unit.version_args:
        version, row["version"] = ask_version(unit, program)
        if version is not None and unit.minimum is not None and version < unit.minimum:
            wanted = ".".join(map(str, unit.minimum))
            row["severity"] = "refuse"
            row["message"] = f"{unit.name} {row['version']} is too old, {wanted} is needed: {unit.why}"
            row["remedy"] = "torpor toolchain install"
    return row


def _print(rows: list[dict[str, str]], findings: tuple[Finding, ...], reasons: list[str]) -> None:
    for row in rows:
        what = " ".join(part for part in (row["unit"], row["version"]) if part)
        where = {"toolchain": "toolchain", "system": row["path"]}.get(row["origin"], "missing")
        _line(row["severity"], f"{what} ({where}): {row['message']}", row["remedy"])
    for finding in findings:
        _line(finding.severity, finding.message, finding.remedy)
    if reasons:
        click.secho("torpor cannot work here:", fg="red")
        for reason in reasons:
            click.echo(f"- {reason}")
    else:
        click.secho("torpor can work here", fg="green")


def _line(severity: str, message: str, remedy: str) -> None:
    mark, colour = _MARKS[severity]
    click.echo(click.style(f"{mark:5}", fg=colour) + message + (f"; remedy: {remedy}" if remedy else ""))
