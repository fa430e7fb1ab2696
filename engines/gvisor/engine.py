"""The gVisor engine: checkpoints and restores containers through the real runsc.

gVisor saves a whole sandbox, so the image of a container of a pod holds the pod. It is restored container by
container, the sandbox first, each with the same image; nothing runs before the last one. runsc kills a
container whose checkpoint fails unless it is told to leave it running; so the engine always does that, pauses
the container itself, and ends it itself once the image is complete.

Restored tasks run at once: there is no way to hold them. The phase `restored` is therefore told when the new
sandbox is there and its memory is not: nothing has run, and a veto undoes everything.

What a sandbox holds is seen by nobody outside. So what gVisor cannot save by nature (a deleted file of a
mount, an open tun device) is refused while the container is paused, and it runs on as it was.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from engines.api import (
    Capability,
    CheckpointRequest,
    DumpFailed,
    DumpStats,
    EngineSettings,
    EngineTimeout,
    Finding,
    ImageCorrupt,
    ImageExists,
    ImageIncompatible,
    ImageNotFound,
    InvalidRequest,
    Needs,
    NotSupported,
    Phase,
    PhaseInfo,
    ReleaseRequest,
    Restored,
    RestoreFailed,
    RestoreRequest,
)
from engines.forecasts import Forecast, refusal
from engines.gvisor import calls, image, judge, pod, preflight, probe, terminal
from engines.gvisor.journal import WORK, Journal
from engines.gvisor.runsc import Container, Runsc, read_spec
from engines.gvisor.undo import undo_pending
from engines.processes import start_time

_SETTLE_S = 2.0
_CAPABILITIES: frozenset[Capability] = frozenset(
    {"leave-running", "clone", "cold-start-after-failure", "phases", "rootfs"}
)


class GvisorEngine:
    """See `engines.api.CheckpointEngine`."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._runsc = Runsc(settings)
        self._work_path = settings.state_path / WORK

    @property
    def name(self) -> str:
        """The engine's name in images."""
        return "gvisor"

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What a request may ask for."""
        return _CAPABILITIES

    def probe(self) -> tuple[Finding, ...]:
        """What this node allows."""
        return probe.probe(self._settings)

    def inspect(self, image_path: Path, /) -> Needs:
        """What an image asks of a node and a spec. Raises ImageNotFound, ImageCorrupt."""
        from engines.gvisor.inspect import needs_of

        with _whole_sentences(f"could not inspect image '{image_path}'"):
            return needs_of(image.header(image_path), image.record(image_path))

    def inspect_pod(self, image_path: Path, /) -> dict[str, Needs]:
        """See `engines.pods.PodEngine`. Raises ImageNotFound, ImageCorrupt."""
        from engines.gvisor.inspect import pod_needs

        with _whole_sentences(f"could not inspect image '{image_path}'"):
            return pod_needs(image.header(image_path), image.record(image_path))

    def misfit(self, image_path: Path, spec: Mapping[str, Any], /) -> str:
        """See `engines.pods.PodEngine`. Raises ImageNotFound, ImageCorrupt."""
        return pod.misfit(_open_image(image_path, f"could not inspect image '{image_path}'")[1], spec)

    def judge(self, image_path: Path, /) -> tuple[Finding, ...]:
        """What would keep this node's runsc, as it is set up, from restoring an image.

        Raises ImageNotFound, ImageCorrupt.
        """
        head, record = _open_image(image_path, f"could not judge image '{image_path}'")
        return judge.judge(head, record, self._settings, self._runsc)

    def pre_dump(self, request: CheckpointRequest, /) -> DumpStats:
        """Raises NotSupported: gVisor cannot copy memory while the container runs."""
        raise NotSupported(
            f"could not pre-dump container '{request.container_id}': gVisor has no pre-dump; dump in one go",
            after="running",
        )

    def foresee(self, container_id: str, bundle_path: Path, /) -> Forecast:
        """What a dump would run into: kind of sandbox, exec sessions. Raises InvalidRequest."""
        words = f"could not foresee a checkpoint of container '{container_id}'"
        container = self._container(container_id, words)
        spec = read_spec(bundle_path, words)
        source = preflight.Source(self._runsc, container, spec, bundle_path / spec["root"]["path"], words)
        found: tuple[Finding, ...] = ()
        try:
            source.check_kind()
            source.check_tasks()
        except (NotSupported, DumpFailed) as error:
            found = (refusal("gvisor.foresee", error, words),)
        return Forecast(findings=found, memory_bytes=preflight.memory_bytes(container.pid))

    # --- dumps -----------------------------------------------------------------------------------------

    def checkpoint(self, request: CheckpointRequest, /) -> DumpStats:
        """Dump. Raises InvalidRequest, ImageExists, NotSupported, EngineUnavailable, DumpFailed.

        Also EngineTimeout; what on_phase raises is raised again. Options for runc in extra_args have no
        meaning to runsc and are left out.
        """
        started = time.monotonic()
        words = f"could not checkpoint container '{request.container_id}'"
        if request.verdict_path:
            raise NotSupported(f"{words}: gVisor cannot wait for a verdict; dump it without", after="running")
        if request.parent_path:
            raise NotSupported(f"{words}: gVisor has no pre-dump; dump it in one go", after="running")
        container = self._container(request.container_id, words)
        spec = read_spec(request.bundle_path, words)
        made = _check_target(request.image_path, words)
        rootfs_path = request.bundle_path / spec["root"]["path"]
        source = preflight.Source(self._runsc, container, spec, rootfs_path, words)
        source.check_kind()
        source.check_tasks()
        source.check_space(request.image_path.parent)
        journal = self._journal("checkpoint", request.container_id, request.image_path, request.bundle_path)
        journal.image_made = made
        journal.rootfs = str(rootfs_path)
        journal.sandbox, journal.sandbox_start = container.pid, start_time(container.pid)
        journal.sandbox_id = self._runsc.ids().get(request.container_id, "")
        journal.was_paused = container.status == "paused"
        compression = f"--compression={'flate-best-speed' if self._settings.compress else 'none'}"
        with calls.Guarded(journal, request.timeout_s) as guarded:
            if made:
                request.image_path.mkdir(mode=0o700)
            frozen_since = time.monotonic()
            if not journal.was_paused:
                self._run_dump(guarded, words, "pause", request.container_id)
            source.check_tasks()  # again: an exec session may have begun before the pause
            source.check_births()
            _tell(request, "frozen", container.pid)
            self._run_dump(
                guarded,
                words,
                "checkpoint",
                *("--image-path", str(request.image_path), "--leave-running", compression),
                request.container_id,
            )
            version = self._runsc.version()
            source.record(version).write(request.image_path)
            sizes = _sizes(request.image_path)
            _tell(request, "dumped", container.pid)
            # From here on the image is all that counts, if the source is not to run on.
            journal.committed = not request.leave_running
            try:
                noted = guarded.note()
            except OSError:
                journal.committed = False
                raise
            if not noted:
                journal.committed = False
                raise EngineTimeout(
                    f"{words}: the deadline passed while the image was looked after; give it more time",
                    after=guarded.undo().state,
                )
            if not request.leave_running:
                outcome = guarded.undo()  # carries it through
                if outcome.problems:
                    raise DumpFailed(
                        f"{words}: the image is complete, but {'; '.join(outcome.problems)}; end it by hand",
                        after="unknown",
                    )
            elif not journal.was_paused:
                self._run_dump(guarded, words, "resume", request.container_id)
            now = time.monotonic()
        return DumpStats(
            frozen_s=now - frozen_since,
            total_s=now - started,
            image_bytes=sum(sizes.values()),
            pages_bytes=sizes.get(image.STATE if self._settings.compress else "pages.img", 0),
            warnings=source.warnings(version),
        )

    def _run_dump(self, guarded: calls.Guarded, words: str, *argv: str) -> None:
        ended = guarded.run(*argv)
        if ended.failed:
            outcome = guarded.undo()
            log_path = self._work_path / f"{argv[0]}.log"
            kind = EngineTimeout if ended.timed_out else NotSupported if ended.by_nature else DumpFailed
            message = calls.explain(words, ended, outcome, log_path)
            raise kind(message, after=outcome.state, log_path=log_path if log_path.exists() else None)

    # --- restores --------------------------------------------------------------------------------------

    def restore(self, request: RestoreRequest, /) -> Restored:
        """Restore, into a new container or into one that is created and was never started.

        Raises InvalidRequest, NotSupported, ImageNotFound, ImageCorrupt, ImageIncompatible, RestoreFailed,
        EngineTimeout; what on_phase raises is raised again.
        """
        started = time.monotonic()
        words = f"could not restore container '{request.container_id}'"
        if request.held:
            raise NotSupported(f"{words}: gVisor cannot hold restored tasks; restore it when it may run")
        if request.tcp == "keep":
            raise NotSupported(f"{words}: gVisor cannot keep connections; let them be closed")
        head, record = _open_image(request.image_path, words)
        spec = read_spec(request.bundle_path, words)
        found = self._runsc.state(request.container_id)
        if found and found.status != "created":
            raise InvalidRequest(
                f"{words}: there is a container of this id, and it is {found.status}; delete it first or "
                "choose another id"
            )
        self._runsc.check_id(request.container_id, words)
        _refuse(judge.judge(head, record, self._settings, self._runsc), words)
        if cause := pod.misfit(record, spec):
            raise ImageIncompatible(f"{words}: {cause}; choose another image")
        journal = self._journal("restore", request.container_id, request.image_path, request.bundle_path)
        journal.rootfs = str(request.bundle_path / spec["root"]["path"])
        if found:
            journal.sandbox, journal.sandbox_start = found.pid, start_time(found.pid)
            journal.sandbox_id = self._runsc.ids().get(request.container_id, "")
        with calls.Guarded(journal, request.timeout_s) as guarded:
            if found is None:
                console = ["--console-socket", str(request.console_socket_path)]
                self._run_restore(
                    guarded,
                    words,
                    *("create", "--bundle", str(request.bundle_path)),
                    *(console if request.console_socket_path else ()),
                    request.container_id,
                    inherit=True,
                )
                found = self._container(request.container_id, words, created=True)
                journal.sandbox, journal.sandbox_start = found.pid, start_time(found.pid)
                if not guarded.note():
                    raise EngineTimeout(
                        f"{words}: the deadline passed; give it more time", after=guarded.undo().state
                    )
            if spec["process"].get("terminal"):
                self._set_terminal(guarded, words, found.pid, record.terminal)
            _tell(request, "restored", found.pid)
            since = time.monotonic()
            self._run_restore(
                guarded,
                words,
                *("restore", "--detach", "--image-path", str(request.image_path), request.container_id),
                inherit=bool(pod.name_of(spec)),  # runsc takes the streams of a pod's container only now
            )
            restore_s = time.monotonic() - since
            others = self._runsc.fellows(request.container_id)
            if 1 + sum(other.status == "running" for other in others) >= len(record.pod):
                # Of a pod none runs before the last one is there.
                self._settle(guarded, words, request.container_id)
            if request.pid_file_path:
                draft = request.pid_file_path.with_name(f".{request.pid_file_path.name}")
                draft.write_text(str(found.pid))
                draft.rename(request.pid_file_path)
        return Restored(pid=found.pid, total_s=time.monotonic() - started, restore_s=restore_s)

    def _run_restore(self, guarded: calls.Guarded, words: str, *argv: str, inherit: bool = False) -> None:
        ended = guarded.run(*argv, inherit=inherit)
        if ended.failed:
            outcome = guarded.undo()
            log_path = self._work_path / f"{argv[0]}.log"
            kind = EngineTimeout if ended.timed_out else RestoreFailed
            message = calls.explain(words, ended, outcome, log_path)
            raise kind(message, after=outcome.state, log_path=log_path if log_path.exists() else None)

    def _set_terminal(self, guarded: calls.Guarded, words: str, pid: int, settings: str) -> None:
        try:
            if settings:
                terminal.write(pid, settings)
        except (OSError, ValueError) as error:
            outcome = guarded.undo()
            raise RestoreFailed(
                f"{words}: its terminal takes no settings: {error}; give it another terminal",
                after=outcome.state,
            ) from error

    def _settle(self, guarded: calls.Guarded, words: str, container_id: str) -> None:
        """See that something runs: runsc says yes to images of which nothing ever will."""
        deadline = time.monotonic() + min(_SETTLE_S, guarded.remaining_s())
        while True:
            if self._runsc.tasks(container_id):
                return
            found = self._runsc.state(container_id)
            gone = found is None or found.status != "running"
            if gone or time.monotonic() > deadline:
                outcome = guarded.undo()
                cause = "it ended at once" if gone else "none of its processes runs"
                raise RestoreFailed(
                    f"{words}: runsc restored it, but {cause}; restore it on the node that made the image",
                    after=outcome.state,
                )
            time.sleep(0.01)

    def release(self, request: ReleaseRequest, /) -> None:
        """Raises NotSupported: nothing is ever held."""
        raise NotSupported(
            f"could not release container '{request.container_id}': gVisor holds no container; start it"
        )

    # --- undo and discard ------------------------------------------------------------------------------

    def undo(self, container_id: str, /) -> None:
        """Undo what a killed call left. Raises DumpFailed if something would not go away."""
        outcome = undo_pending(self._settings.state_path)
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

    def _journal(self, operation: str, container_id: str, image_path: Path, bundle_path: Path) -> Journal:
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
            bundle=str(bundle_path),
        )

    def _container(self, container_id: str, words: str, *, created: bool = False) -> Container:
        container = self._runsc.state(container_id)
        if container is None:
            raise InvalidRequest(f"{words}: there is no such container; look at the id and the root")
        if not created:
            if container.status not in ("running", "paused"):
                raise InvalidRequest(f"{words}: it is {container.status}; it must run", after="stopped")
            self._runsc.check_id(container_id, words)
        return container


# --- checks before anything is touched -----------------------------------------------------------------


def _open_image(image_path: Path, words: str) -> tuple[dict[str, str], image.Record]:
    """An image's header and record. Raises ImageNotFound, ImageCorrupt in whole sentences."""
    with _whole_sentences(words):
        return image.header(image_path), image.record(image_path)


@contextlib.contextmanager
def _whole_sentences(words: str) -> Generator[None]:
    try:
        yield
    except ImageNotFound as error:
        raise ImageNotFound(f"{words}: {error}; look at the path") from None
    except ImageCorrupt as error:
        raise ImageCorrupt(f"{words}: {error}; checkpoint again") from None


def _check_target(image_path: Path, words: str) -> bool:
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


def _refuse(findings: tuple[Finding, ...], words: str) -> None:
    """Raises ImageIncompatible with every refusal named."""
    refusals = [finding for finding in findings if finding.severity == "refuse"]
    if refusals:
        causes = "; ".join(finding.message for finding in refusals)
        remedies = "; ".join(dict.fromkeys(finding.remedy for finding in refusals))
        raise ImageIncompatible(f"{words}: {causes}; {remedies}")


def _tell(request: CheckpointRequest | RestoreRequest, phase: Phase, pid: int) -> None:
    if request.on_phase:
        theirs = Path(f"/proc/{pid}/ns/net")
        ours = theirs.readlink() == Path("/proc/self/ns/net").readlink()
        request.on_phase(phase, PhaseInfo(pid=pid, netns_path=None if ours else theirs, lock_table=None))


def _sizes(image_path: Path) -> dict[str, int]:
    """File names and sizes (bytes) of an image."""
    return {entry.name: entry.stat().st_size for entry in image_path.iterdir()}
