"""restore, as containerd up to 2.3, conmon and people call it: from the caller's own image directory."""

from __future__ import annotations

from pathlib import Path

from engines import registry
from engines.api import ImageNotFound
from shim import annotations, bundle, log, restore, state
from shim.errors import UsageError
from shim.images import layout
from shim.images.beneath import read_plain
from shim.images.documents import MAX_DOCUMENT_BYTES
from shim.images.manifest import Manifest, parse_manifest
from shim.images.seal import check_files
from shim.verbs.context import Context

_OURS = frozenset(
    {
        "bundle",
        "image-path",
        "work-path",
        "parent-path",
        "pid-file",
        "console-socket",
        "detach",
        "no-subreaper",
        "no-new-keyring",
        "tcp-established",
        "tcp-close",
        "file-locks",
        "manage-cgroups-mode",
    }
)


def serve(context: Context) -> int | None:
    """Restore from --image-path with the checks of a restore at create; the tasks run at once.

    Without --detach the runtime itself must stay: then the call is checked here and handed over.
    Raises ShimError, EngineError; then nothing is left of the container.
    """
    options = context.call.options
    container_id = context.container_id
    image_path = Path(options.get("image-path") or "checkpoint").absolute()
    if not image_path.is_dir():
        raise ImageNotFound(
            f"could not restore container '{container_id}': {image_path} is no directory; give --image-path"
        )
    if context.config.handler == "RUNSC":
        raise UsageError(
            f"could not restore container '{container_id}': under runsc a container wakes up when it is "
            "started; take the image with torpor checkpoint, and create a container with the annotation "
            "torpor.dev/restore-from"
        )
    spec = bundle.read_spec(context.bundle_path)
    annotations.read(spec, foreign=False)
    if "lazy-pages" in options:
        raise UsageError(
            f"could not restore container '{container_id}' with --lazy-pages: not supported; leave it out"
        )
    manifest = _manifest(image_path)
    name = layout.writer_of(image_path, manifest.engine.name if manifest else None)
    engine = registry.create(name, context.engine_settings)
    tcp = "keep" if "tcp-established" in options else "close"
    try:
        needs = engine.inspect(image_path)
        if "detach" not in options:
            restore.admit(
                context.config,
                spec,
                needs,
                manifest,
                bundle_path=context.bundle_path,
                what=str(image_path),
                tcp=tcp,
            )
            return None
        with state.locked(context.directory, wait_s=1.0, create=True):
            restored = restore.from_directory(
                context.config,
                image_path,
                restore.Target(
                    container_id=container_id,
                    root=context.call.root,
                    directory=context.directory,
                    bundle_path=context.bundle_path,
                    settings=context.engine_settings,
                    pid_file_path=context.option_path("pid-file"),
                    console_socket_path=context.option_path("console-socket"),
                    extra_args=context.other_options(_OURS),
                ),
                spec,
                needs,
                manifest,
                engine,
                tcp=tcp,
            )
    except Exception as error:
        _audit(context, image_path, f"failed: {error}")
        raise
    _audit(context, image_path, f"running, pid {restored.pid}")
    return 0


def _manifest(image_path: Path) -> Manifest | None:
    """Torpor's own manifest in a caller's directory, its files checked; None if torpor did not write it."""
    name = f"{layout.EXTRAS_PREFIX}{layout.MANIFEST}"
    if not (image_path / name).is_file():
        return None
    what = f"image '{image_path}'"
    manifest = parse_manifest(read_plain(image_path, name, MAX_DOCUMENT_BYTES), what=what)
    check_files(manifest, checkpoint_path=image_path, extras_path=image_path, pages=False, what=what)
    return manifest


def _audit(context: Context, image_path: Path, verdict: str) -> None:
    log.audit(
        context.config.store_path,
        "restore",
        container=context.container_id,
        image=str(image_path),
        verdict=verdict,
    )
