"""`torpor compat`: will an image restore there? Asked before anything is touched."""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from compat import profile as profiles
from compat.probes import System
from compat.profile import Profile
from shim.cli.node import this_node
from shim.toolchain.find import Tools, find_tools

TOOLS = ("criu", "runc", "crun", "runsc", "containerd", "podman")


@click.group("compat")
def command() -> None:
    """Say whether an image restores on a node, with reasons, before anything is touched."""


@command.command("profile")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option(
    "-o",
    "output_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the JSON to this file, for `torpor compat check --node` elsewhere.",
)
def profile(as_json: bool, output_path: Path | None) -> None:
    """Show what this node is, as far as a restore depends on it.

    What cannot be found out is listed with the reason. Takes a second or two: CRIU tries its features.
    """
    found = profiles.full(system())
    data = msgspec.json.format(msgspec.json.encode(found)) + b"\n"
    if output_path is not None:
        temporary = output_path.with_name(f".{output_path.name}.{os.getpid()}")
        temporary.write_bytes(data)
        temporary.replace(output_path)
    elif as_json:
        click.echo(data.decode(), nl=False)
    else:
        _show(found)


def system() -> System:
    """Where this node's probes look."""
    node = this_node()
    tools = find_tools(node.config.tools_path)
    return System(
        tools=programs(tools),
        search_path=tools.search_path,
        store_path=node.config.store_path,
    )


def programs(tools: Tools) -> dict[str, Path]:
    """The programs whose versions a profile names."""
    found: dict[str, Path | None] = {name: getattr(tools, name) for name in TOOLS}
    return {name: path for name, path in found.items() if path is not None}


def _show(found: Profile) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in _rows(found):
        table.add_row(Text(name), Text(value))
    Console().print(table)
    for name, reason in sorted(found.unknown.items()):
        click.echo(f"? {name}: {reason}")


def _rows(found: Profile) -> list[tuple[str, str]]:
    level = f", x86-64-v{found.cpu_level}" if found.cpu_level else ""
    gpus = [
        f"{gpu.model}, {_gib(gpu.memory_bytes)}{' (split by MIG)' if gpu.mig else ''}"
        for gpu in found.gpus or ()
    ]
    return [
        ("node", found.node),
        ("processor", f"{found.cpu_vendor} {found.cpu_model} ({found.arch}{level})"),
        ("features", f"{len(found.cpu_flags)}; XSAVE area {_or_unknown(found.xsave_bytes)} bytes"),
        ("kernel", f"{found.kernel}, pages of {found.page_size_bytes} bytes, cgroups {found.cgroup_mode}"),
        ("tools", ", ".join(f"{name} {version}" for name, version in found.tools.items()) or "none"),
        ("criu", _criu(found)),
        ("namespaces", ", ".join(found.namespaces or ()) or "unknown"),
        ("security module", "unknown" if found.lsm is None else found.lsm or "none"),
        ("packet filter", "unknown" if found.netfilter is None else found.netfilter or "none"),
        ("GPUs", "; ".join(gpus) or ("unknown" if found.gpus is None else "none")),
        ("memory", f"{_gib(found.memory_available_bytes)} of {_gib(found.memory_bytes)} available"),
        ("disk for images", f"{_gib(found.store_free_bytes)} free"),
        ("disk for containers", f"{_gib(found.rootfs_free_bytes)} free"),
        ("file systems", ", ".join(found.storage or ())),
    ]


def _criu(found: Profile) -> str:
    if found.criu_works is None:
        return "unknown"
    works = "works on this kernel" if found.criu_works else "does not work on this kernel"
    return f"{works}; {len(found.criu_features or ())} features"


def _or_unknown(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _gib(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 2**30:.1f} GiB"
