"""The contract of an engine, as tests that anybody can run against an engine of their own.

Subclass `EngineContract` in a test module, give it a pytest fixture named `harness` that yields a `Harness`
for your engine, and run pytest. What a node lacks is a skip with its reason; what an engine does not declare
must be refused before the container is touched, which is tested too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from unittest import SkipTest

from engines.api import (
    Capability,
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
)
from engines.harness import (
    TIMEOUT_S,
    Harness,
    Veto,
    clean,
    dump_request,
    goes_on,
    need,
    raises,
    restore_request,
    settles,
    silent,
    stands_still,
    until,
    veto_at,
)

__all__ = ["EngineContract", "Harness"]

_DAMAGED_S = 5.0


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
        stats = harness.engine(source).checkpoint(dump_request(harness, source, image))
        count = harness.progress(source)
        assert harness.pid(source) == 0, "a stopped container is gone"
        assert stats.total_s > 0
        assert stats.frozen_s > 0
        assert stats.image_bytes > 0
        harness.kill(source)
        clean(harness, source)
        target = harness.prepare()
        pid = harness.restore(harness.engine(target), restore_request(harness, target, image))
        assert pid == harness.pid(target)
        goes_on(harness, target)
        assert harness.progress(target) > count
        assert harness.memory(target) == memory

    def test_leave_running_keeps_the_process(self, harness: Harness) -> None:
        source = harness.start()
        need(harness.engine(source), "leave-running")
        pid = harness.pid(source)
        image = harness.image_root / "i"
        harness.engine(source).checkpoint(dump_request(harness, source, image, leave_running=True))
        assert harness.pid(source) == pid
        goes_on(harness, source)
        assert any(image.iterdir())

    def test_an_existing_image_is_refused(self, harness: Harness) -> None:
        source = harness.start()
        image = harness.image_root / "i"
        image.mkdir()
        (image / "precious").write_text("x")
        with raises(ImageExists):
            harness.engine(source).checkpoint(dump_request(harness, source, image))
        assert [path.name for path in image.iterdir()] == ["precious"]
        goes_on(harness, source)

    def test_a_file_in_the_image_s_place_is_refused(self, harness: Harness) -> None:
        source = harness.start()
        image = harness.image_root / "i"
        image.write_text("precious")
        with raises(ImageExists):
            harness.engine(source).checkpoint(dump_request(harness, source, image))
        assert image.read_text() == "precious"
        goes_on(harness, source)

    def test_statistics_are_consistent(self, harness: Harness) -> None:
        source = harness.start()
        image = harness.image_root / "i"
        started = time.monotonic()
        stats = harness.engine(source).checkpoint(dump_request(harness, source, image))
        took_s = time.monotonic() - started
        assert 0 < stats.frozen_s <= stats.total_s <= took_s
        assert stats.freezing_s + stats.memdump_s + stats.memwrite_s <= took_s
        on_disk = sum(path.stat().st_size for path in image.rglob("*") if path.is_file())
        assert 0 <= stats.pages_bytes <= stats.image_bytes <= on_disk
        assert stats.pages_written >= 0

    def test_two_containers_do_not_mix(self, harness: Harness) -> None:
        first, second = harness.start(), harness.start()
        until(lambda: harness.progress(second) > 30, "the second one is ahead")
        pid = harness.pid(second)
        memories = [harness.memory(first), harness.memory(second)]
        images = [harness.image_root / "first", harness.image_root / "second"]
        harness.engine(first).checkpoint(dump_request(harness, first, images[0]))
        assert harness.pid(second) == pid, "another container is none of an engine's business"
        goes_on(harness, second)
        harness.engine(second).checkpoint(dump_request(harness, second, images[1]))
        counts = [harness.progress(first), harness.progress(second)]
        targets = [harness.prepare(), harness.prepare()]
        for target, image in zip(reversed(targets), reversed(images), strict=True):
            harness.restore(harness.engine(target), restore_request(harness, target, image))
        for target, memory, count in zip(targets, memories, counts, strict=True):
            goes_on(harness, target)
            assert count < harness.progress(target) < count + 3000
            assert harness.memory(target) == memory

    def test_a_damaged_image_is_noticed_or_harmless(self, harness: Harness) -> None:
        source = harness.start()
        memory = harness.memory(source)
        image = harness.image_root / "i"
        harness.engine(source).checkpoint(dump_request(harness, source, image))
        files = [path for path in image.rglob("*") if path.is_file() and path.stat().st_size]
        files.sort(key=lambda path: (-path.stat().st_size, path.name))
        for path, damage in zip(files, cycle(("cut", "empty", "missing")), strict=False):
            content = path.read_bytes()
            path.unlink()
            if damage != "missing":
                path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
            self._restore_damaged(harness, image, memory, path.name)
            path.write_bytes(content)
        target = harness.prepare()
        harness.restore(harness.engine(target), restore_request(harness, target, image))
        goes_on(harness, target)
        assert harness.memory(target) == memory

    def _restore_damaged(self, harness: Harness, image: Path, memory: str, name: str) -> None:
        target = harness.prepare()
        try:
            request = restore_request(harness, target, image, timeout_s=_DAMAGED_S)
            harness.restore(harness.engine(target), request)
        except EngineError as error:
            assert error.after != "running", f"{name}: {error}"
            assert harness.pid(target) == 0
        else:
            # A file that nobody needs may be damaged; but what runs must be right.
            goes_on(harness, target)
            assert harness.memory(target) == memory, f"{name} was damaged, and nobody noticed"
            harness.kill(target)
        clean(harness, target)

    def test_a_pre_dump_is_refused_or_leads_to_a_dump(self, harness: Harness) -> None:
        source = harness.start()
        engine = harness.engine(source)
        pid, memory = harness.pid(source), harness.memory(source)
        before = harness.image_root / "before"
        try:
            engine.pre_dump(dump_request(harness, source, before))
        except NotSupported:
            assert not before.exists()
            assert harness.pid(source) == pid
            goes_on(harness, source)
            return
        assert "pre-dump" in engine.capabilities
        assert harness.pid(source) == pid
        goes_on(harness, source)
        image = harness.image_root / "i"
        engine.checkpoint(
            CheckpointRequest(
                container_id=source,
                bundle_path=harness.bundle(source),
                image_path=image,
                parent_path=before,
                timeout_s=TIMEOUT_S,
            )
        )
        target = harness.prepare()
        harness.restore(harness.engine(target), restore_request(harness, target, image))
        goes_on(harness, target)
        assert harness.memory(target) == memory

    def test_an_engine_refuses_what_it_does_not_declare(self, harness: Harness) -> None:
        source = harness.start()
        engine = harness.engine(source)
        pid = harness.pid(source)
        image = harness.image_root / "i"
        if "leave-running" not in engine.capabilities:
            with raises(NotSupported):
                engine.checkpoint(dump_request(harness, source, image, leave_running=True))
        if "phases" not in engine.capabilities:
            with raises(NotSupported):
                engine.checkpoint(dump_request(harness, source, image, on_phase=silent))
        if "verdict" not in engine.capabilities:
            request = dump_request(harness, source, image, on_phase=silent)
            with raises(NotSupported):
                engine.checkpoint(replace(request, verdict_path=harness.image_root / "verdict"))
        assert not image.exists()
        assert harness.pid(source) == pid
        goes_on(harness, source)
        if "held-restore" not in engine.capabilities:
            engine.checkpoint(dump_request(harness, source, image))
            target = harness.prepare()
            with raises(NotSupported):
                harness.restore(engine, restore_request(harness, target, image, held=True))
            assert harness.pid(target) == 0
            clean(harness, target)

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
            harness.engine(target).restore(restore_request(harness, target, harness.image_root / "none"))
        clean(harness, target)

    def test_an_id_in_use_is_refused(self, harness: Harness) -> None:
        source = harness.start()
        image = harness.image_root / "i"
        harness.engine(source).checkpoint(dump_request(harness, source, image, leave_running=True))
        with raises(InvalidRequest):
            harness.engine(source).restore(restore_request(harness, source, image))
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
            request = dump_request(
                harness,
                source,
                image,
                leave_running=capability == "leave-running",
                on_phase=silent if capability == "phases" else None,
            )
            with raises(NotSupported):
                engine.checkpoint(request)
            assert not image.exists()
            assert harness.pid(source) == pid
            goes_on(harness, source)
        engine = harness.lacking(source, "held-restore")
        if engine:
            harness.engine(source).checkpoint(dump_request(harness, source, image))
            target = harness.prepare()
            with raises(NotSupported):
                engine.restore(restore_request(harness, target, image, held=True))
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
            container_id = source if phase != "restored" else target
            # What was printed just before the freeze may still be on its way to the harness.
            settles(harness, container_id)
            stands_still(harness, container_id)

        image = harness.image_root / "i"
        target = harness.prepare()
        engine.checkpoint(dump_request(harness, source, image, on_phase=look))
        assert seen == ["frozen", "dumped"]
        harness.restore(harness.engine(target), restore_request(harness, target, image, on_phase=look))
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
                engine.checkpoint(dump_request(harness, source, image, on_phase=veto_at(phase)))
            assert not image.exists(), "no image is left of a failed dump"
            assert harness.pid(source) == pid
            goes_on(harness, source)

    def test_a_veto_undoes_a_restore(self, harness: Harness) -> None:
        source = harness.start()
        need(harness.engine(source), "phases")
        image = harness.image_root / "i"
        harness.engine(source).checkpoint(dump_request(harness, source, image))
        before = sorted((path.name, path.stat().st_size) for path in image.iterdir())
        target = harness.prepare()
        with raises(Veto):
            harness.restore(
                harness.engine(target), restore_request(harness, target, image, on_phase=veto_at("restored"))
            )
        assert harness.pid(target) == 0
        clean(harness, target)
        assert sorted((path.name, path.stat().st_size) for path in image.iterdir()) == before
        harness.restore(harness.engine(target), restore_request(harness, target, image))
        goes_on(harness, target)

    def test_a_held_container_runs_only_after_release(self, harness: Harness) -> None:
        source = harness.start()
        engine = harness.engine(source)
        need(engine, "held-restore")
        image = harness.image_root / "i"
        engine.checkpoint(dump_request(harness, source, image))
        target = harness.prepare()
        harness.restore(harness.engine(target), restore_request(harness, target, image, held=True))
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
        engine.checkpoint(dump_request(harness, source, image))
        target = harness.prepare()
        harness.restore(harness.engine(target), restore_request(harness, target, image, held=True))
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
        engine.checkpoint(dump_request(harness, source, image))
        clones = [harness.prepare(), harness.prepare()]
        pids = {
            harness.restore(harness.engine(clone), restore_request(harness, clone, image)) for clone in clones
        }
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
        engine.checkpoint(dump_request(harness, source, image))
        target = harness.prepare(netns_path=second)
        harness.restore(harness.engine(target), restore_request(harness, target, image))
        goes_on(harness, target)
        assert harness.netns_of(target) != old

    def test_a_deadline_ends_a_dump_and_its_processes(self, harness: Harness) -> None:
        source = harness.start()
        pid = harness.pid(source)
        image = harness.image_root / "i"
        with raises(EngineTimeout) as caught:
            harness.stuck(source).checkpoint(dump_request(harness, source, image, timeout_s=1.0))
        assert caught.after() == "running", "the error tells the truth"
        until(lambda: not harness.stuck_processes(), "the runtime and its children end")
        assert not image.exists()
        assert harness.pid(source) == pid
        goes_on(harness, source)

    def test_a_deadline_ends_a_restore_and_its_processes(self, harness: Harness) -> None:
        source = harness.start()
        image = harness.image_root / "i"
        harness.engine(source).checkpoint(dump_request(harness, source, image))
        target = harness.prepare()
        with raises(EngineTimeout) as caught:
            harness.restore(harness.stuck(target), restore_request(harness, target, image, timeout_s=1.0))
        assert caught.after() == "stopped", "the error tells the truth"
        until(lambda: not harness.stuck_processes(), "the runtime and its children end")
        clean(harness, target)
        harness.restore(harness.engine(target), restore_request(harness, target, image))
        goes_on(harness, target)

    def test_inspect_names_the_engine(self, harness: Harness) -> None:
        source = harness.start()
        engine = harness.engine(source)
        image = harness.image_root / "i"
        engine.checkpoint(dump_request(harness, source, image))
        assert engine.inspect(image).engine == engine.name
        with raises(ImageNotFound):
            engine.inspect(harness.image_root / "none")

    def test_discard_and_undo_are_idempotent(self, harness: Harness) -> None:
        source = harness.start()
        engine = harness.engine(source)
        image = harness.image_root / "i"
        engine.checkpoint(dump_request(harness, source, image, leave_running=True))
        engine.undo(source)
        engine.undo(source)
        goes_on(harness, source)
        engine.discard(image)
        assert not image.exists()
        engine.discard(image)

    def test_errors_say_what_was_tried(self, harness: Harness) -> None:
        target = harness.prepare()
        try:
            harness.engine(target).restore(restore_request(harness, target, harness.image_root / "none"))
        except EngineError as error:
            message = str(error)
        else:
            raise AssertionError("a missing image was accepted")
        assert message.startswith("could not restore")
        assert target in message
        assert ";" in message, "it says what to do"
