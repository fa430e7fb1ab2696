"""The contract of an engine, as tests that anybody can run against an engine of their own.

Subclass `EngineContract` in a test module, give it a pytest fixture named `harness` that yields a `Harness`
for your engine, and run pytest. What a node lacks is a skip with its reason; what an engine does not declare
must be refused before the container is touched, which is tested too.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, cast
from unittest import SkipTest

from engines.api import (
    Capability,
    CheckpointEngine,
    CheckpointRequest,
    EngineError,
    EngineTimeout,
    ImageExists,
    ImageNotFound,
    InvalidRequest,
    NotSupported,
    Phase,
    PhaseInfo,
    ReleaseRequest,
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


@contextlib.contextmanager
def raises(kind: type[BaseException]) -> Generator[None]:
    """Fail unless the body raises an exception of this kind."""
    try:
        yield
    except kind:
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


def _dump(
    harness: Harness,
    container_id: str,
    image: Path,
    *,
    leave_running: bool = False,
    on_phase: Callable[[Phase, PhaseInfo], None] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> CheckpointRequest:
    return CheckpointRequest(
        container_id=container_id,
        bundle_path=harness.bundle(container_id),
        image_path=image,
        timeout_s=timeout_s,
        leave_running=leave_running,
        on_phase=on_phase,
    )


def _wake(
    harness: Harness,
    container_id: str,
    image: Path,
    *,
    held: bool = False,
    tcp: Literal["keep", "close"] = "close",
    on_phase: Callable[[Phase, PhaseInfo], None] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> RestoreRequest:
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
        document: Any = json.loads(path.read_bytes())
        skip = cast("dict[Any, Any]", document["skip"])
        if document["schema"] != 1 or not all(
            isinstance(word, str) and word.strip() for pair in skip.items() for word in pair
        ):
            raise ValueError("every name needs a reason")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{words}: {error}; see `engines.testing.load_profile`") from error
    return {str(name): str(reason) for name, reason in skip.items()}


class EngineContract:
    """The contract. Every test gets a fresh `harness`.

    skips: names of tests (without their `test_`) that this host cannot run, each with the reason.
    """

    skips: Mapping[str, str] = {}

    def setup_method(self, method: Callable[..., None]) -> None:
        """Called by pytest before each test."""
        reason = self.skips.get(method.__name__.removeprefix("test_"))
        if reason:
            raise SkipTest(reason)

    def test_probe_never_raises_and_is_clean_here(self, harness: Harness) -> None:
        findings = harness.engine("nobody").probe()
        assert findings
        assert not [finding for finding in findings if finding.severity == "refuse"]

    def test_capabilities_are_static(self, harness: Harness) -> None:
        assert harness.engine("a").capabilities == harness.engine("b").capabilities

    def test_round_trip_keeps_memory_and_count(self, harness: Harness) -> None:
        source = harness.start()
        goes_on(harness, source)
        memory = harness.memory(source)
        image = harness.image_root / "i"
        stats = harness.engine(source).checkpoint(_dump(harness, source, image))
        count = harness.progress(source)
        assert harness.pid(source) == 0, "a stopped container is gone"
        assert stats.total_s > 0
        assert stats.frozen_s > 0
        assert stats.image_bytes > 0
        harness.kill(source)
        clean(harness, source)
        target = harness.prepare()
        pid = harness.restore(harness.engine(target), _wake(harness, target, image))
        assert pid == harness.pid(target)
        goes_on(harness, target)
        assert harness.progress(target) > count
        assert harness.memory(target) == memory

    def test_leave_running_keeps_the_process(self, harness: Harness) -> None:
        source = harness.start()
        need(harness.engine(source), "leave-running")
        pid = harness.pid(source)
        image = harness.image_root / "i"
        harness.engine(source).checkpoint(_dump(harness, source, image, leave_running=True))
        assert harness.pid(source) == pid
        goes_on(harness, source)
        assert any(image.iterdir())

    def test_an_existing_image_is_refused(self, harness: Harness) -> None:
        source = harness.start()
        image = harness.image_root / "i"
        image.mkdir()
        (image / "precious").write_text("x")
        with raises(ImageExists):
            harness.engine(source).checkpoint(_dump(harness, source, image))
        assert [path.name for path in image.iterdir()] == ["precious"]
        goes_on(harness, source)

    def test_an_unknown_container_is_refused(self, harness: Harness) -> None:
        source = harness.start()
        engine = harness.engine("nobody")
        request = CheckpointRequest(
            container_id="nobody",
            bundle_path=harness.bundle(source),
            image_path=harness.image_root / "i",
            timeout_s=TIMEOUT_S,
        )
        with raises(InvalidRequest):
            engine.checkpoint(request)
        assert not (harness.image_root / "i").exists()

    def test_a_missing_image_is_refused(self, harness: Harness) -> None:
        target = harness.prepare()
        with raises(ImageNotFound):
            harness.engine(target).restore(_wake(harness, target, harness.image_root / "none"))
        clean(harness, target)

    def test_an_id_in_use_is_refused(self, harness: Harness) -> None:
        source = harness.start()
        image = harness.image_root / "i"
        harness.engine(source).checkpoint(_dump(harness, source, image, leave_running=True))
        with raises(InvalidRequest):
            harness.engine(source).restore(_wake(harness, source, image))
        goes_on(harness, source)

    def test_what_is_not_declared_is_refused_before_touching(self, harness: Harness) -> None:
        source = harness.start()
        pid = harness.pid(source)
        image = harness.image_root / "i"
        wanted: tuple[Capability, ...] = ("leave-running", "phases")
        for capability in wanted:
            engine = harness.lacking(source, capability)
            if engine is None:
                continue
            request = _dump(
                harness,
                source,
                image,
                leave_running=capability == "leave-running",
                on_phase=_silent if capability == "phases" else None,
            )
            with raises(NotSupported):
                engine.checkpoint(request)
            assert not image.exists()
            assert harness.pid(source) == pid
            goes_on(harness, source)
        engine = harness.lacking(source, "held-restore")
        if engine:
            harness.engine(source).checkpoint(_dump(harness, source, image))
            target = harness.prepare()
            with raises(NotSupported):
                engine.restore(_wake(harness, target, image, held=True))
            assert harness.pid(target) == 0

    def test_phases_come_in_order_and_nothing_runs_in_them(self, harness: Harness) -> None:
        source = harness.start()
        engine = harness.engine(source)
        need(engine, "phases")
        goes_on(harness, source)
        pid = harness.pid(source)
        seen: list[str] = []

        def look(phase: Phase, info: PhaseInfo) -> None:
            seen.append(phase)
            if phase != "restored":
                assert info.pid == pid
            # What was printed just before the freeze may still be on its way to the harness.
            time.sleep(0.1)
            stands_still(harness, source if phase != "restored" else target)

        image = harness.image_root / "i"
        target = harness.prepare()
        engine.checkpoint(_dump(harness, source, image, on_phase=look))
        assert seen == ["frozen", "dumped"]
        harness.restore(harness.engine(target), _wake(harness, target, image, on_phase=look))
        assert seen == ["frozen", "dumped", "restored"]
        goes_on(harness, target)

    def test_a_veto_undoes_a_dump(self, harness: Harness) -> None:
        source = harness.start()
        engine = harness.engine(source)
        need(engine, "phases")
        pid = harness.pid(source)
        phases: tuple[Phase, ...] = ("frozen", "dumped")
        for phase in phases:
            image = harness.image_root / phase
            with raises(Veto):
                engine.checkpoint(_dump(harness, source, image, on_phase=_veto_at(phase)))
            assert not image.exists(), "no image is left of a failed dump"
            assert harness.pid(source) == pid
            goes_on(harness, source)

    def test_a_veto_undoes_a_restore(self, harness: Harness) -> None:
        source = harness.start()
        need(harness.engine(source), "phases")
        image = harness.image_root / "i"
        harness.engine(source).checkpoint(_dump(harness, source, image))
        before = sorted((path.name, path.stat().st_size) for path in image.iterdir())
        target = harness.prepare()
        with raises(Veto):
            harness.restore(
                harness.engine(target), _wake(harness, target, image, on_phase=_veto_at("restored"))
            )
        assert harness.pid(target) == 0
        clean(harness, target)
        assert sorted((path.name, path.stat().st_size) for path in image.iterdir()) == before
        harness.restore(harness.engine(target), _wake(harness, target, image))
        goes_on(harness, target)

    def test_a_held_container_runs_only_after_release(self, harness: Harness) -> None:
        source = harness.start()
        engine = harness.engine(source)
        need(engine, "held-restore")
        image = harness.image_root / "i"
        engine.checkpoint(_dump(harness, source, image))
        target = harness.prepare()
        harness.restore(harness.engine(target), _wake(harness, target, image, held=True))
        assert harness.pid(target) > 0
        stands_still(harness, target)
        harness.engine(target).release(ReleaseRequest(container_id=target, timeout_s=TIMEOUT_S))
        goes_on(harness, target)
        with raises(InvalidRequest):
            harness.engine(target).release(ReleaseRequest(container_id=target, timeout_s=TIMEOUT_S))
        goes_on(harness, target)

    def test_a_held_container_can_be_killed(self, harness: Harness) -> None:
        source = harness.start()
        engine = harness.engine(source)
        need(engine, "held-restore")
        image = harness.image_root / "i"
        engine.checkpoint(_dump(harness, source, image))
        target = harness.prepare()
        harness.restore(harness.engine(target), _wake(harness, target, image, held=True))
        before = harness.progress(target)
        harness.kill(target)
        assert harness.pid(target) == 0
        assert harness.progress(target) == before, "it did not run while it was killed"
        clean(harness, target)

    def test_one_image_gives_two_containers(self, harness: Harness) -> None:
        source = harness.start()
        engine = harness.engine(source)
        need(engine, "clone")
        memory = harness.memory(source)
        image = harness.image_root / "i"
        engine.checkpoint(_dump(harness, source, image))
        clones = [harness.prepare(), harness.prepare()]
        pids = {harness.restore(harness.engine(clone), _wake(harness, clone, image)) for clone in clones}
        assert len(pids) == 2
        for clone in clones:
            goes_on(harness, clone)
            assert harness.memory(clone) == memory

    def test_restore_enters_the_namespace_of_the_new_spec(self, harness: Harness) -> None:
        first, second = harness.netns(), harness.netns()
        if first is None or second is None:
            raise SkipTest("no network namespaces here")
        source = harness.start(netns_path=first)
        engine = harness.engine(source)
        need(engine, "external-netns")
        old = harness.netns_of(source)
        image = harness.image_root / "i"
        engine.checkpoint(_dump(harness, source, image))
        target = harness.prepare(netns_path=second)
        harness.restore(harness.engine(target), _wake(harness, target, image))
        goes_on(harness, target)
        assert harness.netns_of(target) != old

    def test_a_deadline_ends_a_dump_and_its_processes(self, harness: Harness) -> None:
        source = harness.start()
        pid = harness.pid(source)
        image = harness.image_root / "i"
        with raises(EngineTimeout):
            harness.stuck(source).checkpoint(_dump(harness, source, image, timeout_s=1.0))
        assert harness.stuck_processes() == []
        assert not image.exists()
        assert harness.pid(source) == pid
        goes_on(harness, source)

    def test_a_deadline_ends_a_restore_and_its_processes(self, harness: Harness) -> None:
        source = harness.start()
        image = harness.image_root / "i"
        harness.engine(source).checkpoint(_dump(harness, source, image))
        target = harness.prepare()
        with raises(EngineTimeout):
            harness.restore(harness.stuck(target), _wake(harness, target, image, timeout_s=1.0))
        assert harness.stuck_processes() == []
        clean(harness, target)
        harness.restore(harness.engine(target), _wake(harness, target, image))
        goes_on(harness, target)

    def test_inspect_names_the_engine(self, harness: Harness) -> None:
        source = harness.start()
        engine = harness.engine(source)
        image = harness.image_root / "i"
        engine.checkpoint(_dump(harness, source, image))
        assert engine.inspect(image).engine == engine.name
        with raises(ImageNotFound):
            engine.inspect(harness.image_root / "none")

    def test_discard_and_undo_are_idempotent(self, harness: Harness) -> None:
        source = harness.start()
        engine = harness.engine(source)
        image = harness.image_root / "i"
        engine.checkpoint(_dump(harness, source, image, leave_running=True))
        engine.undo(source)
        engine.undo(source)
        goes_on(harness, source)
        engine.discard(image)
        assert not image.exists()
        engine.discard(image)

    def test_errors_say_what_was_tried(self, harness: Harness) -> None:
        target = harness.prepare()
        try:
            harness.engine(target).restore(_wake(harness, target, harness.image_root / "none"))
        except EngineError as error:
            message = str(error)
        else:
            raise AssertionError("a missing image was accepted")
        assert message.startswith("could not restore")
        assert target in message
        assert ";" in message, "it says what to do"


def _silent(phase: Phase, info: PhaseInfo) -> None:
    """A callback that agrees to everything."""


def _veto_at(wanted: Phase) -> Callable[[Phase, PhaseInfo], None]:
    def callback(phase: Phase, info: PhaseInfo) -> None:
        if phase == wanted:
            raise Veto(phase)

    return callback
