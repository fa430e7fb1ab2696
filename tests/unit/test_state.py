"""A container's state survives a crash at any point, and one call at a time holds it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim import state
from shim.errors import Busy, ShimError
from shim.state import ContainerState


def make(**changes: object) -> ContainerState:
    values: dict[str, object] = {
        "container_id": "c1",
        "root": "/run/runc",
        "bundle": "/b",
        "phase": "restoring",
        "engine": "criu",
        "image": "web@sha256:" + "0" * 64,
        "digest": "sha256:" + "0" * 64,
        "use": "clone",
        "created": "2026-01-01T00:00:00.000Z",
    }
    return ContainerState(**{**values, **changes})  # type: ignore[arg-type]


def test_phases_leave_the_marker_that_the_entry_point_looks_for(tmp_path: Path) -> None:
    found = make()
    state.save(tmp_path, found)
    assert not (tmp_path / state.HELD).exists()
    found = state.advance(tmp_path, found, "held")
    assert (tmp_path / state.HELD).exists()
    found = state.advance(tmp_path, found, "running")
    assert not (tmp_path / state.HELD).exists()
    assert state.load(tmp_path) == found


@given(st.text(), st.text(), st.sampled_from(["restoring", "held", "running"]))
def test_round_trip(image: str, bundle: str, phase: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        found = make(image=image, bundle=bundle, phase=phase)
        state.save(Path(name), found)
        assert state.load(Path(name)) == found


def test_no_state_is_none(tmp_path: Path) -> None:
    assert state.load(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"phase": "asleep"}', b'{"schema": 1}'])
def test_a_damaged_state_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / state.STATE).write_bytes(content)
    with pytest.raises(ShimError, match="is damaged"):
        state.load(tmp_path)


def test_remove_takes_everything_and_may_be_repeated(tmp_path: Path) -> None:
    directory = tmp_path / "c1"
    (directory / "work").mkdir(parents=True)
    (directory / "work" / "dump.log").touch()
    (directory / "link").symlink_to(tmp_path)
    state.save(directory, make(phase="held"))
    state.remove(directory)
    assert not directory.exists()
    state.remove(directory)
    assert tmp_path.exists()


HOLDER = """
import sys, time
from pathlib import Path
from shim import state
with state.locked(Path(sys.argv[1]), wait_s=0, create=True):
    print("held", flush=True)
    sys.stdin.read()
print("released", flush=True)
time.sleep(60)
"""


def hold(directory: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "held\n"
    return process


def test_a_second_call_is_told_who_holds_the_container(tmp_path: Path) -> None:
    process = hold(tmp_path / "c1")
    try:
        with (
            pytest.raises(Busy, match=rf"'c1' is held by another torpor call \(pid {process.pid}\)"),
            state.locked(tmp_path / "c1", wait_s=0.05),
        ):
            pass
    finally:
        process.kill()
        process.wait()
    with state.locked(tmp_path / "c1", wait_s=5):
        pass


def test_delete_can_interrupt_the_holder(tmp_path: Path) -> None:
    process = hold(tmp_path / "c1")
    state.interrupt(tmp_path / "c1")
    assert process.wait(timeout=5) == -signal.SIGKILL
    with state.locked(tmp_path / "c1", wait_s=5):
        pass


def test_who_only_settles_what_is_left_of_a_container_is_no_holder_to_kill(tmp_path: Path) -> None:
    with state.locked(tmp_path, wait_s=0, aside=True):
        assert (tmp_path / state.LOCK).read_text() == ""
        with pytest.raises(Busy), state.locked(tmp_path, wait_s=0):
            pass
    with state.locked(tmp_path, wait_s=0):
        assert (tmp_path / state.LOCK).read_text().startswith(f"{os.getpid()} ")


def test_interrupt_never_kills_a_stranger_with_the_pid(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        with state.locked(tmp_path, wait_s=0):
            (tmp_path / state.LOCK).write_text(f"{stranger.pid} 1")
            state.interrupt(tmp_path)
        time.sleep(0.05)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("named", [True, False], ids=["named-yet", "not-named"])
def test_nor_one_that_has_let_go_of_the_container(tmp_path: Path, named: bool) -> None:
    """A checkpoint has yet to keep the place of what sleeps, while its source is deleted."""
    state.save(tmp_path, make())
    process = hold(tmp_path)
    try:
        name = (tmp_path / state.LOCK).read_text()
        assert process.stdin and process.stdout
        process.stdin.close()
        assert process.stdout.readline() == "released\n"
        assert (tmp_path / state.LOCK).read_text() == ""
        if named:  # by an older torpor
            (tmp_path / state.LOCK).write_text(name)
        state.interrupt(tmp_path)
        time.sleep(0.05)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_lock_on_a_removed_directory_is_no_lock(tmp_path: Path) -> None:
    directory = tmp_path / "c1"
    process = hold(directory)
    state.remove(directory)
    process.kill()
    process.wait()
    with pytest.raises(FileNotFoundError), state.locked(directory, wait_s=0):
        pass
    with state.locked(directory, wait_s=0, create=True):
        assert (directory / state.LOCK).read_text().split()[0] == str(os.getpid())


def test_state_is_for_root_alone_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        state.make_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(old)
    for name in ("a", "a/b", "a/b/c"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700


def test_a_call_that_leaves_does_not_take_the_next_holder_s_directory(tmp_path: Path) -> None:
    directory = tmp_path / "c1"
    with state.locked(directory, wait_s=0, create=True):
        state.remove(directory)
        process = hold(directory)  # anew
    try:
        with pytest.raises(Busy), state.locked(directory, wait_s=0):
            pass
    finally:
        process.kill()
        process.wait()


def test_a_directory_that_goes_while_a_call_waits_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder leaves between the waiter's making and its opening."""
    directory = tmp_path / "c1"
    make_private, left = state.make_private, [True]

    def made(path: Path) -> None:
        make_private(path)
        if path == directory and left:
            left.clear()
            state.remove(path)

    monkeypatch.setattr(state, "make_private", made)
    with state.locked(directory, wait_s=0, create=True):
        assert (directory / state.LOCK).exists()
    with pytest.raises(FileNotFoundError), state.locked(directory, wait_s=0):
        pass
