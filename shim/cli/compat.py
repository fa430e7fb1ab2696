"""`torpor compat`: will an image restore there? Asked before anything is touched."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table
from rich.text import Text

from compat import labels as nodelabels
from compat import profile as profiles
from compat import verdict
from compat.probes.base import System
from compat.profile import Profile
from compat.rules.case import REGISTRY, Case, Origin
from engines.api import EngineError, Finding
from shim import bundle, prospects
from shim.cli import tables
from shim.cli.asking import NO_ANSWER, Deciding
from shim.cli.node import name_only, this_node
from shim.errors import ShimError, UnknownImage, Unsettled, UsageError
from shim.images import seal
from shim.images.layout import parse_reference
from shim.images.store import Image
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
        try:
            _put(output_path, data)
        except OSError as error:
            raise ShimError(f"could not write profile '{output_path}': {error.strerror}") from error
    elif as_json:
        click.echo(data.decode(), nl=False)
    else:
        _show(found)


def _put(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; into a device, a FIFO or what a link leads to. Raises OSError."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


@command.command("check", cls=Deciding)
@click.argument("images", metavar="IMAGE...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every image of the store.")
@click.option(
    "--node",
    "node_paths",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Profile of a node (`torpor compat profile -o`); may be given again. By default this node.",
)
@click.option(
    "--bundle",
    "bundle_path",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Bundle of the new container, whose config.json is compared with the old one's; by default a "
    "container like the dumped one.",
)
@click.option("--namespace", default="", help="Namespace of names that are given without one.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--explain", "rule", help="Say what a rule (or a family: cpu, spec.edit) is, and what helps.")
@click.pass_context
def check(
    ctx: click.Context,
    images: tuple[str, ...],
    every: bool,
    node_paths: tuple[Path, ...],
    bundle_path: Path | None,
    namespace: str,
    as_json: bool,
    rule: str | None,
) -> None:
    """Say whether each IMAGE of this node's store restores on each node, and why not.

    The exit status is 0 if all of them do, 1 if one does not, 2 if that is not known of one, 3 if the
    question itself is wrong: an option, an image that is not there or cannot be read (with --all the others
    are judged all the same), a profile, a bundle. Nothing is touched.

    \b
      torpor compat check web-warm --node node-a.json --node node-b.json
    """
    if rule is not None:
        _explain(rule)
        return
    if not images and not every:
        raise UsageError("give an image, or --all")
    node = this_node()
    asked = [parse_reference(text, namespace=namespace) for text in images]
    if every:
        asked += [entry.reference for entry in node.store.entries()]
    if not asked:
        click.echo("no images in this node's store", err=True)
    places = _read_profiles(node_paths)
    spec, rootfs_path = _read_bundle(bundle_path, here=not places)
    here = [] if places else [prospects.now(node.config, bundle_path or Path("/run"))]
    rows: list[Row] = []
    unread = False
    for reference in asked:
        try:
            image = node.store.resolve(reference)
            origin = prospects.origin(image, node.store, spec)
            damage = seal.damage(
                image.manifest, checkpoint_path=image.checkpoint_path, extras_path=image.path
            )
            origin = replace(origin, damage=damage)
            rows += [
                _verdict(image, origin, place, spec, rootfs_path=rootfs_path, local=place in here)
                for place in (*here, *places)
            ]
        except (EngineError, ShimError) as error:
            if not every:
                raise
            click.echo(f"Error: {error}", err=True)
            # One whose checkpoint has not ended, or that was removed meanwhile, is none to be asked about.
            unread = unread or not isinstance(error, Unsettled | UnknownImage)
    if as_json:
        click.echo(json.dumps({"schema": 1, "verdicts": [row.document() for row in rows]}, indent=2))
    else:
        _report(rows)
    answers = {row.answer for row in rows}
    ctx.exit(NO_ANSWER if unread else 1 if "no" in answers else 2 if "unknown" in answers else 0)


@command.command("labels")
@click.argument("image", required=False)
@click.option(
    "--node",
    "node_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Profile of another node.",
)
@click.option("--namespace", default="", help="Namespace of a name that is given without one.")
def labels(image: str | None, node_path: Path | None, namespace: str) -> None:
    """Print this node's labels for a scheduler; with IMAGE the affinity that finds it a fitting node.

    \b
      kubectl label --overwrite node NAME $(torpor compat labels)
      torpor compat labels web-warm        # goes below `spec:` of the pod
    """
    if image is None:
        place = _read_profile(node_path) if node_path else profiles.full(system())
        for key, value in nodelabels.of_node(place).items():
            click.echo(f"{key}={value}")
        return
    store = this_node().store
    found = store.resolve(parse_reference(image, namespace=namespace))
    demands = nodelabels.of_image(found.needs, found.manifest.host)
    click.echo(nodelabels.snippet(demands))


@dataclass(frozen=True, kw_only=True)
class Row:
    """The verdict on one image and one node."""

    image: Image
    node: str
    findings: tuple[Finding, ...]
    took_s: float

    @property
    def answer(self) -> verdict.Answer:
        return verdict.answer(self.findings)

    def document(self) -> dict[str, Any]:
        """For machines."""
        return {
            "image": name_only(self.image.reference),
            "digest": self.image.digest,
            "node": self.node,
            "verdict": self.answer,
            "findings": [msgspec.to_builtins(finding) for finding in self.findings],
            "ms": round(self.took_s * 1000, 3),
        }


def _verdict(
    image: Image,
    origin: Origin,
    place: Profile,
    spec: bundle.Spec | None,
    *,
    rootfs_path: Path | None,
    local: bool,
) -> Row:
    began = time.perf_counter()
    findings = verdict.run(
        Case(
            needs=image.needs,
            spec=spec,
            node=place,
            dump_host=image.manifest.host,
            rootfs_path=rootfs_path,
            local=local,
            origin=origin,
            new_image_ref=prospects.image_ref(spec) if spec else "",
        )
    )
    name = "this node" if local else place.node or "a node without a name"
    return Row(image=image, node=name, findings=findings, took_s=time.perf_counter() - began)


def _read_bundle(path: Path | None, *, here: bool) -> tuple[bundle.Spec | None, Path | None]:
    """The specification of a new container, and where its root file system is here. Raises ShimError."""
    if path is None:
        return None, None
    spec = bundle.read_spec(path)
    if not here:
        return spec, None
    rootfs_path = bundle.rootfs_path(path, spec)
    if not rootfs_path.is_dir():
        raise ShimError(
            f"could not read bundle '{path}': its root file system '{rootfs_path}' is not there; make or "
            "mount it first"
        )
    return spec, rootfs_path


def _read_profiles(paths: tuple[Path, ...]) -> list[Profile]:
    """Profiles of nodes; of those that have one name each is told by its file too. Raises ShimError."""
    found = [_read_profile(path) for path in paths]
    names = [place.node for place in found]
    return [
        replace(place, node=f"{place.node} ({path})") if names.count(place.node) > 1 else place
        for place, path in zip(found, paths, strict=True)
    ]


def _read_profile(path: Path) -> Profile:
    try:
        found = profiles.read_file(path)
    except profiles.ProfileError as error:
        raise ShimError(str(error)) from error
    return found if found.node else replace(found, node=path.stem)


_WORDS = {"yes": "green", "no": "red", "unknown": "yellow"}


def _report(rows: list[Row]) -> None:
    """A matrix where there is more than one, then the reasons, the worst first."""
    console = tables.console()
    nodes = list(dict.fromkeys(row.node for row in rows))
    if len(rows) > 1:
        table = Table(box=None, header_style="bold")
        table.add_column("IMAGE", overflow="fold")
        for name in nodes:
            table.add_column(Text(name))
        for reference in dict.fromkeys(row.image.reference for row in rows):
            cells = {row.node: row.answer for row in rows if row.image.reference == reference}
            marks = [Text(cells.get(name, ""), style=_WORDS.get(cells.get(name, ""), "")) for name in nodes]
            table.add_row(Text(name_only(reference)), *marks)
        console.print(table)
    for row in rows:
        if len(rows) == 1 or row.findings:
            what = f"{name_only(row.image.reference)} on {row.node}: "
            console.print(Text(what) + Text(row.answer, style=_WORDS[row.answer]))
        for finding in row.findings:
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            click.echo(f"  {finding.severity:7} {finding.rule}: {finding.message}{remedy}")


def _explain(name: str) -> None:
    found = verdict.explain(name)
    if not found:
        known = sorted({part for rule in REGISTRY for part in rule.names})
        near = get_close_matches(name, known, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
        raise UsageError(f"there is no rule '{name}'; {hint}")
    looks = {"node": "the node", "spec": "the new specification", "here": "this machine"}
    for rule in found:
        click.echo(f"{', '.join(rule.names)}\n  {rule.text}")
        click.echo(f"  Looks at the image and {looks[rule.about]}. Known from: {rule.source}.")


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
    tables.console().print(table)
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
