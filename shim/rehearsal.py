"""Everything of a restore but the restore: what `torpor restore --dry-run` asks, all of it, in one go.

Nothing of the container is touched. The image's changes are unpacked into a layer of our own over the new
container's root file system, and every file that a task has open is looked at there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

from compat import verdict
from engines.api import CheckpointEngine, EngineError, Finding, Judge, Severity
from engines.pods import PodEngine
from shim import bundle, network, prospects
from shim.annotations import Network, Use
from shim.config import Config
from shim.errors import NoContainer, ShimError
from shim.images import layout
from shim.images.apply import apply
from shim.images.store import Image, Store
from shim.restore import Target
from shim.state import NETWORK

_MNT_DETACH = 2


def rehearse(
    config: Config,
    store: Store,
    image: Image,
    target: Target,
    spec: bundle.Spec,
    engine: CheckpointEngine,
    *,
    network_mode: Network | None,
    use: Use,
) -> tuple[Finding, ...]:
    """All that stands for and against a restore of an image into a bundle on this node, the worst first.

    use: what the restore asks for. Raises ShimError, EngineError only where nothing can be asked at all.
    """
    found = [
        *_identity(config, target),
        *(finding for finding in engine.probe() if finding.severity in {"refuse", "unknown"}),
        *_asked(engine, image, spec),
    ]
    what = str(image.reference)
    try:
        network.check_engine(engine, network_mode, what=what)
        plan = network.plan(
            network_mode,
            image.needs,
            spec,
            image.path,
            leave_running=image.manifest.leave_running,
            kept=image.manifest.keep_tcp,
            what=what,
        )
    except ShimError as error:
        found.append(_finding("network.plan", str(error)))
        tcp, coming = "close", ()
    else:
        found += (*plan.findings, *_adopted(config, image, target, plan))
        tcp, coming = plan.tcp, plan.coming
    found += prospects.examine(
        config,
        spec,
        image.needs,
        image.manifest,
        bundle_path=target.bundle_path,
        tcp=tcp,
        coming=coming,
        origin=prospects.origin(image, store, spec, use=use),
    )
    found += _image(store, image)
    if image.manifest.engine.name != "gvisor":
        found += _files(config, image, target, spec)
    return verdict.ordered(dict.fromkeys(found))


def _adopted(config: Config, image: Image, target: Target, plan: network.Plan) -> tuple[Finding, ...]:
    """What the node and its segment say to addresses that the new namespace is to be given."""
    if plan.adopt is None or plan.netns_path is None:
        return ()
    from shim.adoption import Adoption  # as in `restore`

    return Adoption(
        plan.adopt,
        plan.netns_path,
        network_path=config.state_path / NETWORK,
        directory=target.directory,
        search_path=target.settings.search_path,
        table=image.needs.lock_table,
        peers=network.peers_of(image.needs) if plan.tcp == "keep" else (),
        digest=image.digest,
        what=str(image.reference),
    ).foresee()


def _finding(rule: str, message: str, severity: Severity = "refuse") -> Finding:
    cause, _, remedy = message.rpartition("; ")
    return Finding(rule=rule, severity=severity, message=cause or remedy, remedy=remedy if cause else "")


def _identity(config: Config, target: Target) -> Iterator[Finding]:
    try:
        there = bundle.runtime_state(config.runtime_path, target.root, target.container_id)
    except NoContainer:
        return
    yield Finding(
        rule="restore.id",
        severity="refuse",
        message=f"there is a container '{target.container_id}' already, and it is {there.status}",
        remedy="give another --id, or delete it",
    )


def _asked(engine: CheckpointEngine, image: Image, spec: bundle.Spec) -> Iterator[Finding]:
    """What only the engine knows."""
    try:
        if isinstance(engine, PodEngine) and (cause := engine.misfit(image.checkpoint_path, spec)):
            yield Finding(rule="engine.pod", severity="refuse", message=cause, remedy="choose another image")
        if isinstance(engine, Judge):
            yield from engine.judge(image.checkpoint_path)
    except EngineError as error:
        yield _finding("engine.image", str(error))


def _image(store: Store, image: Image) -> Iterator[Finding]:
    try:
        store.verify(image, pages=True)
    except (EngineError, ShimError) as error:
        yield _finding("image.verify", str(error))


def _files(config: Config, image: Image, target: Target, spec: bundle.Spec) -> Iterator[Finding]:
    root = bundle.rootfs_path(target.bundle_path, spec)
    if not root.is_dir():
        yield Finding(
            rule="files.rootfs",
            severity="unknown",
            message=f"the root file system {root} is not there, so that no file in it could be looked at",
            remedy="mount it, then ask again",
        )
        return
    diff_path = image.path / layout.ROOTFS_DIFF
    try:
        with _layer(root, config.store_path) if diff_path.exists() else contextlib.nullcontext(root) as place:
            if place != root:
                deleted_path = image.path / layout.DELETED_FILES
                deleted = deleted_path.read_bytes() if deleted_path.exists() else b"[]"
                with diff_path.open("rb") as diff:
                    apply(place, diff, deleted, whiteouts=image.manifest.rootfs.whiteouts)
            yield from verdict.judge_files(image.needs, spec, place)
    except EngineError as error:
        yield _finding("files.unpack", str(error))
    except OSError as error:
        yield Finding(
            rule="files.unpack",
            severity="unknown",
            message=f"the image's changes could not be unpacked for a trial: {error.strerror}",
            remedy="ask on a root file system over which an overlay can be mounted",
        )


@contextlib.contextmanager
def _layer(root: Path, store_path: Path) -> Generator[Path]:
    """An overlay over a root file system, gone without a trace at the end. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    scratch = Path(tempfile.mkdtemp(prefix="rehearsal-", dir=store_path))
    try:
        upper, work, merged = (scratch / name for name in ("upper", "work", "merged"))
        for path in (upper, work, merged):
            path.mkdir()
        lower = str(root.resolve()).replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        mounted = libc.mount(b"overlay", os.fsencode(merged), b"overlay", 0, os.fsencode(options))
        if mounted != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        try:
            yield merged
        finally:
            libc.umount2(os.fsencode(merged), _MNT_DETACH)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
