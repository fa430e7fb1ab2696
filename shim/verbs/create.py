"""create: restore from the image that the annotation names, or hand a cold start over."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from engines import registry
from engines.api import EngineError
from shim import annotations, bundle, log, restore, state
from shim.annotations import Wish
from shim.checkpointable import without_io_uring
from shim.errors import AdmissionRefused, Busy, NotUndone, ShimError, Unsettled
from shim.images.layout import parse_reference
from shim.images.store import Image
from shim.verbs.context import Context

# Restore has no use for these options of create.
_NOT_FOR_RESTORE = frozenset({"bundle", "pid-file", "console-socket", "no-new-keyring"})


def serve(context: Context) -> int | None:
    """Create the container; None hands the call over for a cold start.

    Raises ShimError, EngineError where the pod's annotations say that a failed restore is an error.
    """
    spec = bundle.read_spec(context.bundle_path)
    if context.config.handler == "RUNSC":
        _refuse_pod(context, spec)
    try:
        wish = annotations.read(spec, foreign=context.config.foreign_annotations)
    except AdmissionRefused as error:
        _audit(context, "refused", "", str(error))
        raise
    if wish.engine is not None and wish.engine not in registry.names():
        message = f"could not use engine '{wish.engine}': this node has {', '.join(registry.names())}"
        _audit(context, "refused", "", message)
        raise AdmissionRefused(f"{message}; correct the annotation")
    if _clear(context):
        return None  # the runtime will say that the id is taken
    if wish.checkpointable:
        spec = without_io_uring(spec)
        bundle.write_spec(context.bundle_path, spec)
    if not wish.restores:
        return None
    try:
        return _restore(context, spec, wish)
    except (NotUndone, Busy) as error:
        _audit(context, "restore", wish.restore_from or str(wish.foreign_path), f"failed: {error}")
        raise
    except (ShimError, EngineError) as error:
        name = wish.restore_from or str(wish.foreign_path)
        refused = isinstance(error, ShimError)
        _audit(context, "refused" if refused else "restore", name, f"{wish.on_failure}: {error}")
        undone = not isinstance(error, EngineError) or error.undone
        if wish.on_failure == "cold-start" and undone:
            return None
        raise


def _refuse_pod(context: Context, spec: bundle.Spec) -> None:
    """Raises AdmissionRefused for a container of a pod.

    runsc takes the streams of a second container in a sandbox from whoever calls `start`, and gives it no
    process of its own on the host: a caller that is made for runc would wait for ever, and see no end of it.
    """
    notes: Mapping[str, object] = spec.get("annotations") or {}
    if any(key in notes for key in ("io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType")):
        message = (
            f"could not create container '{context.container_id}': it is part of a pod, and runsc runs the "
            "containers of a pod only under gVisor's own containerd shim; use the runtime class torpor (runc)"
        )
        _audit(context, "refused", "", message)
        raise AdmissionRefused(message)


def _restore(context: Context, spec: bundle.Spec, wish: Wish) -> int | None:
    image = _find_image(context, wish)
    if not wish.applies_to(image.manifest.source.container_name):
        return None
    target = _target(context)
    status = 0
    with state.locked(context.directory, wait_s=1.0, create=True):
        found, findings = restore.at_create(context.config, context.store, image, target, spec, wish)
        if found.phase == "restoring":  # the engine restores in `start`, into what is created here
            status = _create(context)
            if status:
                state.remove(context.directory)
                return status
            found = state.advance(context.directory, found, "held")
    warnings = [finding.message for finding in findings if finding.severity in {"warn", "unknown"}]
    _audit(context, "restore", found.image, "held", digest=found.digest, warnings=warnings)
    return 0


def _create(context: Context) -> int:
    """Let the real runtime create the container, with all that this call has; its exit status.

    It writes its own errors where the caller reads them.
    """
    argv = [str(context.config.runtime_path), *context.handed_over]
    return subprocess.run(argv, check=False, close_fds=False).returncode


def _find_image(context: Context, wish: Wish) -> Image:
    """The image the annotation names. A pod may use only the images of its own namespace."""
    if wish.foreign_path is not None:
        from shim import foreign  # few nodes allow it

        return foreign.take(
            context.config,
            context.store,
            wish.foreign_path,
            namespace=wish.namespace,
            inspect=lambda engine, path: context.engine(engine).inspect(path),
        )
    reference = parse_reference(wish.restore_from or "", namespace=wish.namespace)
    if reference.namespace != wish.namespace:
        raise AdmissionRefused(
            f"could not restore image '{reference}': a pod of namespace '{wish.namespace}' may use only the "
            f"images of its own; import it with --namespace {wish.namespace or '(none)'}"
        )
    try:
        return context.store.resolve(reference)
    except Unsettled:
        from shim.checkpoint import settle  # seldom

        settle(context.config, context.store)
        return context.store.resolve(reference)


def _target(context: Context) -> restore.Target:
    return restore.Target(
        container_id=context.container_id,
        root=context.call.root,
        directory=context.directory,
        bundle_path=context.bundle_path,
        settings=context.engine_settings,
        pid_file_path=context.option_path("pid-file"),
        console_socket_path=context.option_path("console-socket"),
        extra_args=_extra_args(context),
    )


def _clear(context: Context) -> bool:
    """Undo what an earlier call for this id left when it was killed; whether a container of this id lives."""
    if not context.directory.exists():
        return False
    with state.locked(context.directory, wait_s=1.0, create=True):
        found = state.load(context.directory)
        alive = restore.clear(context.config, _target(context))
        if found is not None and found.phase == "restoring" and context.config.handler == "RUNSC":
            # A second `create` of an id would cost a container that is there its state.
            bundle.ask_runtime(
                context.config.runtime_path,
                (*context.config.runtime_args, "--root", context.call.root),
                *("delete", "--force", context.container_id),
            )
        return alive


def _extra_args(context: Context) -> tuple[str, ...]:
    options = context.call.options
    if context.config.handler == "RUNSC":
        return ()  # the call itself goes to runsc
    unfit = sorted(set(options) - _NOT_FOR_RESTORE - {"no-pivot", "detach"})
    if unfit:
        raise ShimError(
            f"could not restore container '{context.container_id}': create was called with --{unfit[0]}, "
            "which a restore cannot honour; cold-start it"
        )
    return ("--no-pivot",) if "no-pivot" in options else ()


def _audit(context: Context, event: str, image: str, verdict: str, **fields: object) -> None:
    log.audit(
        context.config.store_path,
        event,
        container=context.container_id,
        bundle=str(context.bundle_path),
        image=image,
        verdict=verdict,
        **fields,
    )
