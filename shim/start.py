"""Letting a restored container run that was held until its caller said `start`.

An engine that cannot hold a container restores it here: into the container that was created, or a new one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from engines import registry
from engines.api import (
    CheckpointEngine,
    EngineSettings,
    InvalidRequest,
    Judge,
    Phase,
    PhaseInfo,
    ReleaseRequest,
    RestoreRequest,
)
from engines.processes import start_time
from shim import bundle, log, signals, state
from shim.config import Config
from shim.errors import ShimError, Undecided
from shim.state import ContainerState


def start(config: Config, container_id: str, directory: Path, settings: EngineSettings) -> bool:
    """Let a held container run; False if it is not held.

    The image is consumed before the first task runs: should the node die in between, the mark must be cleared
    by hand, but the job never runs twice. A call that was killed can be repeated. Raises AdmissionRefused if
    another container was started from the image meanwhile, ShimError if the held one has died, Undecided,
    EngineError; a restore that failed here leaves nothing of the container.
    """
    with state.locked(directory, wait_s=5.0):
        found = state.load(directory)
        if found is None or found.phase != "held":
            return False
        engine = registry.create(found.engine, settings)
        try:
            if state.is_coming(directory):
                raise Undecided("start", container_id, "comes from")
            if found.promised:
                _await(found)
            if "held-restore" in engine.capabilities:
                _check_alive(config, found)
                signals.too_late()
                if found.use == "move":
                    _consume(config, found)
                if found.promised:
                    _open(config, directory, found, settings)
                request = ReleaseRequest(container_id=container_id, timeout_s=config.restore_timeout_s)
                try:
                    engine.release(request)
                except InvalidRequest:  # as where a `start` was killed that had let it run
                    if _ask(config, found).status != "running":
                        raise
            else:
                _restore(config, engine, directory, found)
        except ShimError as error:
            log.audit(
                config.store_path, "refused", container=container_id, image=found.image, verdict=str(error)
            )
            raise
        state.advance(directory, found, "running")
    log.audit(
        config.store_path,
        "start",
        container=container_id,
        image=found.image,
        digest=found.digest,
        verdict="running",
    )
    return True


def _check_alive(config: Config, found: ContainerState) -> None:
    """Raises ShimError if the held container has died: then its image is not to be used up."""
    noted = bundle.noted_init(found.root, found.container_id)
    # Asking the runtime takes time in which nobody runs.
    pid, started = noted or (_ask(config, found).pid, 0)
    there = start_time(pid)
    if not there or started not in {0, there}:
        raise ShimError(
            f"could not start container '{found.container_id}': it was killed before it ran; delete it and "
            "create it again"
        )


def _ask(config: Config, found: ContainerState) -> bundle.RuntimeState:
    return bundle.runtime_state(config.runtime_path, found.root, found.container_id)


def _await(found: ContainerState) -> None:
    """A container that comes from another node runs when it is decided that it does not run there."""
    from shim.promise import Promise  # seldom

    Promise(Path(found.promised)).permits(found.container_id, found.digest)


def _open(config: Config, directory: Path, found: ContainerState, settings: EngineSettings) -> None:
    from netmig.errors import NetworkError
    from netmig.parting import rejoin
    from shim.adoption import let_go

    pids = bundle.processes(config.runtime_path, found.root, found.container_id)
    try:
        let_go(config.state_path / state.NETWORK, directory, settings.search_path)
    except NetworkError as error:
        raise ShimError(str(error)) from error
    rejoin(pids)


def _restore(config: Config, engine: CheckpointEngine, directory: Path, found: ContainerState) -> None:
    """Restore what `create` only promised."""
    from shim import admission, timing
    from shim.images.layout import parse_reference
    from shim.images.store import Store

    started = log.now()
    store = Store(config.store_path)
    image = store.resolve(parse_reference(found.image, namespace=""))
    if isinstance(engine, Judge):
        admission.refuse(engine.judge(image.checkpoint_path), what=found.image)

    def consume(phase: Phase = "restored", _: PhaseInfo | None = None) -> None:
        if phase == "restored" and found.use == "move" and makes_it_run:
            store.consume(image, by=_user(found))

    try:
        with store.using(image), _frame(directory, found) as makes_it_run:
            # What fails before anything can run does not use the image up.
            phases = "phases" in engine.capabilities
            if not phases:
                consume()
            found = state.advance(directory, found, "restoring")
            restored = engine.restore(
                RestoreRequest(
                    container_id=found.container_id,
                    bundle_path=Path(found.bundle),
                    image_path=image.checkpoint_path,
                    timeout_s=config.restore_timeout_s,
                    on_phase=consume if phases else None,
                )
            )
            signals.too_late()
    except BaseException as error:
        if isinstance(error, ShimError) and found.phase == "held":  # nothing was touched
            raise
        log.keep(error, config.state_path, found.container_id)
        log.audit(
            config.store_path,
            "restore",
            container=found.container_id,
            image=found.image,
            verdict=f"failed: {error}",
        )
        if (directory / state.ATTENDANT).exists():
            from shim import attendant

            attendant.end(directory)
        state.remove(directory)
        raise
    timing.record(
        config.store_path,
        timing.Timings(
            operation="restore",
            container_id=found.container_id,
            engine=engine.name,
            image=found.image,
            started=started,
            total_s=restored.total_s,
            phases={"engine": restored.total_s},
            image_bytes=image.n_bytes,
            restored=restored,
        ),
    )


def _frame(directory: Path, found: ContainerState) -> contextlib.AbstractContextManager[bool]:
    """What stands around a restore: in a pod that is restored as a whole, the other containers."""
    if not found.sandbox_id:
        return contextlib.nullcontext(enter_result=True)
    from shim import members

    return members.joining(directory, found)


def _consume(config: Config, found: ContainerState) -> None:
    from shim.images.layout import parse_reference
    from shim.images.store import Store  # half of all that there is to import; clones do without

    store = Store(config.store_path)
    image = store.resolve(parse_reference(found.image, namespace=""))
    store.consume(image, by=_user(found))


def _user(found: ContainerState) -> str:
    """By whom an image is used up: one id may stand under two roots."""
    return f"{found.container_id} of {found.root}"
