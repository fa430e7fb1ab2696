"""The CRIU+CUDA engine: CRIU for the processes, the GPU driver for what they have on GPUs.

A dump has two stages: the driver moves the GPU memory of all processes into host memory, then CRIU dumps
them. A restore goes the other way, and its last stage comes when the container runs (`release`): the
driver's part inside a process needs the process to run. Until then every call of the GPU waits.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path

from engines.api import (
    After,
    Capability,
    CheckpointRequest,
    DumpFailed,
    DumpStats,
    EngineError,
    EngineSettings,
    EngineTimeout,
    EngineUnavailable,
    Finding,
    GpuProcess,
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
from engines.criu import cgroups
from engines.criu.engine import CriuEngine, check_target
from engines.cuda import devices, holders, node, records, stage
from engines.cuda.devices import Unfit
from engines.cuda.driver import Driver, Way
from engines.cuda.node import Found
from engines.cuda.records import Asleep, Call, Holder
from engines.cuda.stage import Known, StageFailed
from engines.cuda.undo import Guarded, undo_pending
from engines.forecasts import Forecast, refusal
from engines.processes import start_time

NAME = "criu-cuda"
_FREEZE_S = 5.0
_CAPABILITIES: frozenset[Capability] = frozenset(
    {
        "leave-running",
        "tcp-established",
        "external-netns",
        "clone",
        "held-restore",
        "cold-start-after-failure",
        "phases",
        "gpu",
    }
)


class CudaEngine:
    """See `engines.api.CheckpointEngine` and `GpuEngine`. way: how the driver is called, None for any."""

    def __init__(self, settings: EngineSettings, way: Way | None = None) -> None:
        self._settings = settings
        self._way: Way | None = way
        self._criu = CriuEngine(settings)

    @property
    def name(self) -> str:
        """The engine's name in images."""
        return NAME

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What a request may ask for."""
        return _CAPABILITIES

    def probe(self) -> tuple[Finding, ...]:
        """What this node allows."""
        return (*node.probe(self._settings, self._way), *self._criu.probe())

    def inspect(self, image_path: Path, /) -> Needs:
        """What an image asks of a node and a spec. Raises ImageNotFound, ImageCorrupt."""
        needs = self._criu.inspect(image_path)
        return replace(needs, engine=NAME, gpus=records.read_image(image_path).needs)

    def judge(self, image_path: Path, /) -> tuple[Finding, ...]:
        """Whether this node has GPUs for an image; those of its container are looked at by `restore`."""
        asleep = records.read_image(image_path)
        if not asleep.holders:
            return ()
        try:
            _, here = node.find_driver(self._settings, self._way, "could not use GPUs")
            devices.assign(asleep.needs, here.gpus, here.driver)
        except EngineUnavailable as error:
            cause, _, remedy = str(error).rpartition("; ")
            return (Finding(rule="gpu.driver", severity="refuse", message=cause, remedy=remedy),)
        except Unfit as error:
            remedy = "restore on a node with such GPUs"
            return (Finding(rule="gpu.fit", severity="refuse", message=str(error), remedy=remedy),)
        return ()

    def foresee(self, container_id: str, bundle_path: Path, /) -> Forecast:
        """What a dump would run into; GPU memory goes into host memory first. Raises InvalidRequest."""
        told = self._criu.foresee(container_id, bundle_path)
        # Device files of GPUs are closed by the driver before CRIU comes.
        kept = tuple(finding for finding in told.findings if finding.rule != "criu.foresee.device")
        words = f"could not foresee a checkpoint of container '{container_id}'"
        try:
            found = node.find(self._settings, self._way, container_id, words, moving=True)
        except (EngineUnavailable, NotSupported) as error:
            return replace(told, findings=(refusal("gpu.foresee", error, words), *kept))
        on_gpu = sum(size for process in found.processes for size in process.gpus.values())
        return replace(told, findings=kept, memory_bytes=told.memory_bytes + on_gpu)

    # --- dumps -----------------------------------------------------------------------------------------

    def pre_dump(self, request: CheckpointRequest, /) -> DumpStats:
        """Raises NotSupported: memory on a GPU cannot be copied beforehand."""
        raise NotSupported(
            f"could not pre-dump container '{request.container_id}': what is on a GPU cannot be copied while "
            "it is used; dump it in one go",
            after="running",
        )

    def checkpoint(self, request: CheckpointRequest, /) -> DumpStats:
        """Dump. Raises InvalidRequest, ImageExists, EngineUnavailable, NotSupported, DumpFailed.

        Also EngineTimeout. What on_phase raises is raised again.
        """
        started = time.monotonic()
        words = f"could not checkpoint container '{request.container_id}'"
        if request.verdict_path:
            raise NotSupported(f"{words}: a GPU cannot wait for a verdict; dump it without", after="running")
        if request.parent_path:
            raise NotSupported(f"{words}: it cannot follow a pre-dump; dump it in one go", after="running")
        node.find_container(self._settings, request.container_id, words)
        made = check_target(request.image_path, words)
        self._begin(request.container_id)
        found = node.find(self._settings, self._way, request.container_id, words, moving=True)
        deadline = started + request.timeout_s

        def on_phase(phase: Phase, info: PhaseInfo) -> None:
            # Only now: CRIU wants its directory empty, and whoever is told `dumped` reads the image.
            if phase == "dumped":
                records.write_asleep(request.image_path / records.IN_IMAGE, found.asleep)
            if request.on_phase:
                request.on_phase(phase, info)

        call = self._call("checkpoint", found, found.running())
        call.image, call.image_made = str(request.image_path), made
        with self._off_gpu(found, call, words, deadline):
            gpu_s = time.monotonic() - started
            left_s = max(0.5, deadline - time.monotonic())
            stats = self._criu.checkpoint(replace(request, on_phase=on_phase, timeout_s=left_s))
            if request.leave_running:
                self._on_gpu(found, words)
            else:
                records.remove(Path(call.suspended))
        return replace(stats, gpu_s=gpu_s if found.running() else 0.0, total_s=time.monotonic() - started)

    # --- the GPU's stage -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _off_gpu(self, found: Found, call: Call, words: str, deadline: float) -> Generator[None]:
        """The container's GPU memory is in host memory in the body; if that fails, it is as it was before."""
        processes = found.running()
        if not processes:
            yield
            return
        state_path = self._settings.state_path
        records.write_asleep(Path(call.suspended), found.asleep)
        guarded = Guarded(state_path, call)
        try:
            with guarded:
                if found.freezer and found.frozen:
                    found.freezer.thaw()  # a lock needs the process to run
                stage.take(found.driver, processes, deadline=deadline)
                self._refuse_left_open(processes)
                if found.freezer and found.frozen and not found.freezer.freeze(timeout_s=_FREEZE_S):
                    raise DumpFailed(f"{words}: its cgroup did not freeze again; see the kernel's log")
                yield
        except StageFailed as error:
            kind = EngineTimeout if error.late else DumpFailed
            raise kind(
                f"{words}: {error}{_undone(guarded)}; {_advice(found, error)}", after=_after(found, guarded)
            ) from error
        except holders.Refused as error:
            raise NotSupported(f"{words}: {error}{_undone(guarded)}", after=_after(found, guarded)) from error
        except EngineError as error:
            if guarded.problems:
                raise DumpFailed(f"{error}{_undone(guarded)}; try `torpor gpu resume`") from error
            raise
        except BaseException as error:
            if guarded.problems:
                error.add_note(f"the GPUs of container '{found.container.id}'{_undone(guarded)}")
            raise

    def _on_gpu(self, found: Found, words: str) -> None:
        """Give the container its GPU memory back after a dump that left it running."""
        if not (processes := found.running()):
            return
        if found.freezer and found.frozen:
            found.freezer.thaw()
        stage.bring(found.driver, processes, {}, deadline=time.monotonic() + stage.UNDO_S)
        records.remove(self._settings.root_path / found.container.id / records.SUSPENDED)
        if found.freezer and found.frozen and not found.freezer.freeze(timeout_s=_FREEZE_S):
            raise DumpFailed(f"{words}: its cgroup did not freeze again; see the kernel's log")

    def _refuse_left_open(self, processes: list[Known]) -> None:
        """What the driver did not let go of, CRIU cannot dump."""
        for pid, _ in processes:
            if left := holders.open_devices(pid):
                raise holders.Refused(
                    f"process {pid} ('{holders.comm(pid)}') still has {', '.join(left)} open after its GPU "
                    "memory was moved, as with graphics or unified memory; stop what uses it"
                )

    # --- restores --------------------------------------------------------------------------------------

    def restore(self, request: RestoreRequest, /) -> Restored:
        """Restore. Raises what the CRIU engine raises, and ImageIncompatible if the GPUs do not fit."""
        started = time.monotonic()
        words = f"could not restore container '{request.container_id}'"
        if not request.image_path.is_dir():
            raise ImageNotFound(f"{words}: there is no image at {request.image_path}; look at the path")
        asleep = records.read_image(request.image_path)
        self._begin(request.container_id)
        held_path = self._settings.state_path / records.HELD
        records.remove(held_path)
        if not asleep.holders:
            return self._criu.restore(request)
        driver, here = node.find_driver(self._settings, self._way, words)
        try:
            spec = json.loads((request.bundle_path / "config.json").read_bytes())
            pairs = devices.assign(asleep.needs, devices.given(spec, here), here.driver)
        except Unfit as error:
            raise ImageIncompatible(
                f"{words}: {error}; restore on a node with such GPUs, or give the container more of them",
                after="stopped",
            ) from error
        except (OSError, ValueError, AttributeError) as error:
            raise InvalidRequest(
                f"{words}: {request.bundle_path} is no bundle ({error!r}); look at the path"
            ) from error
        records.write_asleep(held_path, replace(asleep, pairs=pairs))
        frame = contextlib.ExitStack()
        watched: list[Guarded] = []

        def on_phase(phase: Phase, info: PhaseInfo) -> None:
            if phase == "restored" and not request.held:
                # CRIU's guardian goes when CRIU's part is over: from then on this one ends what nobody would
                # let run.
                groups = cgroups.strictly_own(cgroups.of_process(info.pid))
                guarded = self._guarded("restore", request.container_id, groups, driver)
                watched.append(frame.enter_context(guarded))
            if request.on_phase:
                request.on_phase(phase, info)

        try:
            with frame:
                restored = self._criu.restore(replace(request, held=True, on_phase=on_phase))
                for guarded in watched:
                    guarded.call.groups = self._groups(request.container_id, restored.pid)
                    self._bring(guarded, started + request.timeout_s)
        except BaseException as error:
            records.remove(held_path)
            if request.pid_file_path:
                request.pid_file_path.unlink(missing_ok=True)
            if isinstance(error, StageFailed):
                raise _not_brought(error, watched[0], words) from error
            raise
        return replace(restored, total_s=time.monotonic() - started)

    def release(self, request: ReleaseRequest, /) -> None:
        """Let a held container run, and give it its GPUs.

        Raises InvalidRequest if it is not held. Also RestoreFailed, EngineTimeout; then the container is
        killed, since it would wait for its GPU for ever.
        """
        words = f"could not release container '{request.container_id}'"
        if not (self._settings.state_path / records.HELD).exists():
            self._criu.release(request)
            return
        deadline = time.monotonic() + request.timeout_s
        container = node.find_container(self._settings, request.container_id, words)
        driver, _ = node.find_driver(self._settings, self._way, words)
        groups = self._groups(request.container_id, container.pid)
        guarded = self._guarded("release", request.container_id, groups, driver)
        try:
            with guarded:
                self._bring(guarded, deadline)
        except StageFailed as error:
            raise _not_brought(error, guarded, words) from error

    def _guarded(self, operation: str, container_id: str, groups: cgroups.Groups, driver: Driver) -> Guarded:
        """The frame of a call that lets a restored container run."""
        asleep = self._held()
        call = Call(
            operation=operation,
            container_id=container_id,
            runtime=self._runtime(),
            search_path=self._settings.search_path,
            driver=driver,
            groups=groups,
            was_frozen=False,
            processes=_locate(groups, asleep.holders),
            pairs=asleep.pairs,
        )
        return Guarded(self._settings.state_path, call)

    def _held(self) -> Asleep:
        found = records.read_asleep(self._settings.state_path / records.HELD)
        return found or Asleep(holders=(), needs=())

    def _groups(self, container_id: str, pid: int) -> cgroups.Groups:
        return cgroups.of_container(self._settings.root_path, container_id, pid)

    def _bring(self, guarded: Guarded, deadline: float) -> None:
        """Let a restored container run, and give it its GPUs. Raises StageFailed; then it is to be killed."""
        call = guarded.call
        call.processes = _locate(call.groups, self._held().holders)
        guarded.become(call.operation)
        freezer = cgroups.freezer(call.groups)
        if freezer:
            freezer.thaw()
        try:
            stage.bring(call.driver, call.processes, call.pairs, deadline=deadline)
        except StageFailed:
            if call.operation == "release":
                guarded.become("end")
            raise
        records.remove(self._settings.state_path / records.HELD)

    # --- hot swap --------------------------------------------------------------------------------------

    def gpu_processes(self, container_id: str, /) -> tuple[GpuProcess, ...]:
        """Who uses a GPU in a container. Raises EngineError."""
        words = f"could not look at the GPUs of container '{container_id}'"
        return _told(node.find(self._settings, self._way, container_id, words))

    def suspend(self, container_id: str, /, *, timeout_s: float) -> tuple[GpuProcess, ...]:
        """Move the GPU memory of a container into host memory. See `GpuEngine`."""
        words = f"could not suspend the GPUs of container '{container_id}'"
        deadline = time.monotonic() + timeout_s
        self._begin(container_id)
        found = node.find(self._settings, self._way, container_id, words, moving=True)
        if not found.running():
            cause = "they are suspended" if found.processes else "none of its processes uses a GPU"
            raise InvalidRequest(f"{words}: {cause}; see `torpor gpu ps`", after="running")
        with self._off_gpu(found, self._call("suspend", found, found.running()), words, deadline):
            pass
        return tuple(replace(process, state="suspended") for process in _told(found))

    def resume(
        self, container_id: str, /, *, timeout_s: float, pairs: Mapping[str, str]
    ) -> tuple[GpuProcess, ...]:
        """Move it back. See `GpuEngine`."""
        words = f"could not resume the GPUs of container '{container_id}'"
        deadline = time.monotonic() + timeout_s
        self._begin(container_id)
        found = node.find(self._settings, self._way, container_id, words)
        sleepers = [(p.pid, p.start) for p in found.processes if p.state == "checkpointed"]
        if not sleepers:
            raise InvalidRequest(f"{words}: they are not suspended; see `torpor gpu ps`", after="running")
        try:
            # Without a wish no map: the driver then puts everything back where it was.
            whole = devices.swap(found.asleep.needs, pairs, found.node) if pairs else {}
        except Unfit as error:
            raise InvalidRequest(f"{words}: {error}; see `torpor gpu ps`", after="running") from error
        guarded = Guarded(self._settings.state_path, self._call("resume", found, sleepers, whole))
        try:
            with guarded:
                if found.freezer and found.frozen:
                    found.freezer.thaw()
                stage.bring(found.driver, sleepers, whole, deadline=deadline)
                records.remove(Path(guarded.call.suspended))
                if found.freezer and found.frozen:
                    found.freezer.freeze(timeout_s=_FREEZE_S)
        except StageFailed as error:
            kind = EngineTimeout if error.late else RestoreFailed
            raise kind(
                f"{words}: {error}{_undone(guarded)}, so they stay suspended; make room on the GPU or name "
                "another one, then try again",
                after="paused" if found.frozen else "running",
            ) from error
        return tuple(
            replace(process, state="running", gpus={whole.get(u, u): n for u, n in process.gpus.items()})
            for process in _told(found)
        )

    # --- undo and discard ------------------------------------------------------------------------------

    def undo(self, container_id: str, /) -> None:
        """Undo what a killed call left. Raises DumpFailed if something would not go away."""
        if problems := undo_pending(self._settings.state_path):
            raise DumpFailed(
                f"could not undo a call for container '{container_id}': {'; '.join(problems)}; try `torpor "
                "gpu resume`, or remove it by hand"
            )

    def discard(self, image_path: Path, /) -> None:
        """Remove an image directory. Idempotent."""
        self._criu.discard(image_path)

    # --- shared ----------------------------------------------------------------------------------------

    def _begin(self, container_id: str) -> None:
        """A place for records; an earlier call that died is undone first."""
        self._settings.state_path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.undo(container_id)

    def _runtime(self) -> list[str]:
        settings = self._settings
        return [str(settings.runtime_path), *settings.runtime_args, "--root", str(settings.root_path)]

    def _call(
        self, operation: str, found: Found, processes: list[Known], pairs: Mapping[str, str] | None = None
    ) -> Call:
        return Call(
            operation=operation,
            container_id=found.container.id,
            runtime=self._runtime(),
            search_path=self._settings.search_path,
            driver=found.driver,
            groups=found.groups,
            was_frozen=found.frozen,
            processes=processes,
            pairs=dict(pairs or {}),
            suspended=str(self._settings.root_path / found.container.id / records.SUSPENDED),
        )


def _locate(groups: cgroups.Groups, wanted: tuple[Holder, ...]) -> list[Known]:
    """The processes of a restored container that had a GPU, by their ids inside it."""
    inside = {holder.inner for holder in wanted}
    return [(pid, start_time(pid)) for pid in cgroups.tasks(groups) if holders.inner_pids(pid) in inside]


def _told(found: Found) -> tuple[GpuProcess, ...]:
    return tuple(
        GpuProcess(
            pid=process.pid,
            comm=process.comm,
            state="suspended" if process.state == "checkpointed" else "running",
            gpus=process.gpus,
        )
        for process in found.processes
    )


def _not_brought(error: StageFailed, guarded: Guarded, words: str) -> EngineError:
    """A container did not get its GPUs back and was killed. Made when that is over."""
    kind = EngineTimeout if error.late else RestoreFailed
    return kind(
        f"{words}: {error}, so it was killed{_undone(guarded)}; see that its GPUs have room "
        "(`torpor gpu suspend` makes some), then restore again",
        after="stopped",
        undone=not guarded.problems,
    )


def _undone(guarded: Guarded) -> str:
    return f"; could not undo: {'; '.join(guarded.problems)}" if guarded.problems else ""


def _after(found: Found, guarded: Guarded) -> After:
    if guarded.problems:
        return "unknown"
    return "paused" if found.frozen else "running"


def _advice(found: Found, error: StageFailed) -> str:
    """What to do about a stage that failed; who else is on the same GPUs may be what it waited for."""
    if not error.late:
        return "see the driver's log (dmesg), or dump it when its GPU work has ended"
    ours = {process.pid for process in found.processes}
    used = {uuid for process in found.processes for uuid in process.gpus}
    others = sorted(pid for gpu in found.node.gpus if gpu.uuid in used for pid in gpu.used if pid not in ours)
    if others:
        named = ", ".join(f"{pid} ('{holders.comm(pid)}')" for pid in others[:4])
        return f"give it more time, or stop who shares its GPUs from outside: {named}"
    return "give it more time"
