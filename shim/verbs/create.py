"""create: restore from the image that the annotation names, or hand a cold start over."""

from __future__ import annotations

from engines.api import EngineError
from shim import annotations, bundle, log, restore, state
from shim.annotations import Wish
from shim.errors import AdmissionRefused, ShimError
from shim.images.layout import parse_reference
from shim.images.store import Image
from shim.verbs.context import Context

# Restore has no use for these options of create.
_NOT_FOR_RESTORE = frozenset({"bundle", "pid-file", "console-socket", "no-new-keyring", "pidfd-socket"})


def serve(context: Context) -> int | None:
    """Create the container; None hands the call over for a cold start.

    Raises ShimError, EngineError where the pod's annotations say that a failed restore is an error.
    """
    spec = bundle.read_spec(context.bundle_path)
    try:
        wish = annotations.read(spec, foreign=context.config.foreign_annotations)
    except AdmissionRefused as error:
        _audit(context, "refused", "", str(error))
        raise
    _clear(context)
    if wish.checkpointable:
        spec = restore.checkpointable(context.bundle_path, spec)
    if not wish.restores:
        return None
    try:
        return _restore(context, spec, wish)
    except (ShimError, EngineError) as error:
        name = wish.restore_from or str(wish.foreign_path)
        refused = isinstance(error, ShimError)
        _audit(context, "refused" if refused else "restore", name, f"{wish.on_failure}: {error}")
        if wish.on_failure == "cold-start":
            return None
        raise


def _restore(context: Context, spec: bundle.Spec, wish: Wish) -> int | None:
    image = _find_image(context, wish)
    if not wish.applies_to(image.manifest.source.container_name):
        return None
    target = restore.Target(
        container_id=context.container_id,
        root=context.call.root,
        directory=context.directory,
        bundle_path=context.bundle_path,
        settings=context.engine_settings,
        pid_file_path=context.option_path("pid-file"),
        console_socket_path=context.option_path("console-socket"),
        extra_args=_extra_args(context),
    )
    with state.locked(context.directory, wait_s=1.0, create=True):
        found, findings = restore.at_create(context.config, context.store, image, target, spec, wish)
    warnings = [finding.message for finding in findings if finding.severity in {"warn", "unknown"}]
    _audit(context, "restore", found.image, "held", digest=found.digest, warnings=warnings)
    return 0


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
    return context.store.resolve(reference)


def _clear(context: Context) -> None:
    """Undo what an earlier call for this id left when it was killed; a container that lives is left alone."""
    directory = context.directory
    if not directory.exists():
        return
    with state.locked(directory, wait_s=1.0, create=True):
        found = state.load(directory)
        if found is not None and found.phase == "restoring":
            context.engine(found.engine).undo(context.container_id)
        elif found is not None:
            try:
                bundle.runtime_state(context.config.runtime_path, context.call.root, context.container_id)
            except ShimError:
                pass  # deleted without us: only our state is left
            else:
                return  # the runtime will say that the id is taken
        state.remove(directory)


def _extra_args(context: Context) -> tuple[str, ...]:
    options = context.call.options
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
