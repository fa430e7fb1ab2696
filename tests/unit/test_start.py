"""`start` of a held container: what it does before it uses up an image, and after."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines import registry
from engines.api import EngineSettings, InvalidRequest, ReleaseRequest
from engines.processes import start_time
from shim import signals, state
from shim import start as module
from shim.config import Config
from shim.errors import ShimError
from shim.start import start
from shim.state import ContainerState


class Place:
    """A held container of a runtime that says what `says` was told. done: what `start` did, in order."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.held = True
        self.runtime = path / "runc"
        self.directory = path / "c"
        self.config = Config(runtime_path=self.runtime, state_path=path, store_path=path / "store")
        state.make_private(self.directory)
        found = ContainerState(
            container_id="c",
            root="/r",
            bundle="/b",
            phase="held",
            engine="criu",
            image="web",
            digest="",
            use="move",
            created="",
        )
        state.save(self.directory, found)
        monkeypatch.setattr(registry, "create", lambda *_: self)
        monkeypatch.setattr(module, "_consume", lambda *_: self.done.append("consumed"))

    capabilities = frozenset({"held-restore"})

    def release(self, request: ReleaseRequest) -> None:
        if not self.held:
            raise InvalidRequest("it is not held")
        self.done.append("released")
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)

    def says(self, status: str, pid: int) -> None:
        told = json.dumps({"id": "c", "status": status, "pid": pid, "bundle": "/b"})
        self.runtime.write_text(f"#!/bin/sh\necho '{told}'\n")
        self.runtime.chmod(0o755)

    def start(self) -> Any:
        settings = EngineSettings(
            runtime_path=self.runtime, root_path=Path("/r"), state_path=self.directory, search_path="/bin"
        )
        return start(self.config, "c", self.directory, settings)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


@pytest.mark.parametrize(("status", "pid"), [("stopped", 0), ("paused", 2**22 + 1)])
def test_one_that_was_killed_before_it_ran_does_not_use_up_its_image(
    place: Place, status: str, pid: int
) -> None:
    place.says(status, pid)
    with pytest.raises(ShimError, match="it was killed before it ran; delete it"):
        place.start()
    assert place.done == []


def test_one_that_runs_already_is_noted_as_running(place: Place) -> None:
    place.says("running", os.getpid())
    place.held = False
    assert place.start()
    assert place.done == ["consumed"]
    found = state.load(place.directory)
    assert found
    assert found.phase == "running"
    assert not (place.directory / state.HELD).exists()


def test_the_runtime_is_not_asked_while_nobody_runs(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """runc's note is enough, of one that lives and of one that died."""
    note = tmp_path / "root" / "c" / "state.json"
    note.parent.mkdir(parents=True)
    found = state.load(place.directory)
    assert found
    state.save(place.directory, replace(found, root=str(tmp_path / "root")))
    for started, lives in ((start_time(os.getpid()), True), (1, False)):
        note.write_text(json.dumps({"init_process_pid": os.getpid(), "init_process_start": started}))
        if lives:
            assert place.start()
            state.save(place.directory, replace(found, root=str(tmp_path / "root")))
        else:
            with pytest.raises(ShimError, match="it was killed before it ran"):
                place.start()
    assert place.done == ["consumed", "released"]


def test_whoever_interrupts_one_that_is_let_run_is_too_late(place: Place) -> None:
    place.says("paused", os.getpid())
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        signals.end_once()
        assert place.start()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert place.done == ["consumed", "released"]
