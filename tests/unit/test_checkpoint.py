"""A checkpoint into the store is whole or has not happened, whatever fails when."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from engines import registry
from engines.api import (
    CheckpointRequest,
    DumpFailed,
    DumpStats,
    EngineSettings,
    ImageError,
    Needs,
    NotSupported,
    PhaseInfo,
    Restored,
    RestoreFailed,
    RestoreRequest,
)
from engines.guard import remove_partial
from shim import argv, bundle, checkpoint, leases, settling, signals, state
from shim.checkpoint import Source, Wanted, into_store, take
from shim.config import Config, load
from shim.errors import AdmissionRefused, Unsettled
from shim.images import layout
from shim.images import store as store_module
from shim.images.layout import Reference
from shim.images.store import Store
from shim.start import start
from shim.state import ContainerState
from shim.verbs import checkpoint as verb
from shim.verbs.context import Context

NEEDS = Needs(engine="criu", image_version="2", tasks=(), namespaces={})
WEB = Reference(namespace="", name="web")


class Engine:
    """Dumps a word. fails: raise after the image was declared complete; what it wrote goes, as with CRIU."""

    name = "criu"
    capabilities = frozenset({"leave-running", "phases"})

    def __init__(self, word: str = "one", *, fails: bool = False) -> None:
        self.word = word
        self.fails = fails
        self.undone: list[str] = []

    def inspect(self, image_path: Path, /) -> Needs:
        assert (image_path / "inventory.img").is_file()
        return NEEDS

    def checkpoint(self, request: CheckpointRequest, /) -> DumpStats:
        request.image_path.mkdir()
        (request.image_path / "inventory.img").write_text(self.word)
        assert request.on_phase
        info = PhaseInfo(pid=1, netns_path=None, lock_table=None)
        request.on_phase("frozen", info)
        request.on_phase("dumped", info)
        self.meanwhile()
        if self.fails:
            remove_partial(request.image_path, made=True)
            raise DumpFailed(
                "could not checkpoint container 'c': the end was missing; try again", after="running"
            )
        return DumpStats(frozen_s=0.1, total_s=0.2, image_bytes=3)

    def meanwhile(self) -> None:
        """What happens when the source may die."""

    def undo(self, container_id: str, /) -> None:
        self.undone.append(container_id)


class Place:
    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.monkeypatch = monkeypatch
        self.runtime = path / "runc"
        self.store = Store(path / "store")
        bundle = path / "bundle"
        (bundle / "rootfs").mkdir(parents=True)
        (bundle / "rootfs" / "file").write_text("x")
        (bundle / "config.json").write_text(
            json.dumps({"process": {"args": ["x"]}, "root": {"path": "rootfs"}})
        )
        self.lives(False)
        settings = EngineSettings(
            runtime_path=self.runtime, root_path=path, state_path=path / "run" / "c", search_path="/bin"
        )
        self.source = Source(
            container_id="c",
            root=str(path),
            directory=path / "run" / "c",
            bundle_path=bundle,
            settings=settings,
        )
        self.config = Config(runtime_path=self.runtime, state_path=path / "run", store_path=path / "store")

    def lives(self, alive: bool | None) -> None:
        """What the runtime says of the container; None: it cannot say anything."""
        state = json.dumps({"id": "c", "status": "running", "pid": 1, "bundle": "/b"})
        lacks = "container does not exist" if alive is not None else "Cannot allocate memory"
        says = f"echo '{state}'" if alive else f"echo '{lacks}' >&2; exit 1"
        self.runtime.write_text(f"#!/bin/sh\n{says}\n")
        self.runtime.chmod(0o755)

    def pending(self) -> bytes:
        return settling.pending(self.source.container_id, self.source.root, self.source.directory)

    def settle(self, monkeypatch: pytest.MonkeyPatch, engine: Engine | None = None) -> None:
        """What the next call does, when this process is as good as dead."""
        with monkeypatch.context() as patch:
            patch.setattr(registry, "create", lambda *_: engine or Engine())
            patch.setattr(state, "start_time", lambda _: "")
            settling.settle(self.config, self.store)

    def take(self, engine: Engine, **more: Any) -> str:
        self.monkeypatch.setattr(registry, "choose", lambda *_: engine)
        image, _ = into_store(self.source, self.config, self.store, WEB, stop=True, full_copy=True, **more)
        return image.digest


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def test_a_stopping_checkpoint_ends_settled(place: Place) -> None:
    digest = place.take(Engine())
    image = place.store.resolve(WEB)
    assert image.digest == digest
    assert not (image.path / layout.PENDING).exists()
    assert (image.path / layout.TIMINGS).is_file()
    place.store.verify(image, pages=True)


def test_a_failure_after_the_image_got_its_name_takes_it_back(place: Place) -> None:
    place.lives(True)
    with pytest.raises(DumpFailed):
        place.take(Engine(fails=True))
    assert not place.store.list()
    assert not list((place.path / "store" / "staging").iterdir())


def test_such_a_failure_gives_a_replaced_image_back(place: Place) -> None:
    digest = place.take(Engine("old"))
    place.lives(True)
    with pytest.raises(DumpFailed):
        place.take(Engine("new", fails=True), replace=True)
    assert place.store.resolve(WEB).digest == digest
    place.store.verify(place.store.resolve(WEB), pages=True)


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "no-exchange"])
def test_nor_does_it_go_while_others_clean_up_or_replace_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    class Crowded(Engine):
        def meanwhile(self) -> None:
            other = Store(place.store.path)
            other.recover()
            with other.staging() as staged:
                shutil.copytree(copy, staged, dirs_exist_ok=True)
                with pytest.raises(ImageError, match="not at its end"):
                    other.commit(staged, WEB, replace=True)

    if not exchanges:
        monkeypatch.setattr(store_module, "exchange", lambda *_: False)
    digest = place.take(Engine("old"))
    copy = place.path / "copy"
    shutil.copytree(place.store.resolve(WEB).path, copy)
    place.lives(True)
    with pytest.raises(DumpFailed):
        place.take(Crowded("new", fails=True), replace=True)
    assert place.store.resolve(WEB).digest == digest
    place.store.verify(place.store.resolve(WEB), pages=True)
    place.lives(False)
    assert place.take(Engine("new"), replace=True) != digest
    for where in ("staging", "replaced"):
        assert os.listdir(place.store.path / where) == []


@pytest.mark.parametrize("alive", [True, False], ids=["source-lives", "source-gone"])
def test_a_kill_after_the_replacement_leaves_the_one_image_or_the_other(
    place: Place, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    class Killed(Engine):
        def checkpoint(self, request: CheckpointRequest, /) -> DumpStats:
            dumped.write_text(str(request.image_path))
            return super().checkpoint(request)

        def meanwhile(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    dumped = place.path / "dumped"
    old = place.take(Engine("old"))
    child = os.fork()
    if child == 0:
        try:
            place.take(Killed("new"), replace=True)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    remove_partial(Path(dumped.read_text()), made=True)  # so does the guardian
    place.lives(alive)
    place.store.recover()
    with pytest.raises(Unsettled):
        place.store.resolve(WEB)
    place.settle(monkeypatch)
    image = place.store.resolve(WEB)
    place.store.verify(image, pages=True)
    assert (image.digest == old) is alive
    for where in ("staging", "replaced"):
        assert os.listdir(place.store.path / where) == []


def test_a_failure_after_the_source_has_died_leaves_the_image(place: Place) -> None:
    """It is all there is."""
    with pytest.raises(DumpFailed):
        place.take(Engine("last", fails=True))
    image = place.store.resolve(WEB)
    assert (image.checkpoint_path / "inventory.img").read_text() == "last"
    place.store.verify(image, pages=True)


def test_nobody_decides_while_the_runtime_cannot_be_asked(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.lives(None)
    with pytest.raises(DumpFailed):
        place.take(Engine(fails=True))
    for _ in range(2):
        with pytest.raises(Unsettled):
            place.store.resolve(WEB)
        place.settle(monkeypatch)  # the checkpoints of others go on
    place.lives(False)
    place.settle(monkeypatch)
    assert place.store.resolve(WEB)


def test_the_place_of_one_that_was_killed_is_kept_by_the_next_call(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "capabilities", frozenset({"phases", "tcp-established"}))
    monkeypatch.setattr(leases, "sleep", killed)
    with pytest.raises(KeyboardInterrupt):
        place.take(Engine(), keep_tcp=True)
    monkeypatch.setattr(leases, "sleep", lambda _, image: kept.append(image.digest))
    place.settle(monkeypatch)
    assert kept == [place.store.resolve(WEB).digest]


@pytest.mark.parametrize("alive", [True, False, None], ids=["source-lives", "source-gone", "who-knows"])
def test_so_it_is_in_the_directory_of_a_caller(place: Place, alive: bool | None) -> None:
    place.lives(alive)
    place.monkeypatch.setattr(registry, "choose", lambda *_: Engine("last", fails=True))
    image_path = place.path / "image"
    wanted = Wanted(
        image_path=image_path,
        extras_path=image_path / layout.EXTRAS,
        work_path=None,
        leave_running=False,
        rootfs="if-overlay",
    )
    with pytest.raises(DumpFailed):
        take(place.source, place.config, wanted, lambda _: None)
    assert bool(list(image_path.iterdir())) is (alive is not True)


def test_logs_that_cannot_be_left_do_not_spoil_a_checkpoint(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_leave_logs", full)
    place.take(Engine())
    assert place.store.resolve(WEB)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_interrupts_when_the_source_may_die_is_too_late(place: Place, number: int) -> None:
    class Slow(Engine):
        def checkpoint(self, request: CheckpointRequest, /) -> DumpStats:
            stats = super().checkpoint(request)
            os.kill(os.getpid(), number)
            return stats

    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        signals.end_once()
        place.take(Slow())
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert place.store.resolve(WEB)


@pytest.mark.parametrize("alive", [True, False], ids=["source-lives", "source-gone"])
def test_one_that_was_killed_is_settled_by_its_source(
    place: Place, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    place.take(Engine())
    path = place.store.resolve(WEB).path
    note = {
        "schema": 1,
        "container_id": "c",
        "root": str(place.path),
        "directory": str(place.source.directory),
        "pid": 2**22 + 1,
        "pid_start": "1",
    }
    (path / layout.PENDING).write_text(json.dumps(note))
    with pytest.raises(Unsettled):
        place.store.resolve(WEB)
    engine = Engine()
    monkeypatch.setattr(registry, "create", lambda *_: engine)
    place.lives(alive)
    settling.settle(place.config, place.store)
    assert engine.undone == ["c"]
    assert bool(place.store.list()) is not alive
    if not alive:
        place.store.verify(place.store.resolve(WEB), pages=True)


def pend(place: Place) -> Path:
    """An image whose checkpoint was killed; its note."""
    place.take(Engine())
    path = place.store.resolve(WEB).path / layout.PENDING
    path.write_bytes(place.pending())
    return path


def test_a_call_at_work_on_the_source_of_a_killed_one_is_left_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pend(place)
    engine = Engine()
    with state.locked(place.source.directory, wait_s=0, create=True):
        place.settle(monkeypatch, engine)
    assert path.exists()
    assert engine.undone == []
    place.settle(monkeypatch, engine)
    assert place.store.resolve(WEB)
    assert not place.source.directory.exists()


def test_a_source_that_cannot_be_undone_yet_keeps_nobody_else_from_a_checkpoint(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held(Engine):
        def undo(self, container_id: str, /) -> None:
            raise DumpFailed("decide there first", after="paused", undone=False)

    path = pend(place)
    place.settle(monkeypatch, Held())
    assert path.exists()
    assert "left: decide there first" in (place.store.path / "audit.log").read_text()


def killed(place: Place) -> Path:
    """What a killed call of another engine has left; its log."""
    directory = place.source.directory
    log = directory / checkpoint.WORK / "dump.log"
    log.parent.mkdir(parents=True)
    log.touch()
    (directory / "other-call.json").touch()
    state.note_engine(directory, "other")
    return log


def test_what_a_killed_call_left_is_undone_by_its_own_engine_and_log(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(Engine):
        def undo(self, container_id: str, /) -> None:
            assert log.exists()
            (place.source.directory / "other-call.json").unlink()
            super().undo(container_id)

    log, other = killed(place), Other()
    engines = {"other": other, "criu": Engine()}
    monkeypatch.setattr(registry, "create", lambda name, _: engines[name])
    place.take(engines["criu"])
    assert other.undone == ["c"]
    assert not place.source.directory.exists()


def test_one_that_cannot_be_undone_yet_keeps_all_that_its_undo_will_need(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held(Engine):
        def undo(self, container_id: str, /) -> None:
            raise DumpFailed("decide there first", after="paused", undone=False)

    log = killed(place)
    monkeypatch.setattr(registry, "create", lambda *_: Held())
    with pytest.raises(DumpFailed, match="decide there first"):
        place.take(Engine())
    assert log.exists()
    assert state.engine_at_work(place.source.directory) == "other"


def test_an_image_that_cannot_be_taken_back_does_not_hide_why(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ImageError("could not withdraw image: Input/output error")

    monkeypatch.setattr(Store, "withdraw", broken)
    place.lives(True)
    with pytest.raises(DumpFailed, match="the end was missing"):
        place.take(Engine(fails=True))
    assert "failed: could not checkpoint" in (place.store.path / "audit.log").read_text()


def test_an_image_for_a_caller_is_on_disk_before_its_source_may_die(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopping(Engine):
        def meanwhile(self) -> None:
            assert image_path.parent in synced

    synced: list[Path] = []
    image_path = place.path / "new" / "image"
    place.lives(True)
    monkeypatch.setattr(verb, "sync_directory", synced.append)
    monkeypatch.setattr(registry, "choose", lambda *_: Stopping())
    there = SimpleNamespace(status="running", bundle_path=place.source.bundle_path)
    monkeypatch.setattr(bundle, "runtime_state", lambda *_: there)
    settings = {
        "RUNTIME": str(place.runtime),
        "STATE": str(place.path / "run"),
        "STORE": str(place.store.path),
        "CONFIG": str(place.path / "config.toml"),
    }
    call = argv.parse(["checkpoint", "--image-path", str(image_path), "c"], "runc")
    assert verb.serve(Context(call=call, settings=settings, config=load(settings))) == 0
    assert synced


def test_one_that_is_being_taken_is_left_alone(place: Place) -> None:
    place.take(Engine())
    path = place.store.resolve(WEB).path
    (path / layout.PENDING).write_bytes(place.pending())
    settling.settle(place.config, place.store)
    assert (path / layout.PENDING).exists()


def test_one_that_another_call_settled_meanwhile_is_no_error(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.take(Engine())
    image = place.store.resolve(WEB)
    monkeypatch.setattr(Store, "unsettled", lambda _: [image])
    settling.settle(place.config, place.store)
    assert place.store.resolve(WEB).digest == image.digest


def test_times_that_cannot_be_kept_do_not_spoil_a_checkpoint(place: Place) -> None:
    place.store.ensure()
    (place.path / "store" / "timings").write_text("in the way")
    place.take(Engine())
    assert place.store.resolve(WEB)


def test_an_image_in_use_is_neither_removed_nor_replaced(place: Place) -> None:
    place.take(Engine())
    image = place.store.resolve(WEB)
    with place.store.using(image):
        with pytest.raises(ImageError, match="is being restored"):
            place.store.remove(WEB)
        with pytest.raises(ImageError, match="is being restored"):
            place.take(Engine("new"), replace=True)
        assert place.store.resolve(WEB).digest == image.digest
    place.store.remove(WEB)
    assert os.listdir(place.path / "store" / "staging") == []


def test_so_is_one_that_wakes_up_only_in_start(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.take(Engine())
    image = place.store.resolve(WEB)

    class Late(Engine):
        name = "gvisor"
        capabilities = frozenset()

        def restore(self, request: RestoreRequest, /) -> Restored:
            with pytest.raises(ImageError, match="is being restored"):
                place.store.remove(WEB)
            assert request.image_path == image.checkpoint_path
            return Restored(pid=1, total_s=0.1)

    monkeypatch.setattr(registry, "create", lambda *_: Late())
    directory = created(place, use="clone")
    assert start(place.config, "c", directory, place.source.settings)
    found = state.load(directory)
    assert found and found.phase == "running"


def created(place: Place, *, use: Literal["clone", "move"], root: str = "/r") -> Path:
    """A container that is to wake up in `start`; torpor's state of it."""
    image = place.store.resolve(WEB)
    directory = place.source.directory
    state.make_private(directory)
    found = ContainerState(
        container_id="c",
        root=root,
        bundle=str(place.source.bundle_path),
        phase="held",
        engine="gvisor",
        image=str(image.reference),
        digest=image.digest,
        use=use,
        created="now",
    )
    state.save(directory, found)
    return directory


@pytest.mark.parametrize("tells", [True, False], ids=["phases", "no-phases"])
def test_one_that_fails_in_start_uses_its_image_up_only_where_it_may_have_run(
    place: Place, monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    class Late(Engine):
        name = "gvisor"
        capabilities = frozenset({"phases"} if tells else ())
        early = True

        def restore(self, request: RestoreRequest, /) -> Restored:
            if not self.early and request.on_phase:
                request.on_phase("restored", PhaseInfo(pid=1, netns_path=None, lock_table=None))
                assert place.store.consumed_by(image) == "c of /r"
            raise RestoreFailed("no space left")

    place.take(Engine())
    image, engine = place.store.resolve(WEB), Late()
    monkeypatch.setattr(registry, "create", lambda *_: engine)

    def fail(root: str) -> None:
        directory = created(place, use="move", root=root)
        start(place.config, "c", directory, place.source.settings)

    with pytest.raises(RestoreFailed):
        fail("/r")
    assert place.store.consumed_by(image) == (None if tells else "c of /r")
    engine.early = False
    with pytest.raises(RestoreFailed):
        fail("/r")
    assert place.store.consumed_by(image) == "c of /r"
    with pytest.raises(AdmissionRefused, match="'c of /r' has it"):
        fail("/other")
    # Where the engine had begun it has undone all, and nothing is left here either.
    assert place.source.directory.exists() is not tells


def test_connections_that_the_engine_cannot_keep_are_refused_before_it_is_asked(place: Place) -> None:
    def never(_: CheckpointRequest) -> DumpStats:
        raise AssertionError("the engine was asked")

    engine = Engine()
    place.monkeypatch.setattr(engine, "checkpoint", never)
    with pytest.raises(NotSupported, match="without --keep-tcp"):
        place.take(engine, keep_tcp=True)
    assert not place.store.has(WEB)
