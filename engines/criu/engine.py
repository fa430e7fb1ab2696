"""The CRIU engine: dumps and restores containers through the real runc.

runc knows a container's mounts, namespaces and cgroups, so it drives CRIU; this engine adds what runc lacks:
phases that can veto, a deadline, a restored container that is held until `start`, and an undo that holds
whatever dies when.

Held: CRIU leaves the restored tasks stopped, the engine freezes their cgroup, continues them while frozen
(but those that were stopped on purpose), and `release` thaws. Nothing runs in between, and a parent that
waits for stopped children sees none; it may see one needless SIGCHLD, and a wait for continued children
(WCONTINUED) returns once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

from engines.api import (
    Capability,
    CheckpointRequest,
    DumpFailed,
    DumpStats,
    EngineSettings,
    EngineTimeout,
    EngineUnavailable,
    Finding,
    ImageCorrupt,
    ImageExists,
    ImageNotFound,
    InvalidRequest,
    Needs,
    NotSupported,
    ReleaseRequest,
    Restored,
    RestoreFailed,
    RestoreRequest,
)
from engines.criu import calls, cgroups, config, extras, foresee, mapped, probe, repair, tree, views, wire
from engines.criu.journal import Journal, mount_points, real_path
from engines.criu.phases import Script
from engines.criu.runtime import Container, Runtime
from engines.criu.stages import DumpStages, RestoreStages, sizes_of
from engines.criu.undo import Outcome, release_network, undo_pending
from engines.forecasts import Forecast, refusal
from engines.processes import start_time

_LOG_BYTES = 1 << 20
_CAPABILITIES: frozenset[Capability] = frozenset(
    {
        "leave-running",
        "pre-dump",
        "tcp-established",
        "external-netns",
        "clone",
        "held-restore",
        "cold-start-after-failure",
        "phases",
        "verdict",
    }
)


class CriuEngine:
    """See `engines.api.CheckpointEngine`."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._runtime = Runtime(settings)
        self._work_path = settings.state_path / "work"

    @property
    def name(self) -> str:
        """The engine's name in images."""
        return "criu"

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What a request may ask for."""
        return _CAPABILITIES

    def probe(self) -> tuple[Finding, ...]:
        """What this node allows."""
        return probe.probe(self._settings)

    def inspect(self, image_path: Path, /) -> Needs:
        """What an image asks of a node and a spec. Raises ImageNotFound, ImageCorrupt."""
        from engines.criu.inspect import inspect

        return inspect(image_path, self._settings.python_path)

    def foresee(self, container_id: str, bundle_path: Path, /) -> Forecast:
        """What a dump would run into, from /proc alone. Raises InvalidRequest."""
        from engines.criu.forecast import forecast

        words = f"could not foresee a checkpoint of container '{container_id}'"
        container = self._container(container_id, words)
        groups = cgroups.of_container(self._settings.root_path, container.id, container.pid)
        told = forecast(container, bundle_path, groups)
        try:
            self._check_node(words, container.annotations.get(config.ANNOTATION))
            _check_stopped(groups, cgroups.freezer(groups), words)
        except (EngineUnavailable, NotSupported) as error:
            return replace(told, findings=(refusal("criu.foresee.state", error, words), *told.findings))
        return told

    # --- dumps -----------------------------------------------------------------------------------------

    def pre_dump(self, request: CheckpointRequest, /) -> DumpStats:
        """Copy memory while the container runs. Raises NotSupported without soft-dirty tracking."""
        if not probe.tracks_memory(self._settings):
            raise NotSupported(
                f"could not pre-dump container '{request.container_id}': this kernel cannot track dirty "
                "memory (CONFIG_MEM_SOFT_DIRTY is off); dump it in one go",
                after="running",
            )
        return self._dump(request, "pre-dump")

    def checkpoint(self, request: CheckpointRequest, /) -> DumpStats:
        """Dump. Raises InvalidRequest, ImageExists, EngineUnavailable, NotSupported, DumpFailed.

        Also EngineTimeout. What on_phase raises is raised again.
        """
        return self._dump(request, "checkpoint")

    def _dump(self, request: CheckpointRequest, operation: str) -> DumpStats:
        started = time.monotonic()
        words = f"could not {operation} container '{request.container_id}'"
        container = self._container(request.container_id, words)
        self._check_node(words, container.annotations.get(config.ANNOTATION))
        made = check_target(request.image_path, words)
        groups = cgroups.of_container(self._settings.root_path, container.id, container.pid)
        freezer = cgroups.freezer(groups)
        was_frozen = freezer is not None and freezer.is_frozen()
        _check_stopped(groups, freezer, words)
        journal = self._journal(operation, request.container_id, request.image_path)
        if request.verdict_path:
            journal.verdict_path = str(request.verdict_path)
            _check_verdict(request, journal, freezer, words)
        outlook = foresee.look(container.pid, request.bundle_path)
        if outlook.findings:
            after = "paused" if was_frozen else "running"
            raise NotSupported(f"{words}: {outlook.sentence()}", after=after)
        journal.image_made = made
        journal.init, journal.init_start = container.pid, start_time(container.pid)
        journal.groups, journal.was_frozen = groups, was_frozen
        journal.netns = self._runtime.bundle(request.bundle_path, words).netns
        argv = ["checkpoint", "--image-path", str(request.image_path), "--work-path", str(self._work_path)]
        if request.parent_path:
            # runc wants it relative to the image; CRIU stores it as a link.
            argv += ["--parent-path", os.path.relpath(request.parent_path, request.image_path)]
        if operation == "pre-dump":
            argv += ["--pre-dump"]
        elif request.leave_running:
            argv += ["--leave-running"]
        argv += [*config.DUMP_FLAGS, *request.extra_args, request.container_id]
        phases = DumpStages(
            request, journal, container, freezer, quiet=operation == "pre-dump", outlook=outlook
        )
        if operation == "checkpoint":
            # Whoever is told `dumped` reads the image while nobody runs: load beforehand what that needs.
            threading.Thread(target=self._load, name="load", daemon=True).start()
        kept = freezer if journal.verdict_path else None
        with (
            calls.Guarded(journal, request.timeout_s) as guarded,
            Script(journal.verdict_path, kept) as script,
        ):
            if made:
                request.image_path.mkdir(mode=0o700)
            text = config.dump_config(script.path, watched=outlook.watched, outside=outlook.outside)
            Path(journal.config_path).write_bytes(os.fsencode(text))
            ended = self._run(argv, guarded, script, phases, inherit=False)
            if ended.returncode or ended.timed_out or ended.refused:
                outcome = guarded.undo()
                if not outcome.completed:
                    self._raise_dump(words, ended, outcome)
            else:
                if freezer and not was_frozen:
                    freezer.thaw()
                outcome = Outcome(state="running" if request.leave_running else "stopped")
                release_network(journal, outcome)
            # Our freeze is around CRIU's, which its statistics tell.
            frozen_s = time.monotonic() - phases.frozen_since if phases.frozen_since else 0.0
            stats = wire.dump_numbers(self._work_path)
            calls.cap(self._work_path / "dump.log", limit_bytes=_LOG_BYTES)
        # The image is there, whatever else is left of the source.
        warnings = tuple(f"container '{container.id}' was dumped, but {p}" for p in outcome.problems)
        sizes = phases.sizes or sizes_of(request.image_path)
        total_s = time.monotonic() - started
        if stats is None:
            return DumpStats(
                frozen_s=frozen_s, total_s=total_s, image_bytes=sum(sizes.values()), warnings=warnings
            )
        return DumpStats(
            frozen_s=frozen_s or stats.frozen_s,
            total_s=total_s,
            image_bytes=sum(sizes.values()),
            pages_bytes=sum(size for name, size in sizes.items() if name.startswith("pages-")),
            freezing_s=stats.freezing_s,
            memdump_s=stats.memdump_s,
            memwrite_s=stats.memwrite_s,
            pages_scanned=stats.pages_scanned,
            pages_written=stats.pages_written,
            warnings=warnings,
        )

    def _load(self) -> None:
        from engines.criu import inspect

        with contextlib.suppress(EngineUnavailable):
            inspect.load_all(self._settings.python_path)

    def _raise_dump(self, words: str, ended: calls.Ended, outcome: Outcome) -> None:
        if ended.refused:
            raise ended.refused
        if outcome.held:
            raise _undecided(words)
        message, log_path = self._explain(words, "dump.log", ended)
        kind = EngineTimeout if ended.timed_out else DumpFailed
        raise kind(message, after=outcome.state, log_path=log_path)

    # --- restores --------------------------------------------------------------------------------------

    def restore(self, request: RestoreRequest, /) -> Restored:
        """Restore. Raises InvalidRequest, ImageNotFound, ImageCorrupt, EngineUnavailable, RestoreFailed.

        Also EngineTimeout; what on_phase raises is raised again.
        """
        started = time.monotonic()
        words = f"could not restore container '{request.container_id}'"
        noted = _check_image(request.image_path, words)
        bundle = self._runtime.bundle(request.bundle_path, words)
        if self._runtime.exists(request.container_id):
            raise InvalidRequest(
                f"{words}: there is a container of this id; delete it first or choose another id",
                after="unknown",
            )
        self._check_node(words, bundle.annotations.get(config.ANNOTATION))
        journal = self._journal("restore", request.container_id, request.image_path)
        mapped.admit(request.image_path, bundle.root_id, words)
        journal.rootfs = real_path(bundle.rootfs_path)
        state = str(self._settings.root_path / request.container_id)
        journal.mounts = mount_points(journal.rootfs, state)
        journal.netns = bundle.netns
        journal.new_groups = cgroups.foreseen(bundle.cgroups_path, request.container_id)
        pid_path = self._work_path / "init.pid"
        argv = ["restore", "--detach", "--image-path", str(request.image_path)]
        argv += ["--work-path", str(self._work_path), "--bundle", str(request.bundle_path)]
        argv += ["--pid-file", str(pid_path), "--file-locks", "--manage-cgroups-mode", "ignore"]
        if request.tcp == "keep":
            argv += ["--tcp-established"]
        if request.console_socket_path:
            argv += ["--console-socket", str(request.console_socket_path)]
        argv += [*request.extra_args, request.container_id]
        phases = RestoreStages(request, journal, bundle, noted)
        with calls.Guarded(journal, request.timeout_s) as guarded, Script() as script:
            text = config.restore_config(
                script.path,
                held=request.held,
                tcp=request.tcp,
                outside=views.outside(bundle.cgroup_views),
            )
            Path(journal.config_path).write_text(text)
            ended = self._run(argv, guarded, script, phases, inherit=True)
            if ended.returncode or ended.timed_out or ended.refused:
                self._raise_restore(words, ended, guarded.undo())
            pid = int(pid_path.read_text())
            if request.held and not self._hold(request, pid, guarded.remaining_s()):
                outcome = guarded.undo()
                raise RestoreFailed(
                    f"{words}: its cgroup did not freeze, so that it could not be held; see the kernel's log",
                    after=outcome.state,
                )
            numbers = wire.restore_numbers(self._work_path)
            calls.cap(self._work_path / "restore.log", limit_bytes=_LOG_BYTES)
            if request.pid_file_path:
                draft = request.pid_file_path.with_name(f".{request.pid_file_path.name}")
                draft.write_text(str(pid))
                draft.rename(request.pid_file_path)
        total_s = time.monotonic() - started
        if numbers is None:
            return Restored(pid=pid, total_s=total_s)
        return Restored(
            pid=pid,
            total_s=total_s,
            restore_s=numbers.restore_s,
            forking_s=numbers.forking_s,
            pages_restored=numbers.pages_restored,
        )

    def _raise_restore(self, words: str, ended: calls.Ended, outcome: Outcome) -> None:
        if ended.refused:
            raise ended.refused
        message, log_path = self._explain(words, "restore.log", ended)
        kind = EngineTimeout if ended.timed_out else RestoreFailed
        raise kind(message, after=outcome.state, log_path=log_path)

    def _hold(self, request: RestoreRequest, pid: int, timeout_s: float) -> bool:
        """Freeze the restored tasks, which CRIU left stopped, and then take the stop away."""
        groups = cgroups.of_container(self._settings.root_path, request.container_id, pid)
        freezer = cgroups.freezer(groups)
        if freezer is None or not freezer.freeze(timeout_s=timeout_s):
            return False
        stay = wire.stopped_pids(request.image_path)
        for task in cgroups.tasks(cgroups.strictly_own(groups)):
            if tree.inner(task) not in stay:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(task, signal.SIGCONT)
        return True

    def release(self, request: ReleaseRequest, /) -> None:
        """Let a held container run. Raises InvalidRequest if it is not held."""
        words = f"could not release container '{request.container_id}'"
        # Without asking runc, if that can be: now nobody runs.
        groups = cgroups.noted(self._settings.root_path, request.container_id)
        if not groups:
            container = self._container(request.container_id, words)
            groups = cgroups.of_container(self._settings.root_path, container.id, container.pid)
        freezer = cgroups.freezer(groups)
        if freezer is None or not freezer.is_frozen():
            raise InvalidRequest(f"{words}: it is not held; start it only once", after="running")
        repair.call_peers(cgroups.tasks(cgroups.strictly_own(groups)))
        freezer.thaw()

    # --- undo and discard ------------------------------------------------------------------------------

    def undo(self, container_id: str, /) -> None:
        """Undo what a killed call left. Raises DumpFailed if something would not go away, or must not yet."""
        outcome = undo_pending(self._settings.state_path)
        if outcome and outcome.held:
            raise _undecided(f"could not undo a call for container '{container_id}'")
        if outcome and outcome.problems:
            problems = "; ".join(outcome.problems)
            raise DumpFailed(
                f"could not undo a call for container '{container_id}': {problems}; remove it by hand",
                after=outcome.state,
            )

    def discard(self, image_path: Path, /) -> None:
        """Remove an image directory. Idempotent."""
        if image_path.is_symlink():
            image_path.unlink()
        elif image_path.exists():
            shutil.rmtree(image_path)

    # --- shared ----------------------------------------------------------------------------------------

    def _journal(self, operation: str, container_id: str, image_path: Path) -> Journal:
        """A journal for a call that begins; an earlier one that died is undone first."""
        self._settings.state_path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.undo(container_id)
        shutil.rmtree(self._work_path, ignore_errors=True)
        self._work_path.mkdir(mode=0o700)
        return Journal(
            operation=operation,
            container_id=container_id,
            runtime=str(self._settings.runtime_path),
            runtime_args=list(self._settings.runtime_args),
            root=str(self._settings.root_path),
            state=str(self._settings.state_path),
            search_path=self._settings.search_path,
            image=str(image_path),
        )

    def _container(self, container_id: str, words: str) -> Container:
        container = self._runtime.state(container_id)
        if container is None:
            raise InvalidRequest(f"{words}: there is no such container; look at the id and the root")
        if container.status not in ("running", "paused"):
            raise InvalidRequest(f"{words}: it is {container.status}; it must run", after="stopped")
        return container

    def _check_node(self, words: str, annotated: str | None) -> None:
        for finding in (*probe.tools(self._settings), *config.check_system(annotated)):
            if finding.severity == "refuse":
                raise EngineUnavailable(f"{words}: {finding.message}; {finding.remedy}", after="running")

    def _run(
        self,
        argv: list[str],
        guarded: calls.Guarded,
        script: Script,
        phases: DumpStages | RestoreStages,
        *,
        inherit: bool,
    ) -> calls.Ended:
        """Run the runtime, again without the flags that an older one does not know."""
        log_path = self._work_path / "runtime.log"
        while True:
            whole = self._runtime.argv("--log", str(log_path), "--log-format", "json", *argv)
            ended = calls.run(
                whole, guarded, script, phases.stage, on_criu_end=phases.criu_ended, inherit=inherit
            )
            unknown = self._runtime.unknown_flag(log_path) if ended.returncode else None
            if unknown is None or unknown not in argv:
                return ended
            argv = [word for word in argv if word != unknown]
            log_path.unlink()

    def _explain(self, words: str, log_name: str, ended: calls.Ended) -> tuple[str, Path | None]:
        log_path = self._work_path / log_name
        calls.cap(log_path, limit_bytes=_LOG_BYTES)
        cause = calls.criu_error(log_path) or calls.runtime_error(self._work_path / "runtime.log")
        cause = " ".join(cause.split()) or f"the runtime ended with status {ended.returncode}"
        todo = calls.advice(cause)
        if ended.timed_out:
            cause = f"the deadline passed (last: {cause})"
            todo = "give it more time, or see the log for where it hangs"
        found = log_path if log_path.exists() else None
        where = f" (log: {log_path})" if found else ""
        return f"{words}: {cause}{where}; {todo}", found


# --- checks before anything is touched -----------------------------------------------------------------


def check_target(image_path: Path, words: str) -> bool:
    """Whether the image directory must be made. Raises ImageExists, InvalidRequest."""
    if not image_path.is_absolute():
        raise InvalidRequest(f"{words}: the image path {image_path} is not absolute; give it in full")
    if image_path.is_symlink():
        raise InvalidRequest(f"{words}: {image_path} is a link; name the directory itself")
    if not image_path.exists():
        if not image_path.parent.is_dir():
            raise InvalidRequest(f"{words}: {image_path.parent} is no directory; make it first")
        return True
    if not image_path.is_dir() or any(image_path.iterdir()):
        raise ImageExists(f"{words}: there is something at {image_path}; choose another path or remove it")
    return False


def _check_verdict(
    request: CheckpointRequest, journal: Journal, freezer: cgroups.Freezer | None, words: str
) -> None:
    """Raises InvalidRequest, NotSupported."""
    path = Path(journal.verdict_path)
    # Who asks it last has another working directory, or none of this call's processes lives.
    if not path.is_absolute() or journal.verdict() != "abort":
        raise InvalidRequest(
            f"{words}: {path} is no place for a verdict, which is yet to come; give an absolute path to none",
            after="running",
        )
    if request.leave_running or request.on_phase is None:
        raise InvalidRequest(
            f"{words}: a verdict is for a dump with phases that ends its source", after="running"
        )
    if freezer is None:
        raise NotSupported(f"{words}: it has no cgroup in which it could be kept frozen", after="running")


def _undecided(words: str) -> DumpFailed:
    return DumpFailed(
        f"{words}: whoever checkpoints it has yet to decide what becomes of it; decide there first",
        after="paused",
        undone=False,
    )


def _check_image(image_path: Path, words: str) -> extras.Extras | None:
    """What it notes beside CRIU's images. Raises ImageNotFound, ImageCorrupt."""
    if not image_path.is_dir():
        raise ImageNotFound(f"{words}: there is no image at {image_path}; look at the path")
    try:
        wire.first_entry(image_path / "inventory.img", magics=1)
        return extras.read(image_path)
    except (OSError, ValueError) as error:
        raise ImageCorrupt(
            f"{words}: {image_path} holds no whole CRIU image ({error}); dump again"
        ) from error


def _check_stopped(groups: cgroups.Groups, freezer: cgroups.Freezer | None, words: str) -> None:
    """Refuse what would hang: under a cgroup v1 freezer CRIU waits for ever for a task in SIGSTOP."""
    if freezer is None or not freezer.v1:
        return
    for pid in cgroups.tasks(groups):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/status").read_text(errors="replace")
            if "\nState:\tT (stopped)" in text:
                name = text.partition("\n")[0].removeprefix("Name:\t")
                raise NotSupported(
                    f"{words}: process {pid} ('{name}') is stopped by a signal, which CRIU cannot dump under "
                    "a cgroup v1 freezer; continue it (SIGCONT) or end it, then try again",
                    after="running",
                )
