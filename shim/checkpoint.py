"""Taking a checkpoint: memory by the engine, the root file system beside it, and what neither records.

The same steps serve a runtime caller's `checkpoint` (its directory) and `torpor checkpoint` (the store). The
root file system is read while the engine keeps the tasks frozen, so memory and disk are of one instant. An
image that is to stop its source is complete and on disk before the source may die.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Literal

from compat.profile import Profile
from engines import registry
from engines.api import (
    CheckpointEngine,
    CheckpointRequest,
    DumpStats,
    EngineError,
    EngineSettings,
    ImageExists,
    Needs,
    NotSupported,
    OnPhase,
    Phase,
    PhaseInfo,
)
from shim import annotations, bundle, identity, log, prospects, settling, signals, state, timing
from shim.config import Config
from shim.errors import ShimError
from shim.images import layout, rootfs
from shim.images.documents import encode_needs
from shim.images.layout import Reference
from shim.images.manifest import Manifest, Program, Rootfs, Use, build_manifest, source_of
from shim.images.seal import write_file
from shim.images.spec import parse
from shim.images.store import Image, Store
from shim.timing import Stopwatch, Timings
from shim.version import VERSION

WORK = "work"  # below a container's state directory: the engine's logs and statistics


@dataclass(frozen=True, kw_only=True)
class Source:
    """The container that falls asleep.

    root: the runtime's --root. directory: torpor's state of it. settings: of its engine.
    """

    container_id: str
    root: str
    directory: Path
    bundle_path: Path
    settings: EngineSettings


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to do with it.

    image_path: where the engine writes. extras_path: where torpor's own files go. work_path: where the
    engine's log and statistics are left, None for nowhere. rootfs: one that is no overlay is
    refused, copied whole, or left to the caller. keep_tcp: the network of a stopped container stays locked,
    so that its peers wait for a restore. use: recorded in the manifest. on_phase: told before this acts on a
    phase. verdict_path: see `engines.api.CheckpointRequest`.
    """

    image_path: Path
    extras_path: Path
    leave_running: bool
    work_path: Path | None = None
    rootfs: Literal["overlay", "full-copy", "if-overlay"] = "overlay"
    keep_tcp: bool = False
    use: Use | None = None
    engine: str | None = None
    extra_args: tuple[str, ...] = ()
    parent_path: Path | None = None
    on_phase: OnPhase | None = None
    verdict_path: Path | None = None


Finish = Callable[[Manifest], None]


def begin(source: Source, engine: str) -> None:
    """Undo what a killed call left of a container, and note the engine that is about to dump it.

    The caller holds the container. Raises EngineError, ShimError.
    """
    settling.undo_killed(source.container_id, source.directory, source.settings, engine)
    shutil.rmtree(source.directory / WORK, ignore_errors=True)  # not before: the undo reads the logs in it
    state.note_engine(source.directory, engine)


def choose_engine(source: Source, config: Config, spec: bundle.Spec, named: str | None) -> CheckpointEngine:
    """The engine for a dump: named on the command line, by annotation, in config.toml, else the default.

    Raises EngineUnavailable, AdmissionRefused.
    """
    wish = annotations.read(spec, foreign=False)
    engine = registry.choose(source.settings, named or wish.engine or config.engine)
    config.check_engine(engine.name, f"could not checkpoint container '{source.container_id}'")
    return engine


def take(source: Source, config: Config, wanted: Wanted, finish: Finish) -> tuple[Manifest, Timings]:
    """Checkpoint a container.

    finish: makes the complete image durable under its name, given the manifest; it is called before a source
    that is to stop may die, and after one that is to run on was thawed. If anything fails, `finish` included,
    the container runs on as before and what was written is removed.
    Raises EngineError, ShimError.
    """
    watch = Stopwatch()
    spec_data = (source.bundle_path / bundle.CONFIG).read_bytes()
    spec = bundle.read_spec(source.bundle_path)
    netns_path = bundle.namespace_path(spec, "network")
    captured: identity.Capture | None = None
    if netns_path and config.handler == "RUNTIME" and not identity.is_ours(netns_path):
        captured = identity.Capture(netns_path, source.settings.search_path)  # now: it takes its time
    engine = choose_engine(source, config, spec, wanted.engine)
    with state.locked(source.directory, wait_s=5.0, create=True):
        begin(source, engine.name)
        try:
            if wanted.verdict_path is not None:
                state.note_verdict(source.directory, wanted.verdict_path)
            registry.check_dump(
                engine, source.container_id, leave_running=wanted.leave_running, keep_tcp=wanted.keep_tcp
            )
            job = _Job(config, source, wanted, engine, spec, spec_data, finish, watch, captured)
            stats = job.run(config.checkpoint_timeout_s)
        except BaseException as error:
            log.keep(error, config.state_path, source.container_id)
            _leave_logs(source.directory, wanted, failed=True)
            raise
        with contextlib.suppress(OSError):  # the image is whole without them, and its source may be gone
            _leave_logs(source.directory, wanted, failed=False)
    timings = Timings(
        operation="checkpoint",
        container_id=source.container_id,
        engine=engine.name,
        image=str(wanted.image_path),
        started=job.started,
        total_s=watch.total_s,
        phases=watch.phases,
        image_bytes=stats.image_bytes,
        dump=stats,
    )
    return job.sealed(), timings


def into_store(
    source: Source,
    config: Config,
    store: Store,
    reference: Reference,
    *,
    stop: bool,
    keep_tcp: bool = False,
    use: Use | None = None,
    engine: str | None = None,
    full_copy: bool = False,
    replace: bool = False,
) -> tuple[Image, Timings]:
    """Checkpoint a container into the store of this node, and tell the audit log.

    stop: the container ends with the checkpoint. keep_tcp, use, engine, full_copy: see `Wanted`. replace: an
    image of the same name gives way. Raises EngineError, ShimError; then the container runs on and the store
    is as it was.
    """
    settling.settle(config, store)
    store.recover()
    if not replace and store.has(reference):  # said again at the end, but then the dump was in vain
        raise ImageExists(
            f"could not checkpoint container '{source.container_id}': there is an image '{reference}'; "
            "choose another name, or --replace it",
            after="running",
        )
    committed: list[Image] = []

    def commit(manifest: Manifest) -> None:
        # Pending until the engine is at its end: the source may yet die, or have to run on.
        pending = settling.pending(source.container_id, source.root, source.directory)
        committed.append(store.commit(staged, reference, manifest=manifest, replace=replace, pending=pending))

    def tell(verdict: str, **more: str) -> None:
        name = str(reference)
        log.audit(
            config.store_path,
            "checkpoint",
            container=source.container_id,
            image=name,
            verdict=verdict,
            **more,
        )

    with store.staging() as staged, store.staging() as logs:
        wanted = Wanted(
            image_path=staged / layout.CHECKPOINT,
            extras_path=staged,
            work_path=logs,
            leave_running=not stop,
            keep_tcp=keep_tcp,
            rootfs="full-copy" if full_copy else "overlay",
            use=use,
            engine=engine,
        )
        try:
            _, timings = take(source, config, wanted, commit)
        except BaseException as error:
            for image in committed:
                with contextlib.suppress(EngineError, ShimError):  # not to be told now: left to `settle`
                    settling.decide(store, image, staged, source.settings, source.container_id)
            tell(f"failed: {error}")
            raise
        (image,) = committed
        failed = settling.conclude(store, image, source.settings.search_path)
        if failed and timings.dump:
            dump = replace_fields(timings.dump, warnings=(*timings.dump.warnings, *failed))
            timings = replace_fields(timings, dump=dump)
        with contextlib.suppress(OSError):  # the image is whole without them
            write_file(image.path / layout.TIMINGS, timing.encode(timings))
            for name in (layout.DUMP_LOG, layout.STATS_DUMP):
                if (logs / name).is_file():
                    write_file(image.path / name, (logs / name).read_bytes())
    timing.record(config.store_path, timings)
    warnings = "; ".join(timings.dump.warnings) if timings.dump else ""
    tell(
        "stopped" if stop else "left running",
        digest=image.digest,
        **({"warnings": warnings} if warnings else {}),
    )
    return image, timings


def _leave_logs(directory: Path, wanted: Wanted, *, failed: bool) -> None:
    """Put the engine's log and statistics where the caller looks for them.

    Not into the image's own directory after a failure: it must be empty for the next try.
    """
    if wanted.work_path is None or (failed and wanted.work_path == wanted.image_path):
        return
    wanted.work_path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (layout.DUMP_LOG, layout.STATS_DUMP):
        if (directory / WORK / name).is_file():
            write_file(wanted.work_path / name, (directory / WORK / name).read_bytes())


class _Job:
    """One checkpoint at work: the engine in this thread, the root file system in another."""

    def __init__(
        self,
        config: Config,
        source: Source,
        wanted: Wanted,
        engine: CheckpointEngine,
        spec: bundle.Spec,
        spec_data: bytes,
        finish: Finish,
        watch: Stopwatch,
        captured: identity.Capture | None,
    ) -> None:
        self.config = config
        self.source = source
        self.wanted = wanted
        self.engine = engine
        self.spec_data = spec_data
        self.finish = finish
        self.watch = watch
        self.started = log.now()
        self.mount_points = tuple(mount["destination"] for mount in spec.get("mounts") or ())
        self.rootfs_view = rootfs.find_rootfs(source.bundle_path, str(bundle.rootfs_path(Path(), spec)))
        self._rootfs: Rootfs | None = None
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._manifest: Manifest | None = None
        self._reached = False
        self._told = False  # the engine that the source may die: the image is whole
        self._runtime_version = ""
        self._host: Profile | None = None
        self._needs: Needs | None = None
        # An engine that cannot enter a namespace by path keeps its network itself.
        self._identity = captured if "external-netns" in engine.capabilities else None

    def run(self, timeout_s: float) -> DumpStats:
        """Dump, and undo on failure what lies beside the engine's part."""
        if self._keeps_rootfs() and self.rootfs_view.kind == "directory" and self.wanted.rootfs == "overlay":
            raise NotSupported(
                f"could not checkpoint container '{self.source.container_id}': its root file system "
                f"{self.rootfs_view.path} is a plain directory, so what the container changed cannot be told "
                "from what it was given; use an overlay, or --full-copy",
                after="running",
            )
        # Both not while nobody runs: tools are asked.
        self._runtime_version = _version(self.source.settings.runtime_path)
        self._host = prospects.stable(self.config)
        try:
            with self.watch.phase("engine"):
                stats = self.engine.checkpoint(
                    CheckpointRequest(
                        container_id=self.source.container_id,
                        bundle_path=self.source.bundle_path,
                        image_path=self.wanted.image_path,
                        timeout_s=timeout_s,
                        parent_path=self.wanted.parent_path,
                        leave_running=self.wanted.leave_running,
                        release_network=not self.wanted.keep_tcp,
                        on_phase=self._on_phase,
                        verdict_path=self.wanted.verdict_path,
                        extra_args=self.wanted.extra_args,
                    )
                )
            if self.wanted.leave_running:
                self._complete()
            elif self._identity and self._needs and not self.wanted.keep_tcp:
                from shim.peers import say_farewell

                say_farewell(self._identity.netns_path, self._needs)
            if self._identity:
                stats = replace_fields(stats, warnings=(*stats.warnings, *self._identity.warnings))
        except BaseException:
            self._join()
            # A caller's directory: the engine found it empty, so that all that is in it is this call's. The
            # store's staging goes by itself.
            ours = self._reached and self.wanted.extras_path.parent == self.wanted.image_path
            with contextlib.suppress(ShimError):  # not to be told: the image may be all there is
                if ours and (
                    not self._told or settling.lives(self.source.settings, self.source.container_id)
                ):
                    _empty(self.wanted.image_path)
            raise
        return stats

    def sealed(self) -> Manifest:
        """The manifest, once the checkpoint is complete."""
        if self._manifest is None:
            raise ShimError(f"the checkpoint of '{self.source.container_id}' is not complete")
        return self._manifest

    def _on_phase(self, phase: Phase, info: PhaseInfo) -> None:
        if self.wanted.on_phase is not None:
            self.wanted.on_phase(phase, info)
        self._reached = True
        # Not earlier: the engine wants its directory empty, and this may lie in it.
        self.wanted.extras_path.mkdir(mode=0o700, exist_ok=True)
        if phase == "frozen":
            self._thread = threading.Thread(target=self._copy_rootfs, name="rootfs")
            self._thread.start()
        elif phase == "dumped":
            if self._thread is None:
                self._copy_rootfs()
            with self.watch.phase("wait_for_rootfs"):
                self._join()
            if self._failure is not None:
                raise self._failure
            if not self.wanted.leave_running:
                self._complete()
                # From here on the source may die: whoever interrupts now would be left with neither.
                if self.wanted.verdict_path is None:
                    signals.too_late()
                self._told = True

    def _keeps_rootfs(self) -> bool:
        """Whether the root file system is ours to keep: some engines do it themselves."""
        return "rootfs" not in self.engine.capabilities

    def _copy_rootfs(self) -> None:
        if not self._keeps_rootfs():
            return
        if self.rootfs_view.kind == "directory" and self.wanted.rootfs == "if-overlay":
            return
        try:
            with self.watch.phase("rootfs"):
                self._rootfs = rootfs.write_diff(
                    self.rootfs_view,
                    self.wanted.extras_path,
                    mount_points=self.mount_points,
                    full_copy=self.wanted.rootfs == "full-copy",
                ).rootfs
        except BaseException as error:
            self._failure = error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _complete(self) -> None:
        """Everything that must be true before the image counts: needs told, manifest written, all on disk."""
        extras_path = self.wanted.extras_path
        with self.watch.phase("inspect"):
            needs = self._needs = self.engine.inspect(self.wanted.image_path)
        write_file(extras_path / layout.NEEDS, encode_needs(needs))
        write_file(extras_path / layout.SPEC_DUMP, self.spec_data)
        if self._identity:
            with self.watch.phase("wait_for_identity"):
                found = self._identity.document()
            if found is not None:
                write_file(extras_path / layout.NETWORK, found)
        spec = parse(self.spec_data)
        runtime = self.source.settings.runtime_path
        self._manifest = build_manifest(
            spec_data=self.spec_data,
            source=source_of(spec, container_id=self.source.container_id),
            engine=Program(name=self.engine.name, version=needs.image_version),
            runtime=Program(name=runtime.name, version=self._runtime_version),
            torpor_version=VERSION,
            leave_running=self.wanted.leave_running,
            rootfs=self._rootfs or Rootfs(kind="none"),
            host=self._host,
            use=self.wanted.use,
            keep_tcp=self.wanted.keep_tcp,
            timings=dict(self.watch.phases),
        )
        with self.watch.phase("commit"):
            self.finish(self._manifest)


def _empty(directory: Path) -> None:
    if directory.is_dir():
        for entry in directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _version(runtime_path: Path) -> str:
    first = bundle.ask_runtime(runtime_path, (), "--version").stdout.partition("\n")[0]
    return first.rpartition(" ")[2]
