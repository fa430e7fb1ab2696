"""An engine without processes: containers are small files, so that callers can be tested anywhere.

A fake container counts while it runs, by the clock. The fake passes the same contract (`engines.testing`)
as the real engines, so a caller that works with it has understood the interface. It runs the runtime that
its settings name once a call, for nothing but the deadline's sake; `true` will do.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

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

_TICK_S = 0.01
_STATE = "fake.json"
_IMAGE = "fake-memory.json"
_ALL: frozenset[Capability] = frozenset(
    {"leave-running", "external-netns", "clone", "held-restore", "cold-start-after-failure", "phases"}
)


@dataclass(kw_only=True)
class FakeContainer:
    """One container. counted: ticks until `since_s` (monotonic seconds); memory: what it remembers."""

    pid: int
    memory: str
    counted: int = 0
    since_s: float = 0.0
    status: Literal["running", "paused"] = "running"
    netns: str = ""

    def progress(self) -> int:
        """Grows while the container runs."""
        if self.status == "paused":
            return self.counted
        return self.counted + int((time.monotonic() - self.since_s) / _TICK_S)

    def set(self, status: Literal["running", "paused"]) -> None:
        """Let it run, or stand still."""
        self.counted, self.since_s, self.status = self.progress(), time.monotonic(), status


def load(root_path: Path, container_id: str) -> FakeContainer | None:
    """A container of a state root, None if there is none."""
    try:
        return FakeContainer(**json.loads((root_path / container_id / _STATE).read_text()))
    except FileNotFoundError:
        return None


def save(root_path: Path, container_id: str, container: FakeContainer) -> None:
    """Write a container to its state root."""
    path = root_path / container_id / _STATE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(container)))


def start(root_path: Path, container_id: str, *, netns: str = "") -> FakeContainer:
    """Make a container that runs."""
    container = FakeContainer(
        pid=secrets.randbelow(1 << 22) + 2, memory=secrets.token_hex(8), since_s=time.monotonic(), netns=netns
    )
    save(root_path, container_id, container)
    return container


def delete(root_path: Path, container_id: str) -> None:
    """Remove a container."""
    shutil.rmtree(root_path / container_id, ignore_errors=True)


class FakeEngine:
    """See `engines.api.CheckpointEngine`. without: capabilities it is to lack."""

    def __init__(self, settings: EngineSettings, without: frozenset[Capability] = frozenset()) -> None:
        self._settings = settings
        self._without = without

    @property
    def name(self) -> str:
        """The engine's name in images."""
        return "fake"

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What a request may ask for."""
        return _ALL - self._without

    def probe(self) -> tuple[Finding, ...]:
        """It works anywhere."""
        return (Finding(rule="fake.smoke", severity="ok", message="the fake engine works everywhere"),)

    def inspect(self, image_path: Path, /) -> Needs:
        """It asks for nothing. Raises ImageNotFound, ImageCorrupt."""
        self._memory(image_path, f"could not inspect image '{image_path}'")
        return Needs(engine="fake", image_version="1", tasks=(), namespaces={"network": "external"})

    def pre_dump(self, request: CheckpointRequest, /) -> DumpStats:
        """Raises NotSupported."""
        raise NotSupported(
            f"could not pre-dump container '{request.container_id}': the fake engine has no memory to track; "
            "dump it in one go",
            after="running",
        )

    def checkpoint(self, request: CheckpointRequest, /) -> DumpStats:
        """Dump. Raises as the interface says."""
        words = f"could not checkpoint container '{request.container_id}'"
        started = time.monotonic()
        self._need(words, "phases", wanted=request.on_phase is not None)
        self._need(words, "leave-running", wanted=request.leave_running)
        self._need(words, "verdict", wanted=request.verdict_path is not None)
        container = self._container(request.container_id, words)
        image = request.image_path
        if image.exists() and (not image.is_dir() or any(image.iterdir())):
            raise ImageExists(f"{words}: there is something at {image}; choose another path or remove it")
        made = not image.exists()
        before = container.status
        container.set("paused")
        save(self._settings.root_path, request.container_id, container)
        try:
            self._tell(request.on_phase, "frozen", container)
            image.mkdir(mode=0o700, exist_ok=True)
            (image / _IMAGE).write_text(
                json.dumps({"counted": container.counted, "memory": container.memory})
            )
            self._runtime("checkpoint", request.timeout_s, words)
            self._tell(request.on_phase, "dumped", container)
        except BaseException:
            (image / _IMAGE).unlink(missing_ok=True)
            if made and image.exists():
                image.rmdir()
            container.set(before)
            save(self._settings.root_path, request.container_id, container)
            raise
        if request.leave_running:
            container.set(before)
            save(self._settings.root_path, request.container_id, container)
        else:
            delete(self._settings.root_path, request.container_id)
        total_s = time.monotonic() - started
        return DumpStats(frozen_s=total_s, total_s=total_s, image_bytes=(image / _IMAGE).stat().st_size)

    def restore(self, request: RestoreRequest, /) -> Restored:
        """Restore. Raises as the interface says."""
        words = f"could not restore container '{request.container_id}'"
        started = time.monotonic()
        self._need(words, "phases", wanted=request.on_phase is not None)
        self._need(words, "held-restore", wanted=request.held)
        memory = self._memory(request.image_path, words)
        if load(self._settings.root_path, request.container_id):
            raise InvalidRequest(f"{words}: there is a container of this id; choose another id")
        container = start(self._settings.root_path, request.container_id, netns=_netns(request.bundle_path))
        container.status = "paused"
        container.counted, container.memory = int(memory["counted"]), str(memory["memory"])
        save(self._settings.root_path, request.container_id, container)
        try:
            self._runtime("restore", request.timeout_s, words)
            self._tell(request.on_phase, "restored", container)
        except BaseException:
            delete(self._settings.root_path, request.container_id)
            raise
        if not request.held:
            container.set("running")
            save(self._settings.root_path, request.container_id, container)
        if request.pid_file_path:
            draft = request.pid_file_path.with_name(f".{request.pid_file_path.name}")
            draft.write_text(str(container.pid))
            draft.rename(request.pid_file_path)
        return Restored(pid=container.pid, total_s=time.monotonic() - started)

    def release(self, request: ReleaseRequest, /) -> None:
        """Let a held container run. Raises InvalidRequest."""
        words = f"could not release container '{request.container_id}'"
        container = self._container(request.container_id, words)
        if container.status != "paused":
            raise InvalidRequest(f"{words}: it is not held; start it only once", after="running")
        container.set("running")
        save(self._settings.root_path, request.container_id, container)

    def undo(self, container_id: str, /) -> None:
        """Nothing can be left: a call of the fake has no processes of its own."""

    def discard(self, image_path: Path, /) -> None:
        """Remove an image directory. Idempotent."""
        shutil.rmtree(image_path, ignore_errors=True)

    def _need(self, words: str, capability: Capability, *, wanted: bool) -> None:
        if wanted and capability not in self.capabilities:
            raise NotSupported(f"{words}: this engine cannot do {capability}; ask for less", after="running")

    def _container(self, container_id: str, words: str) -> FakeContainer:
        container = load(self._settings.root_path, container_id)
        if container is None:
            raise InvalidRequest(f"{words}: there is no such container; look at the id and the root")
        return container

    def _memory(self, image_path: Path, words: str) -> dict[str, int | str]:
        if not image_path.is_dir():
            raise ImageNotFound(f"{words}: there is no image at {image_path}; look at the path")
        try:
            return json.loads((image_path / _IMAGE).read_text())
        except (OSError, ValueError) as error:
            raise ImageCorrupt(f"{words}: {image_path} holds no image ({error}); dump again") from error

    def _tell(
        self, on_phase: Callable[[Phase, PhaseInfo], None] | None, phase: Phase, container: FakeContainer
    ) -> None:
        if on_phase:
            netns_path = Path(container.netns) if container.netns else None
            on_phase(phase, PhaseInfo(pid=container.pid, netns_path=netns_path, lock_table=None))

    def _runtime(self, verb: str, timeout_s: float, words: str) -> None:
        process = subprocess.Popen(
            [self._settings.runtime_path, verb],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": self._settings.search_path},
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            after = "running" if verb == "checkpoint" else "stopped"
            raise EngineTimeout(f"{words}: the deadline passed; give it more time", after=after) from None
        if status:
            kind = DumpFailed if verb == "checkpoint" else RestoreFailed
            raise kind(f"{words}: the runtime ended with status {status}; see its output")


def _netns(bundle_path: Path) -> str:
    spec = json.loads((bundle_path / "config.json").read_text())
    for namespace in spec.get("linux", {}).get("namespaces", []):
        if namespace["type"] == "network":
            return str(namespace.get("path", ""))
    return ""
