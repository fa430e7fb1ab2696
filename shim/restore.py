"""Waking a container up: admission first, then the root file system, then the engine; undone in reverse.

Two callers: `create` of a bundle whose annotation names an image of the store (the tasks are held until
`start`), and the `restore` verb with a caller's own image directory (the tasks run at once).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compat import verdict
from compat.rules.case import Origin
from engines import registry
from engines.api import (
    CheckpointEngine,
    EngineSettings,
    Finding,
    ImageError,
    Judge,
    Needs,
    Phase,
    PhaseInfo,
    Restored,
    RestoreRequest,
)
from engines.pods import PodEngine
from netmig.errors import NetworkError
from shim import admission, bundle, log, network, prospects, signals, state, timing
from shim.annotations import Use, Wish
from shim.config import Config
from shim.errors import AdmissionRefused, NoContainer, NotUndone, ShimError
from shim.images import layout
from shim.images.apply import apply
from shim.images.manifest import Manifest
from shim.images.rootfs import RootfsView, find_rootfs
from shim.images.store import Image, Store
from shim.images.undo import forget, save_upper, undo_apply
from shim.network import Tcp
from shim.state import ContainerState
from shim.timing import Stopwatch, Timings

if TYPE_CHECKING:
    from shim.adoption import Adoption


@dataclass(frozen=True, kw_only=True)
class Target:
    """The container that wakes up.

    root: the runtime's --root. directory: torpor's state of it. settings: of its engine. extra_args: options
    for the runtime that have no other place here. promised: see `ContainerState`.
    """

    container_id: str
    root: str
    directory: Path
    bundle_path: Path
    settings: EngineSettings
    pid_file_path: Path | None = None
    console_socket_path: Path | None = None
    extra_args: tuple[str, ...] = ()
    promised: str = ""


def admit(
    config: Config,
    spec: bundle.Spec,
    needs: Needs,
    manifest: Manifest | None,
    *,
    bundle_path: Path,
    what: str,
    tcp: Tcp = "close",
    coming: Collection[str] = (),
    origin: Origin | None = None,
) -> tuple[Finding, ...]:
    """What `prospects.examine` finds, refused if that is a reason to. what: the image in words.

    Returns the findings that were no reason to refuse.
    Raises AdmissionRefused, WiderPrivileges, ImageIncompatible with every refusal named.
    """
    findings = prospects.examine(
        config, spec, needs, manifest, bundle_path=bundle_path, tcp=tcp, coming=coming, origin=origin
    )
    admission.refuse(findings, what=what)
    return findings


def at_create(
    config: Config, store: Store, image: Image, target: Target, spec: bundle.Spec, wish: Wish
) -> tuple[ContainerState, tuple[Finding, ...]]:
    """Restore an image of the store into a new container, held until `start`.

    An engine that cannot hold a container restores it in `start`: then everything is checked here and the
    phase stays `restoring`, until the caller has created the container and advances it to `held`.
    The caller holds the container's lock. On failure nothing is left of the container, and the image is
    intact. Raises EngineError, ShimError.
    """
    watch = Stopwatch()
    started = log.now()
    what = str(image.reference)
    engine = registry.create(image.manifest.engine.name, target.settings)
    found = ContainerState(
        container_id=target.container_id,
        root=target.root,
        bundle=str(target.bundle_path),
        phase="restoring",
        engine=engine.name,
        image=what,
        digest=image.digest,
        use=wish.use or image.manifest.effective_use,
        created=started,
        hostname=_hostname(spec),
        promised=target.promised,
    )
    with store.using(image):
        with watch.phase("admission"):
            findings, plan = _judge(config, store, image, target, spec, wish, engine, found.use)
        with watch.phase("verify"):
            store.verify(image, pages=False)
        state.save(target.directory, found)
        if "held-restore" not in engine.capabilities:
            return found, findings
        view = find_rootfs(target.bundle_path, str(bundle.rootfs_path(Path(), spec)))
        try:
            with contextlib.ExitStack() as root:
                with watch.phase("network"):
                    adoption = root.enter_context(_adopt(config, image, target, plan))
                with watch.phase("rootfs"):
                    undo_path, timeout_s = target.directory / state.UPPER, config.restore_timeout_s
                    root.enter_context(_applied(image, view, undo_path, timeout_s=timeout_s))
                    admission.refuse(verdict.judge_files(image.needs, spec, view.path), what=what)
                with watch.phase("network"):
                    findings += adoption.take() if adoption else ()
                at_restored = _at_restored(image, target, plan, adoption, root)
                with watch.phase("engine"):
                    restored = _restore(
                        engine,
                        config,
                        target,
                        spec,
                        image.checkpoint_path,
                        tcp=plan.tcp,
                        held=True,
                        at_restored=at_restored,
                    )
                root.enter_context(_made(target))
                if adoption:
                    adoption.done()
                if plan.mode == "keep-closed" and plan.netns_path and network.peers_of(image.needs):
                    from shim.peers import say_farewell

                    say_farewell(plan.netns_path, image.needs)
                found = state.advance(target.directory, found, "held")
        except BaseException as error:
            log.keep(error, config.state_path, target.container_id)
            if not (target.directory / state.UPPER).exists():  # else it is for whoever deletes the container
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


def _judge(
    config: Config,
    store: Store,
    image: Image,
    target: Target,
    spec: bundle.Spec,
    wish: Wish,
    engine: CheckpointEngine,
    use: Use,
) -> tuple[tuple[Finding, ...], network.Plan]:
    """Everything that can stand against a restore and can be known before; what becomes of the network."""
    what = str(image.reference)
    if wish.engine not in {None, engine.name}:
        raise AdmissionRefused(
            f"could not restore image '{what}' with engine {wish.engine}: {engine.name} wrote it; remove the "
            "annotation"
        )
    config.check_engine(engine.name, f"could not restore image '{what}'")
    if use == "move" and (by := store.consumed_by(image)) is not None:
        raise AdmissionRefused(
            f"could not restore image '{what}': it may be used once and container '{by}' has used it; "
            "checkpoint again, or make a clone, with network: new (torpor.dev/use: clone)"
        )
    network.check_engine(engine, wish.network, what=what)
    if wish.network in {"keep", "keep-closed"}:
        # Of another try, under another id, in the same namespace.
        network.clear(config, target.directory, target.settings.search_path)
    going_on, promised = image.manifest.leave_running, bool(target.promised)
    plan = network.plan(
        wish.network,
        image.needs,
        spec,
        image.path,
        leave_running=going_on,
        promised=promised,
        kept=image.manifest.keep_tcp,
        what=what,
    )
    admission.refuse(plan.findings, what=what)
    findings = plan.findings + admit(
        config,
        spec,
        image.needs,
        image.manifest,
        bundle_path=target.bundle_path,
        what=what,
        tcp=plan.tcp,
        coming=plan.coming,
        origin=prospects.origin(image, store, spec, use=use),
    )
    if plan.tcp == "keep" and "tcp-established" not in engine.capabilities:
        raise AdmissionRefused(
            f"could not restore image '{what}' with network: keep: engine {engine.name} cannot keep "
            "connections; use network: new"
        )
    ask(engine, image, spec)
    return findings, plan


def ask(engine: CheckpointEngine, image: Image, spec: bundle.Spec) -> None:
    """Let the engine of an image say what only it knows. Raises AdmissionRefused, ImageIncompatible."""
    what = str(image.reference)
    if isinstance(engine, PodEngine) and (cause := engine.misfit(image.checkpoint_path, spec)):
        raise AdmissionRefused(f"could not restore image '{what}': {cause}; choose another image")
    if isinstance(engine, Judge):
        admission.refuse(engine.judge(image.checkpoint_path), what=what)


@contextlib.contextmanager
def _adopt(config: Config, image: Image, target: Target, plan: network.Plan) -> Generator[Adoption | None]:
    """The new namespace is to be given the image's addresses, if it has not got them; undone on an error."""
    if plan.adopt is None or plan.netns_path is None:
        yield None
        return
    from shim import leases
    from shim.adoption import Adoption  # pyroute2 takes 130 ms to load

    with Adoption(
        plan.adopt,
        plan.netns_path,
        network_path=config.state_path / state.NETWORK,
        directory=target.directory,
        search_path=target.settings.search_path,
        table=image.needs.lock_table,
        peers=network.peers_of(image.needs) if plan.tcp == "keep" else (),
        digest=image.digest,
        what=str(image.reference),
        mute=bool(target.promised),
    ) as adoption:
        yield adoption
    with contextlib.suppress(NetworkError, ShimError, OSError):  # the record alone: the leases are the pod's
        leases.release(config.store_path, image.digest)


def _at_restored(
    image: Image, target: Target, plan: network.Plan, adoption: Adoption | None, late: contextlib.ExitStack
) -> Callable[[], None]:
    """What is to be done when the tasks are there and the engine is about to open their network."""
    steps = [adoption.open] if adoption else []
    if plan.guarded or plan.addresses:
        from shim.peers import waking  # clones have none

        steps.append(late.enter_context(waking(plan, image.needs, target.settings.search_path)))

    def at_restored() -> None:
        for step in steps:
            step()

    return at_restored


@contextlib.contextmanager
def _applied(image: Image, view: RootfsView, record_path: Path, *, timeout_s: float) -> Generator[None]:
    """The root file system as it was at the dump; taken back if what follows fails.

    record_path, timeout_s: see `save_upper`. Raises NotUndone, in place of what failed, if it cannot be taken
    back: a plain directory has no upper directory to go back to.
    """
    diff_path = image.path / layout.ROOTFS_DIFF
    if not diff_path.exists():
        yield
        return
    deleted_path = image.path / layout.DELETED_FILES
    deleted = deleted_path.read_bytes() if deleted_path.exists() else b"[]"
    try:
        save_upper(view, record_path, timeout_s=timeout_s)
        with diff_path.open("rb") as diff:
            apply(view.path, diff, deleted, whiteouts=image.manifest.rootfs.whiteouts)
        yield
    except BaseException as error:
        _take_back(view, record_path, error)
        raise
    with contextlib.suppress(ImageError, OSError):  # then whoever deletes the container does
        forget(record_path)


@contextlib.contextmanager
def _made(target: Target) -> Generator[None]:
    """The engine has made the container, which nobody else knows of yet; ended if what follows fails.

    Raises NotUndone, in place of what failed, if it cannot be ended.
    """
    try:
        yield
    except BaseException as error:
        try:
            _end(target)
        except ShimError as worse:
            raise NotUndone(f"{error}; and {worse}") from error
        if target.pid_file_path is not None:
            target.pid_file_path.unlink(missing_ok=True)
        raise


def _end(target: Target) -> None:
    settings = target.settings
    args = (*settings.runtime_args, "--root", target.root)
    answer = bundle.ask_runtime(settings.runtime_path, args, "delete", "--force", target.container_id)
    if answer.returncode:
        cause = answer.stderr.strip()
        raise NotUndone(f"could not end container '{target.container_id}': {cause}; delete it")


def _take_back(view: RootfsView, record_path: Path, error: BaseException) -> None:
    if view.kind == "directory":
        raise NotUndone(f"{error}; the root file system {view.path} was changed: make it anew") from error
    try:
        undo_apply(record_path)
    except ImageError as worse:
        raise NotUndone(f"{error}; and {worse}") from error


def clear(config: Config, target: Target) -> bool:
    """Undo what an earlier call for this id left when it was killed; the caller holds the container's lock.

    Returns whether there is a container of this id that lives: then nothing is touched. Raises EngineError,
    ShimError.
    """
    directory = target.directory
    found = state.load(directory)
    engine = found.engine if found is not None else state.engine_at_work(directory)
    there = ""  # as where it was deleted without us: then only our state is left
    with contextlib.suppress(NoContainer):
        there = bundle.runtime_state(config.runtime_path, target.root, target.container_id).status
    if found is not None and found.phase != "restoring":
        if there:
            return True
    elif engine is not None:
        registry.create(engine, target.settings).undo(target.container_id)
    if found is not None and found.phase == "restoring":
        if there == "paused":  # its engine was through, and nobody has heard of it
            _end(target)
        undo_around(config, found, directory, target.settings.search_path)
    forget(directory / state.UPPER)  # of one that was killed when it was through
    # The lock stays: it is held.
    for entry in directory.iterdir():
        if entry.name != state.LOCK:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    return False


def undo_around(config: Config, found: ContainerState, directory: Path, search_path: str) -> None:
    """Undo what a killed restore did around its engine's part, which is undone: nothing runs any more.

    directory: torpor's state of the container. search_path: of its engine. Raises NotUndone, ImageError.
    """
    network.clear(config, directory, search_path)
    undo_apply(directory / state.UPPER)
    bundle_path = Path(found.bundle)
    if not (bundle_path / bundle.CONFIG).exists():
        return  # the caller has removed it
    uts_path = bundle.namespace_path(bundle.read_spec(bundle_path), "uts")
    if uts_path and found.hostname:
        with contextlib.suppress(OSError):
            bundle.hostname(uts_path, found.hostname)


def _restore(
    engine: CheckpointEngine,
    config: Config,
    target: Target,
    spec: bundle.Spec,
    image_path: Path,
    *,
    tcp: Tcp,
    held: bool,
    at_restored: Callable[[], None] = lambda: None,
) -> Restored:
    """The engine's part, with the host name of a namespace that is not the container's own kept."""
    hostname = _hostname(spec)

    def on_phase(phase: Phase, _: PhaseInfo) -> None:
        # The engine is about to be done. What it has made and nobody knows of, nobody would end.
        if phase == "restored":
            signals.too_late()
            at_restored()

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
                on_phase=on_phase if held else None,
                extra_args=target.extra_args,
            )
        )
    except BaseException:
        if target.pid_file_path is not None:
            target.pid_file_path.unlink(missing_ok=True)
        raise
    finally:
        # CRIU writes the dumped host name into whatever UTS namespace it finds.
        uts_path = bundle.namespace_path(spec, "uts")
        if uts_path:
            with contextlib.suppress(OSError):
                bundle.hostname(uts_path, hostname)


def _hostname(spec: bundle.Spec) -> str:
    """The host name of the UTS namespace that the container shares, "" if it gets its own."""
    uts_path = bundle.namespace_path(spec, "uts")
    return bundle.hostname(uts_path) if uts_path else ""


def from_directory(
    config: Config,
    image_path: Path,
    target: Target,
    spec: bundle.Spec,
    needs: Needs,
    manifest: Manifest | None,
    engine: CheckpointEngine,
    *,
    tcp: Tcp,
) -> Restored:
    """Restore a caller's own image directory; the tasks run at once, as the `restore` verb promises.

    Raises EngineError, ShimError; then nothing is left of the container.
    """
    watch = Stopwatch()
    started = log.now()
    with watch.phase("admission"):
        what = str(image_path)
        admit(config, spec, needs, manifest, bundle_path=target.bundle_path, what=what, tcp=tcp)
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
