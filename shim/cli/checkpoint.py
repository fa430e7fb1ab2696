"""`torpor checkpoint`: put a running container to sleep in the local store."""

from __future__ import annotations

import json
import sys

import click
import msgspec
from rich.console import Console

from compat import verdict
from engines.api import Finding
from shim import bundle
from shim.checkpoint import Source, choose_engine, into_store
from shim.cli.asking import Rehearsing
from shim.cli.node import Node, this_node
from shim.config import engine_settings
from shim.errors import ShimError, UsageError
from shim.forecast import forecast
from shim.images.layout import parse_reference
from shim.images.manifest import source_of
from shim.images.spec import parse


@click.command("checkpoint", cls=Rehearsing)
@click.argument("container")
@click.option("--name", help="Name of the checkpoint image in the store.")
@click.option(
    "--namespace", help="Namespace of the image; by default that of the container's pod, else none."
)
@click.option("--root", help="State directory of the caller's runtime; looked for if not given.")
@click.option("--stop", is_flag=True, help="The container ends with the checkpoint; by default it runs on.")
@click.option(
    "--keep-tcp",
    is_flag=True,
    help="With --stop: peers of established connections wait for a restore with network: keep. Until then "
    "nothing in the container's network namespace sends or receives.",
)
@click.option(
    "--use",
    type=click.Choice(["clone", "move"]),
    help="May the image be restored again and again (clone) "
    "or only once (move)? By default move with --stop, else clone.",
)
@click.option(
    "--engine", help="Checkpoint engine; by default what the container's annotation or the node says."
)
@click.option("--full-copy", is_flag=True, help="Copy a root file system whole that is no overlay.")
@click.option("--replace", is_flag=True, help="Replace an image of the same name.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only say what would make it fail; the container is not even frozen. The exit status is 0 "
    "if nothing would, 1 if something would, 2 if that is not known, 3 if the question is wrong.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def command(
    container: str,
    name: str | None,
    namespace: str | None,
    root: str | None,
    stop: bool,
    keep_tcp: bool,
    use: str | None,
    engine: str | None,
    full_copy: bool,
    replace: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Checkpoint CONTAINER (its id, or the beginning of it) into the local image store.

    The container stands still while its memory is copied; then it runs on, or ends with --stop. Wake it up in
    a new container with the annotation torpor.dev/restore-from, or with `torpor restore`.

    \b
      torpor checkpoint 3f2a --name web-warm
      torpor checkpoint 3f2a --name job-7 --stop
      torpor checkpoint 3f2a --dry-run
    """
    node = this_node()
    whole = node.find_container(container, root)
    where, found, node = whole.root, whole.state, whole.node
    if found.status not in {"running", "paused"}:
        raise ShimError(
            f"could not checkpoint container '{found.container_id}': it is {found.status}, not running"
        )
    config = node.config
    spec = parse((found.bundle_path / bundle.CONFIG).read_bytes())
    if namespace is None:
        namespace = source_of(spec, container_id=found.container_id).pod_namespace
    directory = node.directory(where, found.container_id)
    source = Source(
        container_id=found.container_id,
        root=where,
        directory=directory,
        bundle_path=found.bundle_path,
        settings=engine_settings(config, node.tools, where, directory),
    )
    if dry_run:
        naming = [] if name is None else _naming(node, name, namespace, replace=replace)
        _forecast(node, source, engine, naming, full_copy=full_copy, as_json=as_json)
        return
    if not name:
        raise UsageError("give the image a --name, or ask with --dry-run")
    reference = parse_reference(name, namespace=namespace)
    if reference.digest:
        raise UsageError("a new image gets its digest from its content; give a name without '@'")
    with Console(stderr=True).status(f"checkpointing {found.container_id}"):
        image, timings = into_store(
            source,
            config,
            node.store,
            reference,
            stop=stop,
            keep_tcp=keep_tcp,
            use="move" if use == "move" else "clone" if use == "clone" else None,
            engine=engine,
            full_copy=full_copy,
            replace=replace,
        )
    if as_json:
        click.echo(
            json.dumps(
                {
                    "image": str(reference),
                    "digest": image.digest,
                    "bytes": image.n_bytes,
                    "total_s": timings.total_s,
                    "phases": timings.phases,
                },
                indent=2,
            )
        )
        return
    dump = timings.dump
    frozen = f", frozen {dump.frozen_s:.3f} s" if dump and dump.frozen_s else ""
    click.echo(f"{image.reference}")
    for warning in dump.warnings if dump else ():
        click.echo(f"warning: {warning}", err=True)
    click.echo(
        f"{image.n_bytes / 2**20:.1f} MiB in {timings.total_s:.3f} s{frozen}; "
        f"the container {'has ended' if stop else 'is as it was'}"
    )


def _naming(node: Node, name: str, namespace: str, *, replace: bool) -> list[Finding]:
    """What stands against an image of this name."""
    remedy = "choose another name"
    try:
        reference = parse_reference(name, namespace=namespace)
    except UsageError as error:
        message = str(error)
    else:
        if reference.digest:
            message = "a new image gets its digest from its content"
            remedy = "give a name without '@'"
        elif not replace and node.store.has(reference):
            message = f"there is an image '{reference}' already"
            remedy = "choose another name, or --replace it"
        else:
            return []
    return [Finding(rule="image.name", severity="refuse", message=message, remedy=remedy)]


def _forecast(
    node: Node,
    source: Source,
    wish: str | None,
    naming: list[Finding],
    *,
    full_copy: bool,
    as_json: bool,
) -> None:
    """Say what stands against a checkpoint; its exit status is the answer."""
    spec = bundle.read_spec(source.bundle_path)
    engine = choose_engine(source, node.config, spec, wish)
    findings = forecast(
        engine, source.container_id, source.bundle_path, node.config.store_path, full_copy=full_copy
    )
    findings = verdict.ordered([*naming, *findings])
    answer = verdict.answer(findings)
    if as_json:
        told = [msgspec.to_builtins(finding) for finding in findings]
        click.echo(json.dumps({"schema": 1, "verdict": answer, "findings": told}, indent=2))
    else:
        for finding in findings:
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            click.echo(f"{finding.severity:8} {finding.rule}: {finding.message}{remedy}")
        words = {"yes": "can be", "no": "cannot be", "unknown": "may or may not be"}
        click.echo(f"container '{source.container_id}' {words[answer]} checkpointed as it is now")
    sys.exit({"yes": 0, "no": 1, "unknown": 2}[answer])
