"""Waking a container up: admission first, then the root file system, then the engine; undone in reverse.

Two callers: `create` of a bundle whose annotation names an image of the store (the tasks are held until
`start`), and the `restore` verb with a caller's own image directory (the tasks run at once).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compat import verdict
from engines import registry
from engines.api import (
    CheckpointEngine,
    EngineSettings,
    Finding,
    Needs,
    Restored,
    RestoreRequest,
)
from shim import admission, bundle, log, state, timing
from shim.annotations import Network, Use, Wish
from shim.checkpointable import without_io_uring
from shim.config import Config
from shim.errors import AdmissionRefused
from shim.images import layout
from shim.images.apply import apply
from shim.images.manifest import Manifest
from shim.images.rootfs import RootfsView, find_rootfs
from shim.images.store import Image, Store
from shim.images.undo import save_upper, undo_apply
from shim.state import ContainerState
from shim.timing import Stopwatch, Timings


@dataclass(frozen=True, kw_only=True)
class Target:
    """The container that wakes up.

    root: the runtime's --root. directory: torpor's state of it. settings: of its engine. extra_args: options
    for the runtime that have no other place here.
    """

    container_id: str
    root: str
    directory: Path
    bundle_path: Path
    settings: EngineSettings
    pid_file_path: Path | None = None
    console_socket_path: Path | None = None
    extra_args: tuple[str, ...] = ()


def admit(
    config: Config,
    spec: bundle.Spec,
    needs: Needs,
    manifest: Manifest | None,
    *,
    bundle_path: Path,
    what: str,
) -> tuple[Finding, ...]:
    """Judge whether what is in an image may run in a container of this spec, on this node.

    bundle_path: the new container's, whose root file system tells where its mounts really go. what: the image
    in words. Returns the findings that were no reason to refuse. Raises AdmissionRefused, WiderPrivileges,
    ImageIncompatible with every refusal named.
    """
    rootfs_path = bundle.rootfs_path(bundle_path, spec)
    findings = admission.check(
        spec,
        needs,
        manifest,
        allowed_hooks=config.allowed_hooks,
        rootfs_path=rootfs_path,
    )
    findings += verdict.judge(
        needs,
        spec,
        dump_host=manifest.host if manifest else None,
        rootfs_path=rootfs_path,
        cache_path=config.state_path / "profile.json",
    )
    admission.refuse(findings, what=what)
    return findings


def tcp_mode(network: Network | None, *, leave_running: bool, what: str) -> Literal["keep", "close"]:
    """What becomes of connections. Raises AdmissionRefused where keeping them would wedge them silently."""
    if network != "keep":
        return "close"
    if leave_running:
        raise AdmissionRefused(
            f"could not restore image '{what}' with network: keep: its container was left running, so its "
            "peers have moved on and the connections would hang for ever; checkpoint with --stop, or use "
            "network: new"
        )
    return "keep"


def at_create(
    config: Config, store: Store, image: Image, target: Target, spec: bundle.Spec, wish: Wish
) -> tuple[ContainerState, tuple[Finding, ...]]:
    """Restore an image of the store into a new container, held until `start`.

    The caller holds the container's lock. On failure nothing is left of the container, and the image is
    intact. Raises EngineError, ShimError.
    """
    watch = Stopwatch()
    started = log.now()
    what = str(image.reference)
    use: Use = wish.use or image.manifest.effective_use
    engine = registry.create(image.manifest.engine.name, target.settings)
    if wish.engine not in {None, engine.name}:
        raise AdmissionRefused(
            f"could not restore image '{what}' with engine {wish.engine}: {engine.name} wrote it; remove the "
            "annotation"
        )
    with watch.phase("admission"):
        if use == "move" and (by := store.consumed_by(image)) is not None:
            raise AdmissionRefused(
                f"could not restore image '{what}': it may be used once and container '{by}' has used it; "
                "checkpoint again, or set torpor.dev/use: clone"
            )
        findings = admit(config, spec, image.needs, image.manifest, bundle_path=target.bundle_path, what=what)
        tcp = tcp_mode(wish.network, leave_running=image.manifest.leave_running, what=what)
    with watch.phase("verify"):
        store.verify(image, pages=False)
    found = ContainerState(
        container_id=target.container_id,
        root=target.root,
        bundle=str(target.bundle_path),
        phase="restoring",
        engine=engine.name,
        image=what,
        digest=image.digest,
        use=use,
        created=started,
    )
    state.save(target.directory, found)
    view = find_rootfs(target.bundle_path, str(bundle.rootfs_path(Path(), spec)))
    try:
        with contextlib.ExitStack() as root:
            with watch.phase("rootfs"):
                root.enter_context(_applied(image, view, target.directory / "upper"))
                admission.refuse(verdict.judge_files(image.needs, spec, view.path), what=what)
            with watch.phase("engine"):
                restored = _restore(engine, config, target, spec, image.checkpoint_path, tcp=tcp, held=True)
            found = state.advance(target.directory, found, "held")
    except BaseException as error:
        log.keep(error, config.state_path, target.container_id)
        state.remove(target.directory)
        raise
    timing.record(
        config.store_path,
        Timings(
            operation="restore",
            container_id=target.container_id,
            engine=engine.name,
            image=what,
            started=started,
            total_s=watch.total_s,
            phases=watch.phases,
            image_bytes=image.n_bytes,
            restored=restored,
        ),
    )
    return found, findings


@contextlib.contextmanager
def _applied(image: Image, view: RootfsView, backup_path: Path) -> Generator[None]:
    """The root file system as it was at the dump; taken back if what follows fails.

    A plain directory has no upper directory to go back to: its container cannot be started cold afterwards.
    """
    diff_path = image.path / layout.ROOTFS_DIFF
    if not diff_path.exists():
        yield
        return
    deleted_path = image.path / layout.DELETED_FILES
    deleted = deleted_path.read_bytes() if deleted_path.exists() else b"[]"
    save_upper(view, backup_path)
    try:
        with diff_path.open("rb") as diff:
            apply(view.path, diff, deleted, whiteouts=image.manifest.rootfs.whiteouts)
        yield
    except BaseException:
        undo_apply(view, backup_path)
        raise
    shutil.rmtree(backup_path, ignore_errors=True)


def _restore(
    engine: CheckpointEngine,
    config: Config,
    target: Target,
    spec: bundle.Spec,
    image_path: Path,
    *,
    tcp: Literal["keep", "close"],
    held: bool,
) -> Restored:
    """The engine's part, with the host name of a namespace that is not the container's own kept."""
    uts_path = bundle.namespace_path(spec, "uts")
    hostname = bundle.hostname(uts_path) if uts_path else ""
    try:
        return engine.restore(
            RestoreRequest(
                container_id=target.container_id,
                bundle_path=target.bundle_path,
                image_path=image_path,
                timeout_s=config.restore_timeout_s,
                pid_file_path=target.pid_file_path,
                console_socket_path=target.console_socket_path,
                held=held,
                tcp=tcp,
                extra_args=target.extra_args,
            )
        )
    except BaseException:
        if target.pid_file_path is not None:
            target.pid_file_path.unlink(missing_ok=True)
        raise
    finally:
        # CRIU writes the dumped host name into whatever UTS namespace it finds.
        if uts_path:
            with contextlib.suppress(OSError):
                bundle.hostname(uts_path, hostname)


def from_directory(
    config: Config,
    image_path: Path,
    target: Target,
    spec: bundle.Spec,
    needs: Needs,
    manifest: Manifest | None,
    engine: CheckpointEngine,
    *,
    tcp: Literal["keep", "close"],
) -> Restored:
    """Restore a caller's own image directory; the tasks run at once, as the `restore` verb promises.

    Raises EngineError, ShimError; then nothing is left of the container.
    """
    watch = Stopwatch()
    started = log.now()
    with watch.phase("admission"):
        admit(config, spec, needs, manifest, bundle_path=target.bundle_path, what=str(image_path))
    state.save(
        target.directory,
        ContainerState(
            container_id=target.container_id,
            root=target.root,
            bundle=str(target.bundle_path),
            phase="restoring",
            engine=engine.name,
            image=str(image_path),
            digest="",
            use="clone",
            created=started,
        ),
    )
    try:
        with watch.phase("engine"):
            restored = _restore(engine, config, target, spec, image_path, tcp=tcp, held=False)
    except BaseException as error:
        log.keep(error, config.state_path, target.container_id)
        raise
    finally:
        state.remove(target.directory)
    timing.record(
        config.store_path,
        Timings(
            operation="restore",
            container_id=target.container_id,
            engine=engine.name,
            image=str(image_path),
            started=started,
            total_s=watch.total_s,
            phases=watch.phases,
            restored=restored,
        ),
    )
    return restored


def checkpointable(target_bundle: Path, spec: bundle.Spec) -> bundle.Spec:
    """Write the spec with io_uring answered by ENOSYS into the bundle, and return it."""
    spec = without_io_uring(spec)
    bundle.write_spec(target_bundle, spec)
    return spec
