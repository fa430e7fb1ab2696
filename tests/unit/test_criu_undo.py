"""What an undo touches, and what it leaves alone: other calls, other processes, other cgroups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.api import DumpFailed, EngineError, EngineTimeout, InvalidRequest, RestoreFailed, RestoreRequest
from engines.criu import calls, cgroups, guardian, tree, undo
from engines.criu.calls import Guarded
from engines.criu.extras import Extras
from engines.criu.journal import Journal
from engines.criu.phases import Script, Stage
from engines.criu.runtime import Bundle
from engines.criu.stages import RestoreStages
from engines.processes import start_time


def a_call(state: Path, **more: object) -> Journal:
    fields: dict[str, object] = {
        "operation": "checkpoint",
        "container_id": "c",
        "runtime": "/nonexistent",
        "runtime_args": [],
        "root": str(state / "root"),
        "state": str(state),
        "search_path": str(state / "bin"),
        "image": str(state / "image"),
    }
    written = Journal(**(fields | more))  # pyright: ignore[reportArgumentType]
    written.work_path.mkdir(parents=True, exist_ok=True)
    return written


@pytest.fixture
def later(tmp_path: Path) -> Journal:
    """The journal of a call that runs, with an image half written."""
    found = a_call(tmp_path)
    found.write()
    Path(found.image).mkdir()
    Path(found.image, "pages-1.img").touch()
    return found


def untouched(later: Journal) -> bool:
    return later.stands() and Path(later.image, "pages-1.img").exists()


def test_a_late_guardian_leaves_a_later_call_alone(later: Journal) -> None:
    argv = [sys.executable, "-IS", guardian.__file__, later.state, "60"]
    subprocess.run([*argv, "earlier"], stdin=subprocess.DEVNULL, check=True)
    assert untouched(later)
    subprocess.run([*argv, later.token], stdin=subprocess.DEVNULL, check=True)
    assert not later.stands()
    assert not Path(later.image, "pages-1.img").exists()


def test_a_call_that_was_undone_leaves_a_later_one_alone(later: Journal) -> None:
    earlier = a_call(Path(later.state), init=os.getpid(), init_start=start_time(os.getpid()))
    with pytest.raises(ZeroDivisionError), Guarded(earlier, 60) as guarded:
        later.write()
        assert guarded.undo().state == "running"
        assert not earlier.update()
        raise ZeroDivisionError
    assert untouched(later)
    with Guarded(a_call(Path(later.state)), 60):
        later.write()
    assert untouched(later), "one that went well neither"


@pytest.mark.parametrize(
    ("operation", "error", "kind"),
    [
        ("restore", RestoreFailed("its cgroup did not freeze", after="stopped"), RestoreFailed),
        ("restore", EngineTimeout("its cgroup did not freeze"), EngineTimeout),
        ("restore", ValueError("its cgroup did not freeze"), RestoreFailed),
        ("checkpoint", InvalidRequest("its cgroup did not freeze"), InvalidRequest),
        ("checkpoint", ValueError("its cgroup did not freeze"), DumpFailed),
    ],
)
def test_whatever_fails_a_call_tells_what_could_not_be_undone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    error: Exception,
    kind: type[EngineError],
) -> None:
    """Else the caller would start the container cold beside what is left."""
    left = undo.Outcome(state="stopped", problems=["restored tasks do not die", "no nft"])
    monkeypatch.setattr(calls, "undo_own", lambda _: left)
    with (
        pytest.raises(
            kind, match="did not freeze; could not undo: restored tasks do not die; no nft"
        ) as told,
        Guarded(a_call(tmp_path, operation=operation), 60),
    ):
        raise error
    assert not told.value.undone
    left.problems.clear()
    with pytest.raises(KeyError), Guarded(a_call(tmp_path, operation=operation), 60):
        raise KeyError


BUNDLE = Bundle(rootfs_path=Path("/b/rootfs"), netns="", cgroups_path="", annotations={})


def test_a_stage_of_a_call_that_was_undone_fails(later: Journal) -> None:
    request = RestoreRequest(
        container_id="c", bundle_path=Path("/b"), image_path=Path(later.image), timeout_s=1
    )
    stages = RestoreStages(request, a_call(Path(later.state), operation="restore"), BUNDLE, None)
    with pytest.raises(EngineTimeout, match="undone"):
        stages.stage(Stage("pre-restore", os.getpid(), os.getpid(), 0))
    assert untouched(later)


def test_groups_that_were_ours_at_the_restore_are_never_the_container_s(tmp_path: Path) -> None:
    """Whoever undoes it may be in others, and would take ours for the container's."""
    found = a_call(tmp_path, operation="restore")
    found.write()
    request = RestoreRequest(container_id="c", bundle_path=Path("/b"), image_path=tmp_path, timeout_s=1)
    RestoreStages(request, found, BUNDLE, None).stage(Stage("pre-restore", os.getpid(), os.getpid(), 0))
    assert cgroups.of_process("self")
    assert found.groups == {}


def test_a_note_that_cannot_be_followed_is_a_failed_restore(tmp_path: Path) -> None:
    """So that a cold start may follow."""
    (tmp_path / "file").touch()
    found = a_call(tmp_path, operation="restore", groups={"x": str(tmp_path)})
    request = RestoreRequest(container_id="c", bundle_path=Path("/b"), image_path=tmp_path, timeout_s=1)
    below = {tree.inner(os.getpid()): {"x": "/file/x"}}
    noted = Extras(schema=1, affinity={}, cgroups=below, timers=[])
    with pytest.raises(RestoreFailed, match="file/x") as failure:
        RestoreStages(request, found, BUNDLE, noted).stage(Stage("post-restore", 0, 0, os.getpid()))
    assert failure.value.undone


def test_a_reused_pid_is_not_the_container(tmp_path: Path) -> None:
    """Neither its files nor its network namespace are touched."""
    remap = tmp_path / "link_remap.1"
    remap.touch()
    entered = tmp_path / "entered"
    nsenter = tmp_path / "bin" / "nsenter"
    nsenter.parent.mkdir()
    nsenter.write_text(f"#!/bin/sh\n: >{entered}\n")
    nsenter.chmod(0o755)
    ours = start_time(os.getpid())
    for init_start, touched in ((ours + 1, False), (ours, True)):
        found = a_call(tmp_path, init=os.getpid(), init_start=init_start)
        (found.work_path / "dump.log").write_text(
            f"CRIU run id = 01234567-89ab-cdef-0123-456789abcdef\nCreated {remap}\n"
        )
        undo.undo(found)
        assert remap.exists() != touched
        assert entered.exists() == touched


def test_start_up_leftovers_may_vanish_meanwhile_and_only_they_go(
    tmp_path: Path, later: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    yards = tmp_path / "tmp"
    yards.mkdir()
    monkeypatch.setattr(undo, "_TEMPORARY", str(yards))
    check = ".criu.move_mount_set_group"
    (yards / f"{check}.a").mkdir()
    (yards / f"{check}.b").mkdir()
    old = yards / f"{check}.old"
    old.mkdir()
    # Somebody's, perhaps in another pid namespace, who has mounted a whole container there.
    used = yards / ".criu.mntns.AbCdEf"
    used.mkdir()
    os.utime(old, (1, 1))
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path.name == f"{check}.a":
            raise FileNotFoundError
        return real(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    undo.undo(later)
    assert not (yards / f"{check}.b").exists() or criu_runs()
    assert old.exists()
    assert used.exists()


def criu_runs() -> bool:
    return any(path.read_text() == "criu\n" for path in Path("/proc").glob("[0-9]*/comm") if path.exists())


def test_criu_has_not_ended_before_it_has_begun(tmp_path: Path) -> None:
    """A runtime may take seconds until it starts CRIU."""
    for operation, log in (("restore", "restore.log"), ("checkpoint", "dump.log"), ("pre-dump", "dump.log")):
        found = a_call(tmp_path / operation, operation=operation)
        with Script() as script:
            watch = calls._Watch(os.getpid(), script, found)
            assert [watch.wait(0) for _ in range(4)] == [False] * 4
            (found.work_path / log).touch()
            assert [watch.wait(0) for _ in range(4)] == [False, True, False, False], "told once"
            watch.close()
