"""What the engine contract (`engines.testing`) needs: containers to try an engine on, and helpers."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Literal, Protocol, cast
from unittest import SkipTest

from engines.api import (
    Capability,
    CheckpointEngine,
    CheckpointRequest,
    EngineError,
    InvalidRequest,
    Phase,
    PhaseInfo,
    RestoreRequest,
)

TIMEOUT_S = 60.0
_SETTLE_S = 20.0


class Harness(Protocol):
    """What the contract needs to know about an engine's containers."""

    image_root: Path  # an empty directory for images

    def engine(self, container_id: str) -> CheckpointEngine:
        """The engine for a container."""
        ...

    def lacking(self, container_id: str, capability: Capability) -> CheckpointEngine | None:
        """The same engine without a capability, None if it cannot be had."""
        ...

    def stuck(self, container_id: str) -> CheckpointEngine:
        """The same engine with a runtime that never ends when it dumps or restores."""
        ...

    def stuck_processes(self) -> list[int]:
        """What is alive of the runtimes of stuck engines."""
        ...

    def start(self, *, netns_path: Path | None = None) -> str:
        """Start a container that remembers something and counts; its id."""
        ...

    def prepare(self, *, netns_path: Path | None = None) -> str:
        """A bundle for a new container, which may take the place of any other; its id."""
        ...

    def bundle(self, container_id: str) -> Path:
        """The bundle of a container."""
        ...

    def restore(self, engine: CheckpointEngine, request: RestoreRequest) -> int:
        """Restore, with whatever standard streams the container needs; its pid."""
        ...

    def netns(self) -> Path | None:
        """A network namespace of its own, None if there can be none."""
        ...

    def progress(self, container_id: str) -> int:
        """A number that grows while the container runs, and is remembered by its image."""
        ...

    def memory(self, container_id: str) -> str:
        """What the container remembers. It must be running."""
        ...

    def pid(self, container_id: str) -> int:
        """The container's init on the host, 0 if there is no container."""
        ...

    def netns_of(self, container_id: str) -> str:
        """A name of the network namespace the container is in."""
        ...

    def kill(self, container_id: str) -> None:
        """End and remove a container."""
        ...

    def residue(self, container_id: str) -> list[str]:
        """What is left of a container that is gone: processes, mounts, locks, state; in words."""
        ...


class Veto(Exception):
    """What a vetoing callback of these tests raises."""


class Raised:
    """What `raises` caught: `error`, once it has."""

    error: BaseException | None = None

    def after(self) -> str:
        """The state that an engine's error says the container is in."""
        assert isinstance(self.error, EngineError)
        return self.error.after


@contextlib.contextmanager
def raises(kind: type[BaseException]) -> Generator[Raised]:
    """Fail unless the body raises an exception of this kind."""
    caught = Raised()
    try:
        yield caught
    except kind as error:
        caught.error = error
        return
    raise AssertionError(f"nothing was raised, {kind.__name__} was expected")


def until(check: Callable[[], bool], what: str) -> None:
    """Wait until something is true; fail after a while."""
    deadline = time.monotonic() + _SETTLE_S
    while not check():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {_SETTLE_S} s: {what}")
        time.sleep(0.01)


def need(engine: CheckpointEngine, capability: Capability) -> None:
    """Skip the test for an engine without a capability."""
    if capability not in engine.capabilities:
        raise SkipTest(f"{engine.name} does not declare {capability}")


def goes_on(harness: Harness, container_id: str) -> None:
    """Fail unless the container makes progress."""
    before = harness.progress(container_id)
    until(lambda: harness.progress(container_id) > before, f"{container_id} goes on from {before}")


def settles(harness: Harness, container_id: str) -> None:
    """Wait until the container's progress has been the same for a moment."""

    def unchanged() -> bool:
        before = harness.progress(container_id)
        time.sleep(0.1)
        return harness.progress(container_id) == before

    until(unchanged, f"{container_id} stands still")


def stands_still(harness: Harness, container_id: str, *, for_s: float = 0.3) -> None:
    """Fail if the container makes progress within so many seconds."""
    before = harness.progress(container_id)
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline:
        assert harness.progress(container_id) == before, f"{container_id} ran while it was held"
        time.sleep(0.01)


def clean(harness: Harness, container_id: str) -> None:
    """Fail if anything is left of a container that is gone. Whoever reaps its processes gets a moment."""
    deadline = time.monotonic() + _SETTLE_S
    while left := harness.residue(container_id):
        assert time.monotonic() < deadline, f"left of {container_id}: {left}"
        time.sleep(0.01)


def dump_request(
    harness: Harness,
    container_id: str,
    image: Path,
    *,
    leave_running: bool = False,
    on_phase: Callable[[Phase, PhaseInfo], None] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> CheckpointRequest:
    """A request to dump one of the harness's containers."""
    return CheckpointRequest(
        container_id=container_id,
        bundle_path=harness.bundle(container_id),
        image_path=image,
        timeout_s=timeout_s,
        leave_running=leave_running,
        on_phase=on_phase,
    )


def restore_request(
    harness: Harness,
    container_id: str,
    image: Path,
    *,
    held: bool = False,
    tcp: Literal["keep", "close"] = "close",
    on_phase: Callable[[Phase, PhaseInfo], None] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> RestoreRequest:
    """A request to restore into one of the harness's bundles."""
    return RestoreRequest(
        container_id=container_id,
        bundle_path=harness.bundle(container_id),
        image_path=image,
        timeout_s=timeout_s,
        held=held,
        tcp=tcp,
        on_phase=on_phase,
    )


def load_profile(path: Path) -> dict[str, str]:
    """What a host skips, and why, from a JSON file: {"schema": 1, "skip": {"NAME": "REASON"}}.

    A name is "contract.TEST" (without its `test_`), "WORKLOAD" or "WORKLOAD.COURSE". Raises InvalidRequest.
    """
    words = f"could not read profile '{path}'"
    try:
        found: Any = json.loads(path.read_bytes())
        document = cast("dict[Any, Any]", found) if isinstance(found, dict) else {}
        if document.get("schema") != 1 or type(document.get("skip")) is not dict:
            raise ValueError('it is no {"schema": 1, "skip": {NAME: REASON}}')
        skip = cast("dict[Any, Any]", document["skip"])
        if not all(isinstance(word, str) and word.strip() for pair in skip.items() for word in pair):
            raise ValueError("every name needs a reason")
    except RecursionError:
        raise InvalidRequest(f"{words}: it is nested too deep; see `engines.harness.load_profile`") from None
    except (OSError, ValueError) as error:
        # Of a number that is too long, Python goes on with how a program would raise its limit.
        wrong = getattr(error, "strerror", None) or str(error).partition("; use sys.")[0]
        raise InvalidRequest(f"{words}: {wrong}; see `engines.harness.load_profile`") from error
    return {str(name): str(reason) for name, reason in skip.items()}


def silent(phase: Phase, info: PhaseInfo) -> None:
    """A callback that agrees to everything."""


def veto_at(wanted: Phase) -> Callable[[Phase, PhaseInfo], None]:
    """A callback that vetoes at one phase."""

    def callback(phase: Phase, info: PhaseInfo) -> None:
        if phase == wanted:
            raise Veto(phase)

    return callback
