"""checkpoint, as runtime callers ask for it: into their directory, with torpor's files beside."""

from __future__ import annotations

import contextlib
from pathlib import Path

from engines.api import CheckpointRequest
from shim import bundle, log, state, timing
from shim.checkpoint import Source, Wanted, begin, choose_engine, take
from shim.errors import ShimError, UsageError
from shim.images import layout
from shim.images.directories import sync_directory
from shim.images.manifest import Manifest
from shim.images.seal import flatten, seal, write_file
from shim.verbs.context import Context

# What torpor decides itself, or what has a field of its own in the request.
_OURS = frozenset(
    {
        "image-path",
        "work-path",
        "leave-running",
        "tcp-established",
        "tcp-skip-in-flight",
        "pre-dump",
        "parent-path",
        "file-locks",
        "link-remap",
        "manage-cgroups-mode",
    }
)
_CANNOT = {
    "lazy-pages": "the memory would stay with the source",
    "page-server": "the memory would go elsewhere and the image would be incomplete",
    "status-fd": "nobody would hear of the page server",
}


def serve(context: Context) -> int | None:
    """Checkpoint into --image-path. Raises ShimError, EngineError; then the container runs as before."""
    options = context.call.options
    container_id = context.container_id
    for name, why in _CANNOT.items():
        if name in options:
            raise UsageError(
                f"could not checkpoint container '{container_id}' with --{name}: {why}; leave it out"
            )
    found = bundle.runtime_state(context.config.runtime_path, context.call.root, container_id)
    if found.status not in {"running", "paused"}:
        raise ShimError(f"could not checkpoint container '{container_id}': it is {found.status}, not running")
    image_path = Path(options.get("image-path") or "checkpoint").absolute()
    image_path.parent.mkdir(parents=True, exist_ok=True)
    work_path = context.option_path("work-path") or image_path
    source = Source(
        container_id=container_id,
        root=context.call.root,
        directory=context.directory,
        bundle_path=found.bundle_path,
        settings=context.engine_settings,
    )
    if "pre-dump" in options:
        return _pre_dump(context, source, image_path)
    wanted = Wanted(
        image_path=image_path,
        extras_path=image_path / layout.EXTRAS,
        work_path=work_path,
        leave_running="leave-running" in options,
        rootfs="if-overlay",
        keep_tcp="tcp-established" in options,
        extra_args=context.other_options(_OURS),
        parent_path=_parent(context, image_path),
    )

    def finish(manifest: Manifest) -> None:
        flatten(image_path)
        seal(manifest, checkpoint_path=image_path, extras_path=image_path)
        sync_directory(image_path.parent)

    try:
        _, timings = take(source, context.config, wanted, finish)
    except Exception as error:
        _audit(context, image_path, f"failed: {error}")
        raise
    with contextlib.suppress(OSError):  # the image is whole without them, and its source may be gone
        write_file(image_path / f"{layout.EXTRAS_PREFIX}{layout.TIMINGS}", timing.encode(timings))
    timing.record(context.config.store_path, timings)
    _audit(context, image_path, "left running" if wanted.leave_running else "stopped")
    return 0


def _pre_dump(context: Context, source: Source, image_path: Path) -> int:
    spec = bundle.read_spec(source.bundle_path)
    engine = choose_engine(source, context.config, spec, None)
    request = CheckpointRequest(
        container_id=source.container_id,
        bundle_path=source.bundle_path,
        image_path=image_path,
        timeout_s=context.config.checkpoint_timeout_s,
        parent_path=_parent(context, image_path),
    )
    with state.locked(source.directory, wait_s=5.0, create=True):
        begin(source, engine.name)
        engine.pre_dump(request)
    _audit(context, image_path, "pre-dumped")
    return 0


def _parent(context: Context, image_path: Path) -> Path | None:
    """Callers give the parent relative to the image directory, as CRIU does."""
    given = context.call.options.get("parent-path")
    return (image_path / given).resolve() if given else None


def _audit(context: Context, image_path: Path, verdict: str) -> None:
    log.audit(
        context.config.store_path,
        "checkpoint",
        container=context.container_id,
        image=str(image_path),
        verdict=verdict,
    )
