"""create: restore from the image that the annotation names, or hand a cold start over."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

from engines import registry
from engines.api import EngineError, Finding
from shim import annotations, bundle, log, restore, state
from shim.annotations import Wish
from shim.checkpointable import without_io_uring
from shim.errors import AdmissionRefused, Busy, CalledOff, NotUndone, ShimError, UnknownImage, Unsettled
from shim.images.layout import Reference, parse_reference
from shim.images.store import Image
from shim.pod import Pod, identify
from shim.verbs.context import Context

if TYPE_CHECKING:
    from shim.promise import Promise

# Restore has no use for these options of create.
_NOT_FOR_RESTORE = frozenset({"bundle", "pid-file", "console-socket", "no-new-keyring"})


def serve(context: Context) -> int | None:
    """Create the container; None hands the call over for a cold start.

    Raises ShimError, EngineError where the pod's annotations say that a failed restore is an error.
    """
    spec = bundle.read_spec(context.bundle_path)
    runsc = context.config.handler == "RUNSC"
    try:
        wish = annotations.read(spec, foreign=context.config.foreign_annotations, whole_pod=runsc)
        pod = _gvisor_pod(context, spec) if runsc else None
    except AdmissionRefused as error:
        _audit(context, "refused", "", str(error))
        raise
    if wish.engine is not None and wish.engine not in registry.names():
        message = f"could not use engine '{wish.engine}': this node has {', '.join(registry.names())}"
        _audit(context, "refused", "", message)
        raise AdmissionRefused(f"{message}; correct the annotation")
    if wish.engine is not None:
        try:
            context.config.check_engine(wish.engine, f"could not create container '{context.container_id}'")
        except AdmissionRefused as error:
            _audit(context, "refused", "", str(error))
            raise
    if _clear(context):
        return None  # the runtime will say that the id is taken
    if wish.checkpointable:
        spec = without_io_uring(spec)
        bundle.write_spec(context.bundle_path, spec)
    if not wish.restores:
        return _cold(context, spec, pod)
    try:
        done = _restore(context, spec, wish, pod)
    except (NotUndone, Busy, CalledOff) as error:
        _audit(context, "restore", wish.restore_from or str(wish.foreign_path), f"failed: {error}")
        raise
    except (ShimError, EngineError) as error:
        name = wish.restore_from or str(wish.foreign_path)
        refused = isinstance(error, ShimError)
        _audit(context, "refused" if refused else "restore", name, f"{wish.on_failure}: {error}")
        undone = not isinstance(error, EngineError) or error.undone
        if wish.on_failure != "cold-start" or not undone:
            raise
        return _cold(context, spec, pod, cause=str(error))
    return _cold(context, spec, pod) if done is None else done


def _gvisor_pod(context: Context, spec: bundle.Spec) -> Pod | None:
    """The pod that a container of runsc is part of, if any. Raises AdmissionRefused for one of CRI-O."""
    pod = identify(spec.get("annotations") or {})
    if pod.caller == "cri-o":
        raise AdmissionRefused(
            f"could not create container '{context.container_id}': it is part of a pod of CRI-O, with which "
            "gVisor's pods were never tried; use the runtime class torpor (runc)"
        )
    return pod if pod.caller == "containerd" and pod.sandbox_id and "/" not in pod.sandbox_id else None


def _cold(context: Context, spec: bundle.Spec, pod: Pod | None, *, cause: str = "") -> int | None:
    """Start from nothing: by the real runtime, but a container of a gVisor pod needs its attendant.

    cause: why it was not restored, where that was asked for.
    """
    if pod is None or pod.sandbox:
        return None
    from shim import members  # only for gVisor

    with state.locked(context.directory, wait_s=1.0, create=True):
        members.check_cold(context.directory.parent / pod.sandbox_id, context.container_id, cause)
        return _create(context, spec, pod)


def _restore(context: Context, spec: bundle.Spec, wish: Wish, pod: Pod | None) -> int | None:
    if wish.restore_from and (context.store.path / "promised").is_dir():
        from shim.promise import Promise  # seldom

        promise = Promise.of(context.store.path, _reference(wish))
        if promise.exists():
            return _restore_promised(context, spec, wish, promise)
    image = _image_or_called_off(context, wish)
    if pod is not None:
        return _restore_member(context, spec, wish, pod, image)
    if not wish.applies_to(image.manifest.source.container_name):
        return None
    target = _target(context)
    with state.locked(context.directory, wait_s=1.0, create=True):
        found, findings = restore.at_create(context.config, context.store, image, target, spec, wish)
        if found.phase == "restoring":  # the engine restores in `start`, into what is created here
            status = _create(context, spec, None)
            if status:
                state.remove(context.directory)
                return status
            found = state.advance(context.directory, found, "held")
    _audit_held(context, found, findings)
    return 0


def _restore_promised(context: Context, spec: bundle.Spec, wish: Wish, promise: Promise) -> int | None:
    """Wait for a container that comes from another node, and hold it: `start` waits for the decision.

    If it cannot be restored it runs on there, so it must not be started cold here: raises CalledOff.
    """
    from netmig.parting import part
    from shim.promise import Waiting

    if not wish.applies_to(promise.container_name):
        return None
    netns = bundle.namespace_path(spec, "network")
    if wish.network != "keep" or netns is None or context.config.handler == "RUNSC":
        raise CalledOff(
            f"could not create container '{context.container_id}': what comes from another node as image "
            f"'{wish.restore_from}' keeps its connections, in a pod of runc with a network of its own; give "
            "the pod the annotation torpor.dev/network: keep"
        )
    who = Waiting(
        container_id=context.container_id,
        root=context.call.root,
        directory=str(context.directory),
        netns=str(netns),
    )
    try:
        with promise.awaited(who), state.locked(context.directory, wait_s=1.0, create=True):
            image = _find_image(context, wish)
            target = replace(_target(context), promised=str(promise.path))
            found, findings = restore.at_create(context.config, context.store, image, target, spec, wish)
            part(bundle.processes(context.config.runtime_path, context.call.root, context.container_id))
    except (NotUndone, Busy, CalledOff):
        raise
    except (ShimError, EngineError) as error:
        raise CalledOff(str(error)) from error
    _audit_held(context, found, findings)
    return 0


def _restore_member(context: Context, spec: bundle.Spec, wish: Wish, pod: Pod, image: Image) -> int | None:
    """Restore a container of a pod that wakes up as a whole, its pause container included, in `start`."""
    from shim import members

    names = members.parts(image, context.engine(image.manifest.engine.name))
    name = "" if pod.sandbox else pod.container_name
    if name in names:
        image = members.part(image, name, names[name])
    elif not wish.applies_to(image.manifest.source.container_name) and not pod.sandbox:
        return None
    if pod.sandbox:
        members.check_pod(image, context.engine(image.manifest.engine.name), names, wish)
    with state.locked(context.directory, wait_s=1.0, create=True):
        if not pod.sandbox:
            sandbox_path = context.directory.parent / pod.sandbox_id
            members.check_join(sandbox_path, image, context.container_id, name, names)
        found, findings = restore.at_create(
            context.config, context.store, image, _target(context), spec, wish
        )
        status = _create(context, spec, pod)
        if status:
            state.remove(context.directory)
            return status
        found = members.noted(found, pod.sandbox_id, name, names)
        found = state.advance(context.directory, found, "held")
    _audit_held(context, found, findings)
    return 0


def _audit_held(context: Context, found: state.ContainerState, findings: tuple[Finding, ...]) -> None:
    warnings = [f"{one.message} [{one.rule}]" for one in findings if one.severity in {"warn", "unknown"}]
    _audit(context, "restore", found.image, "held", digest=found.digest, warnings=warnings)


def _create(context: Context, spec: bundle.Spec, pod: Pod | None) -> int:
    """Let the real runtime create the container, with all that this call has; its exit status.

    It writes its own errors where the caller reads them.
    """
    runtime = [str(context.config.runtime_path)]
    status = subprocess.run([*runtime, *context.handed_over], check=False, close_fds=False).returncode
    if status == 0 and pod is not None and not pod.sandbox:
        from shim import members

        runtime += [*context.config.runtime_args, "--root", context.call.root]
        members.attend(
            runtime,
            context.directory,
            context.container_id,
            context.option_path("pid-file"),
            cgroup=str(spec.get("linux", {}).get("cgroupsPath") or ""),
            terminal="console-socket" in context.call.options,
        )
    return status


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
    reference = _reference(wish)
    try:
        return context.store.resolve(reference)
    except Unsettled:
        from shim.settling import settle  # seldom

        settle(context.config, context.store)
        return context.store.resolve(reference)


def _image_or_called_off(context: Context, wish: Wish) -> Image:
    """The image, or CalledOff where a cold start would do for a container that may run on another node.

    A promise tells of that only while there is one: not before the container is announced, nor after its
    migration was called off, when the kubelet calls again.
    """
    try:
        return _find_image(context, wish)
    except UnknownImage as error:
        if wish.network != "keep" or wish.on_failure != "cold-start":
            raise
        raise CalledOff(
            f"could not create container '{context.container_id}': its image '{wish.restore_from}' is not "
            "here, and what keeps its connections may run on another node, so it is not started cold; have "
            "it migrated here, or make the pod without torpor.dev/network: keep"
        ) from error


def _reference(wish: Wish) -> Reference:
    reference = parse_reference(wish.restore_from or "", namespace=wish.namespace)
    if reference.namespace != wish.namespace:
        raise AdmissionRefused(
            f"could not restore image '{reference}': a pod of namespace '{wish.namespace}' may use only the "
            f"images of its own; import it with --namespace {wish.namespace or '(none)'}"
        )
    return reference


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
        half_made = found is not None and found.phase == "restoring"
        if found is None and (context.directory / state.ATTENDANT).exists():
            from shim import attendant

            if attendant.find(context.directory):
                raise ShimError(
                    f"could not create container '{context.container_id}': there is one of this id; delete it"
                )
            half_made = True
        alive = restore.clear(context.config, _target(context))
        if half_made and context.config.handler == "RUNSC":
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
