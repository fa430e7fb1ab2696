"""`torpor restore`: wake a container up without a runtime caller."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import click

from compat import verdict
from engines import registry
from engines.api import EngineError
from shim import admission, bundle, log, rehearsal, restore, state
from shim.annotations import Network, Wish
from shim.cli.asking import Rehearsing
from shim.cli.node import Node, this_node
from shim.config import engine_settings
from shim.errors import ShimError, UsageError
from shim.images.layout import parse_reference
from shim.images.store import Image
from shim.settling import settle
from shim.start import start
from shim.streams import Streams

PR_SET_CHILD_SUBREAPER = 36


@click.command("restore", cls=Rehearsing)
@click.argument("image")
@click.option(
    "--bundle",
    "bundle_path",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="OCI bundle of the new container: config.json and the root file system of the dumped one.",
)
@click.option("--id", "container_id", help="Id of the new container; by default that of the dumped one.")
@click.option("--root", default="/run/runc", show_default=True, help="State directory of the runtime.")
@click.option("--use", type=click.Choice(["clone", "move"]), help="Overrides what the image says of itself.")
@click.option(
    "--network",
    type=click.Choice(["new", "keep", "keep-closed"]),
    help="Keep the address and established TCP connections (keep), the address alone (keep-closed), or "
    "neither (new, the default).",
)
@click.option("--keep-tcp", is_flag=True, help="The same as --network keep.")
@click.option("--detach", "-d", is_flag=True, help="Return when the container runs.")
@click.option(
    "--log", "log_path", type=click.Path(dir_okay=False, path_type=Path), help="Output goes to this file."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only say whether the image may and can be restored. The exit status is 0 if it can, 1 if not, 2 if "
    "that is not known, 3 if the question is wrong.",
)
def command(
    image: str,
    bundle_path: Path,
    container_id: str | None,
    root: str,
    use: str | None,
    network: Network | None,
    keep_tcp: bool,
    detach: bool,
    log_path: Path | None,
    dry_run: bool,
) -> None:
    """Restore IMAGE ([NAMESPACE/]NAME[@DIGEST]) into a new container made from a bundle.

    Without --detach the container's output is shown, signals are passed on to it, and its exit status is the
    command's; a container that ignores them is ended with `runc kill ID KILL`. Its standard input is empty.

    \b
      torpor restore job-7 --bundle /srv/job-7
    """
    if keep_tcp and network not in {None, "keep"}:
        raise UsageError(f"--keep-tcp contradicts --network {network}; leave one of them out")
    network = "keep" if keep_tcp else network
    node = this_node()
    settle(node.config, node.store)
    found = node.store.resolve(parse_reference(image, namespace=""))
    node = node.of_engine(found.manifest.engine.name)
    if container_id == "":
        raise UsageError("could not restore under an empty id; give --id a name, or leave it out")
    name = container_id or found.manifest.source.container_id
    spec = bundle.read_spec(bundle_path)
    directory = node.directory(root, name)
    target = restore.Target(
        container_id=name,
        root=root,
        directory=directory,
        bundle_path=bundle_path.resolve(),
        settings=engine_settings(node.config, node.tools, root, directory),
    )
    if dry_run:
        _rehearse(node, found, target, spec, network, use)
        return
    if found.manifest.terminal:
        raise ShimError(
            f"could not restore image '{found.reference}': it has a terminal, which needs a caller with a "
            "console socket; restore it under containerd, CRI-O or Podman"
        )
    wish = Wish(
        restore_from=image,
        use="move" if use == "move" else "clone" if use == "clone" else None,
        network=network,
    )
    if not detach and ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise ShimError("could not become the parent of the container; use --detach")
    streams = Streams(log_path, shown=not detach)
    try:
        with state.locked(directory, wait_s=1.0, create=True):
            if restore.clear(node.config, target):
                raise ShimError(
                    f"could not restore container '{name}': there is one of this id; see `torpor ps`"
                )
            held, findings = restore.at_create(node.config, node.store, found, target, spec, wish)
            if held.phase == "restoring":  # the engine makes the container in `start`
                state.advance(directory, held, "held")
    except BaseException as error:
        streams.back()  # or nobody would read what it says
        if isinstance(error, (EngineError, ShimError)):
            log.audit(node.config.store_path, "refused", container=name, image=image, verdict=str(error))
        raise
    warnings = [f"{one.message} [{one.rule}]" for one in findings if one.severity in {"warn", "unknown"}]
    log.audit(
        node.config.store_path, "restore", container=name, image=held.image, verdict="held", warnings=warnings
    )
    started = False
    try:
        # Before it runs: it may end at once. An engine that restores in `start` has seen it run.
        early = held.phase == "held"
        pid = bundle.runtime_state(node.config.runtime_path, root, name).pid if early else 0
        start(node.config, name, directory, target.settings)
        started = True
        if not detach:
            pid = pid or bundle.runtime_state(node.config.runtime_path, root, name).pid
    except BaseException:
        # There is no caller who would. One that has used up its image is all there is of the job.
        if not started and node.store.consumed_by(found) not in {name, f"{name} of {root}"}:
            _remove(node, root, name, directory)
        raise
    finally:
        streams.back()
    if not detach:
        status = _wait(node, root, name, pid, directory)
        streams.drain()
        sys.exit(status)


def _rehearse(
    node: Node,
    found: Image,
    target: restore.Target,
    spec: bundle.Spec,
    network: Network | None,
    use: str | None,
) -> None:
    """Say everything that stands against a restore. The exit status is that of `torpor compat check`."""
    findings = rehearsal.rehearse(
        node.config,
        node.store,
        found,
        target,
        spec,
        registry.create(found.manifest.engine.name, target.settings),
        network_mode=network,
        use="move" if (use or found.manifest.effective_use) == "move" else "clone",
    )
    for finding in findings:
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        click.echo(f"{finding.severity:8} {finding.rule}: {finding.message}{remedy}")
    where = f"into {target.bundle_path} on this node"
    match verdict.answer(findings):
        case "yes":
            click.echo(f"{found.reference} can be restored {where}")
        case "unknown":
            click.echo(f"nobody knows whether {found.reference} can be restored {where}")
            sys.exit(2)
        case "no":
            admission.refuse(findings, what=str(found.reference))


def _wait(node: Node, root: str, name: str, pid: int, directory: Path) -> int:
    """Pass signals on until the container ends, then remove it; its exit status as a shell tells it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: os.kill(pid, got))
    while True:
        child, status = os.wait()
        if child == pid:
            break
    _remove(node, root, name, directory)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _remove(node: Node, root: str, name: str, directory: Path) -> None:
    bundle.ask_runtime(node.config.runtime_path, ("--root", root), "delete", "--force", name)
    state.remove(directory)
