"""`torpor images`: list, inspect, verify, remove and import checkpoint images."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from engines import registry
from engines.api import EngineError, EngineSettings, Needs
from netmig.errors import NetworkError
from shim import log
from shim.cli import tables
from shim.cli.node import Node, this_node
from shim.errors import ShimError
from shim.images import layout
from shim.images.archive import import_archive, open_archive
from shim.images.beneath import read_plain
from shim.images.documents import MAX_DOCUMENT_BYTES
from shim.images.layout import Reference, is_page_file, parse_reference
from shim.images.manifest import Use
from shim.images.spec import parse
from shim.images.store import BrokenImage, Image, Store
from shim.leases import release
from shim.peers import forget_sleeping
from shim.version import VERSION

_REDACTED = "(redacted)"
_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
_NAMESPACE = click.option(
    "--namespace", default="", help="Namespace of names that are given without one; by default none."
)


@click.group("images")
def command() -> None:
    """Work with the checkpoint images in this node's store.

    An image is named [NAMESPACE/]NAME[@sha256:DIGEST].
    """


@command.command("ls")
@click.option("--namespace", help="Only images of this namespace ('' for those of none).")
@_AS_JSON
def list_images(namespace: str | None, as_json: bool) -> None:
    """List the images."""
    store = this_node().store
    rows = [_row(store, entry) for entry in store.entries(namespace)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo(
            "no images in this node's store; make one with `torpor checkpoint` or `torpor images import`"
        )
        return
    table = tables.table("IMAGE", "DIGEST", "SIZE", "ENGINE", "CONTAINER", "USE", "CREATED", "STATE")
    for row in rows:
        digest = str(row["digest"]).removeprefix("sha256:")[:12]
        cells = (row["image"], digest, _size(row["bytes"]), *(row[key] for key in _LISTED))
        table.add_row(*(tables.plain(cell) for cell in cells))
    tables.console().print(table)


_LISTED = ("engine", "container", "use", "created", "state")


def _row(store: Store, entry: Image | BrokenImage) -> dict[str, Any]:
    if isinstance(entry, BrokenImage):
        return {
            "image": str(entry.reference),
            "digest": "",
            "bytes": 0,
            **dict.fromkeys(_LISTED, ""),
            "state": f"damaged: {entry.cause}",
        }
    source = entry.manifest.source
    try:
        used_by = store.consumed_by(entry)
        state = f"used by {used_by}" if used_by else "ready"
    except EngineError as error:
        state = f"damaged: {error}"
    return {
        "image": _name(entry.reference),
        "digest": entry.digest,
        "bytes": entry.n_bytes,
        "engine": entry.manifest.engine.name,
        "container": source.container_name or source.container_id,
        "use": entry.manifest.effective_use,
        "created": entry.manifest.created,
        "state": state,
    }


@command.command("inspect")
@click.argument("reference", metavar="IMAGE")
@_NAMESPACE
@_AS_JSON
def inspect_image(reference: str, namespace: str, as_json: bool) -> None:
    """Show what IMAGE is and what it needs. Values of the environment and arguments are not shown."""
    store = this_node().store
    image = store.resolve(parse_reference(reference, namespace=namespace))
    facts = _facts(store, image)
    if as_json:
        click.echo(json.dumps(facts, indent=2, ensure_ascii=True))
        return
    _print_facts(image, facts)


def _facts(store: Store, image: Image) -> dict[str, Any]:
    needs: Any
    try:
        needs = msgspec.to_builtins(image.needs)
    except EngineError as error:
        needs = {"error": str(error)}
    return {
        "image": _name(image.reference),
        "digest": image.digest,
        "path": str(image.path),
        "bytes": image.n_bytes,
        "used_by": store.consumed_by(image),
        "effective_use": image.manifest.effective_use,
        "manifest": msgspec.to_builtins(image.manifest),
        "needs": needs,
        "process": _process(image),
    }


def _process(image: Image) -> dict[str, Any] | None:
    """The container's command with everything hidden that may be a secret."""
    if layout.SPEC_DUMP not in image.manifest.files:
        return None
    process = parse(read_plain(image.path, layout.SPEC_DUMP, MAX_DOCUMENT_BYTES), what="spec.dump").process
    return {
        "args": [_REDACTED] * len(process.args or ()),
        "env": {entry.partition("=")[0]: _REDACTED for entry in process.env or ()},
        "cwd": process.cwd,
        "terminal": process.terminal,
    }


def _print_facts(image: Image, facts: dict[str, Any]) -> None:
    manifest = image.manifest
    source, host, rootfs = manifest.source, manifest.host, manifest.rootfs
    needs: dict[str, Any] = facts["needs"]
    lines: list[tuple[str, object]] = [
        ("image", facts["image"]),
        ("digest", image.digest),
        ("path", image.path),
        ("created", manifest.created),
        ("size", f"{_size(image.n_bytes)} in {len(manifest.files)} files"),
        ("use", f"{manifest.effective_use}" + (f", used by {facts['used_by']}" if facts["used_by"] else "")),
        ("engine", f"{manifest.engine.name} {manifest.engine.version}"),
        ("runtime", f"{manifest.runtime.name} {manifest.runtime.version}"),
        ("container", f"{source.container_name} {source.container_id}"),
        ("pod", f"{source.pod_namespace}/{source.pod_name}" if source.pod_name else ""),
        ("container image", source.image_name),
        ("caller", source.runtime_caller),
        ("imported", f"from a {manifest.imported.archive} archive" if manifest.imported else ""),
        ("hostname", manifest.hostname),
        ("host", f"{host.arch}, Linux {host.kernel}, cgroup {host.cgroup_mode}" if host else "not recorded"),
        (
            "root file system",
            rootfs.kind + (f"; left out: {', '.join(rootfs.skipped)}" if rootfs.skipped else ""),
        ),
        ("user", f"{manifest.security.uid}:{manifest.security.gid}"),
    ]
    if "error" in needs:
        lines.append(("needs", needs["error"]))
    else:
        sockets = [f"{s['protocol']} {s['state']} {s['address']}:{s['port']}" for s in needs["sockets"]]
        lines += [
            ("tasks", ", ".join(f"{task['comm']} ({task['pid']})" for task in needs["tasks"])),
            ("memory", _size(needs["memory_bytes"])),
            ("sockets", ", ".join(sockets)),
            ("mounts", ", ".join(mount["destination"] for mount in needs["mounts"])),
        ]
    if facts["process"] is not None:
        names = ", ".join(facts["process"]["env"])
        lines.append(("environment", f"{names} (values not shown)" if names else "empty"))
    table = Table(box=None, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in lines:
        if str(value).strip():
            table.add_row(label, tables.plain(value))
    tables.console().print(table)


@command.command("verify")
@click.argument("references", metavar="IMAGE...", nargs=-1, required=True)
@_NAMESPACE
@click.option("--no-pages", is_flag=True, help="Compare only the size of the files with memory pages.")
@_AS_JSON
def verify_images(references: tuple[str, ...], namespace: str, no_pages: bool, as_json: bool) -> None:
    """Compare every file of each IMAGE with its digest. The exit status is 1 if one is damaged."""
    store = this_node().store
    results: list[dict[str, Any]] = []
    for text in references:
        reference = parse_reference(text, namespace=namespace)
        try:
            image = store.resolve(reference)
            total = sum(
                file.size_bytes
                for name, file in image.manifest.files.items()
                if not (no_pages and is_page_file(name))
            )
            with _progress(f"verifying {reference}", total, quiet=as_json) as on_bytes:
                store.verify(image, pages=not no_pages, on_bytes=on_bytes)
        except (EngineError, ShimError) as error:
            results.append({"image": str(reference), "ok": False, "cause": str(error)})
            if not as_json:
                click.echo(f"Error: {error}", err=True)
        else:
            results.append({"image": _name(image.reference), "digest": image.digest, "ok": True})
            if not as_json:
                click.echo(
                    f"{_name(image.reference)}: {len(image.manifest.files)} files are as they were written"
                )
    if as_json:
        click.echo(json.dumps(results, indent=2))
    if not all(result["ok"] for result in results):
        raise click.exceptions.Exit(1)


def _readable(node: Node, reference: Reference) -> Image | None:
    """An image with its needs read, None if it cannot be."""
    with suppress(EngineError, ShimError):
        image = node.store.resolve(reference)
        return image if image.needs else None
    return None


@command.command("rm")
@click.argument("references", metavar="IMAGE...", nargs=-1, required=True)
@_NAMESPACE
def remove_images(references: tuple[str, ...], namespace: str) -> None:
    """Remove each IMAGE."""
    node = this_node()
    for text in references:
        reference = parse_reference(text, namespace=namespace)
        image = _readable(node, reference)
        node.store.remove(reference)
        if image is not None:
            with suppress(NetworkError, ShimError):
                forget_sleeping(image.needs, node.tools.search_path)
                release(node.config.store_path, image.digest)
        log.audit(node.config.store_path, "remove", image=str(reference), verdict="removed")
        click.echo(f"removed {reference}")


@command.command("import")
@click.argument("archive", type=click.Path(path_type=Path))
@click.option("--name", required=True, help="Name of the image.")
@click.option(
    "--namespace", default="", help="Whose pods may restore it; the archive has no say. By default none."
)
@click.option(
    "--use",
    type=click.Choice(["clone", "move"]),
    help="May it be restored again and again (clone) or only once (move)? "
    "By default what torpor recorded, else clone.",
)
@click.option("--replace", is_flag=True, help="Replace an image of the same name.")
@_AS_JSON
def import_image(
    archive: Path, name: str, namespace: str, use: Use | None, replace: bool, as_json: bool
) -> None:
    """Read a checkpoint ARCHIVE of containerd, CRI-O or Podman into the store.

    An image is code that runs as root: import only what you trust. Volumes in the archive are left behind.

    \b
      torpor images import /var/lib/kubelet/checkpoints/checkpoint-web.tar --name web --namespace shop
    """
    node = this_node()
    reference = parse_reference(name, namespace=namespace)
    if reference.digest or "/" in name:
        raise click.UsageError("--name takes a plain name; give the namespace with --namespace")
    node.store.recover()
    audited = {"image": str(reference), "archive": str(archive.absolute())}
    try:
        with (
            open_archive(archive) as file,
            _progress(f"importing {reference}", os.fstat(file.fileno()).st_size, quiet=as_json) as on_bytes,
        ):
            done = import_archive(
                file,
                node.store,
                reference,
                inspect=_inspector(node),
                torpor_version=VERSION,
                use=use,
                replace_existing=replace,
                on_bytes=on_bytes,
            )
    except (EngineError, ShimError) as error:
        log.audit(node.config.store_path, "import", **audited, verdict=f"refused: {error}")
        raise
    image = done.image
    log.audit(node.config.store_path, "import", **audited, digest=image.digest, verdict="imported")
    if as_json:
        row = _row(node.store, image)
        click.echo(json.dumps({**row, "warnings": done.warnings}, indent=2))
        return
    for warning in done.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"{image.reference}")
    click.echo(
        f"{_size(image.n_bytes)}, engine {image.manifest.engine.name}, use {image.manifest.effective_use}"
    )


def _inspector(node: Node) -> Callable[[str, Path], Needs]:
    settings = EngineSettings(
        runtime_path=node.config.runtime_path,
        root_path=Path("/run/runc"),  # not looked at: nothing runs
        state_path=node.config.state_path,
        search_path=node.tools.search_path,
        python_path=node.tools.python_path,
    )
    return lambda engine, path: registry.create(engine, settings).inspect(path)


@contextmanager
def _progress(text: str, total_bytes: int, *, quiet: bool) -> Generator[Callable[[int], None] | None]:
    """A bar on stderr while there is somebody to look at it."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(escape(text), total=total_bytes)
        yield lambda n_bytes: progress.advance(task, n_bytes)


def _name(reference: Reference) -> str:
    return str(reference).partition("@")[0]


def _size(n_bytes: int) -> str:
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
