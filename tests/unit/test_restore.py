"""What a failed restore may not leave unsaid."""

from __future__ import annotations

import contextlib
import errno
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from engines.api import EngineError, EngineSettings
from engines.mountinfo import parse
from shim import restore, state
from shim.annotations import Wish
from shim.config import Config
from shim.errors import NotUndone, ShimError
from shim.images import undo
from shim.images.rootfs import RootfsView
from shim.images.undo import save_upper
from shim.state import ContainerPhase, ContainerState
from shim.verbs import delete


def test_a_plain_directory_that_was_changed_is_not_passed_off_as_new(tmp_path: Path) -> None:
    """It has no upper directory to go back to, so a cold start over it would see the dump's files."""
    (tmp_path / "image").mkdir()
    with tarfile.open(tmp_path / "image" / "rootfs-diff.tar", "w") as tar:
        tar.add(__file__, "changed")
    root = tmp_path / "root"
    root.mkdir()
    image = SimpleNamespace(
        path=tmp_path / "image", manifest=SimpleNamespace(rootfs=SimpleNamespace(whiteouts="deleted.files"))
    )
    view = RootfsView(path=root, kind="directory")
    with (
        pytest.raises(NotUndone, match=r"no memory; the root file system .* was changed: make it anew"),
        restore._applied(cast("Any", image), view, tmp_path / "upper.json", timeout_s=60),
    ):
        assert (root / "changed").exists()
        raise RuntimeError("no memory")


@pytest.mark.parametrize("status", [0, 1])
def test_a_container_that_nobody_is_told_of_is_ended(tmp_path: Path, status: int) -> None:
    """The engine was through, and something else failed: it would stay frozen for ever."""
    runtime, asked, pid_file = tmp_path / "runc", tmp_path / "asked", tmp_path / "pid"
    runtime.write_text(f'#!/bin/sh\necho "$@" >{asked}\necho "it does not die" >&2\nexit {status}\n')
    runtime.chmod(0o755)
    pid_file.write_text("7")
    target = restore.Target(
        container_id="c",
        root="/run/x",
        directory=tmp_path,
        bundle_path=tmp_path,
        settings=EngineSettings(
            runtime_path=runtime,
            root_path=Path("/run/x"),
            state_path=tmp_path,
            search_path="/bin",
            runtime_args=("--systemd-cgroup",),
        ),
        pid_file_path=pid_file,
    )
    words = "no space$" if status == 0 else "no space; and could not end container 'c': it does not die"
    with pytest.raises(NotUndone if status else OSError, match=words), restore._made(target):
        raise OSError("no space")
    assert asked.read_text() == "--systemd-cgroup --root /run/x delete --force c\n"
    assert pid_file.exists() is bool(status)


def made_of(runtime: Path, directory: Path) -> restore.Target:
    return restore.Target(
        container_id="c",
        root="/run/x",
        directory=directory,
        bundle_path=directory,
        settings=EngineSettings(
            runtime_path=runtime, root_path=Path("/run/x"), state_path=directory, search_path="/bin"
        ),
    )


def restored(bundle: Path, phase: ContainerPhase) -> ContainerState:
    return ContainerState(
        container_id="c",
        root="/run/x",
        bundle=str(bundle),
        phase=phase,
        engine="criu",
        image="web",
        digest="sha256:" + "0" * 64,
        use="move",
        created="now",
    )


def forgotten_by(call: str, runtime: Path, directory: Path) -> None:
    """Delete the container, or prepare for another one of its id."""
    config = Config(runtime_path=runtime, state_path=directory.parent, store_path=directory.parent / "store")
    if call == "clear":
        assert not restore.clear(config, made_of(runtime, directory))
        return
    context = SimpleNamespace(
        call=SimpleNamespace(options={}, root="/run/x"),
        config=config,
        container_id="c",
        directory=directory,
        engine=lambda _: SimpleNamespace(undo=lambda _: None),
        engine_settings=made_of(runtime, directory).settings,
        runtime_args=(),
    )
    assert delete.serve(cast("Any", context)) == 0


@pytest.mark.parametrize("call", ["clear", "delete"])
def test_what_could_not_be_taken_back_is_when_the_container_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Without its record nobody would know of the only whole copy of the upper directory."""
    runtime, directory, upper = tmp_path / "runc", tmp_path / "c", tmp_path / "upper"
    runtime.write_text("#!/bin/sh\necho 'container does not exist' >&2\nexit 1\n")
    runtime.chmod(0o755)
    for path in (directory, upper, tmp_path / "image"):
        path.mkdir()
    (upper / "made").touch()
    (tmp_path / "image" / "rootfs-diff.tar").touch()
    mount = next(parse(b"1 0 0:1 / /root rw - overlay none rw\n"))
    view = RootfsView(path=tmp_path, kind="overlay", upper_path=upper, mount=mount)
    plan = SimpleNamespace(adopt=None, netns_path=None, guarded=False, addresses=(), tcp="close", mode="new")
    engine = SimpleNamespace(name="criu", capabilities={"held-restore"}, undo=lambda _: None)
    manifest = SimpleNamespace(
        engine=engine, effective_use="clone", rootfs=SimpleNamespace(whiteouts="deleted.files")
    )
    image = SimpleNamespace(
        path=tmp_path / "image",
        reference="web",
        digest="",
        checkpoint_path=tmp_path,
        manifest=manifest,
        needs=None,
    )
    store = SimpleNamespace(using=contextlib.nullcontext, verify=lambda *_, **__: None)
    for name, value in {
        "registry.create": engine,
        "_judge": ((), plan),
        "find_rootfs": view,
        "verdict.judge_files": (),
    }.items():
        monkeypatch.setattr(f"shim.restore.{name}", lambda *_, value=value, **__: value)
    monkeypatch.setattr(restore, "apply", lambda *_, **__: (upper / "made").unlink())
    config = Config(runtime_path=runtime, state_path=tmp_path, store_path=tmp_path / "store")
    with (
        monkeypatch.context() as patch,
        pytest.raises(NotUndone, match=r"CRIU failed; and could not undo .* busy"),
    ):
        patch.setattr(restore, "_restore", Mock(side_effect=EngineError("CRIU failed")))
        patch.setattr(undo, "_put_back", Mock(side_effect=OSError(errno.EBUSY, "busy")))
        restore.at_create(
            config,
            cast("Any", store),
            cast("Any", image),
            made_of(runtime, directory),
            {},
            Wish(network="new"),
        )
    assert list(tmp_path.glob(".torpor-upper-*/made"))
    forgotten_by(call, runtime, directory)
    assert (upper / "made").exists()
    assert not list(tmp_path.glob(".torpor-*"))
    assert not (directory / state.UPPER).exists()


@pytest.mark.parametrize("call", ["clear", "delete"])
def test_a_restore_that_was_killed_when_it_was_through_leaves_no_copy(tmp_path: Path, call: str) -> None:
    """Of the upper directory; it lies on a disk, where nobody would look for it."""
    runtime, directory, upper = tmp_path / "runc", tmp_path / "c", tmp_path / "upper"
    runtime.write_text("#!/bin/sh\necho 'container does not exist' >&2\nexit 1\n")
    runtime.chmod(0o755)
    directory.mkdir()
    upper.mkdir()
    (upper / "made").touch()
    mount = next(parse(b"1 0 0:1 / /root rw - overlay none rw\n"))
    view = RootfsView(path=tmp_path, kind="overlay", upper_path=upper, mount=mount)
    save_upper(view, directory / state.UPPER, timeout_s=60)
    (upper / "now").touch()
    assert list(tmp_path.glob(".torpor-upper-*/made"))
    state.save(directory, restored(tmp_path, "held"))
    forgotten_by(call, runtime, directory)
    assert not list(tmp_path.glob(".torpor-*"))
    assert {path.name for path in upper.iterdir()} == {"made", "now"}


def test_a_container_that_the_runtime_could_not_be_asked_for_keeps_its_state(tmp_path: Path) -> None:
    runtime = tmp_path / "runc"
    runtime.write_text("#!/bin/sh\necho 'fork/exec: resource temporarily unavailable' >&2\nexit 1\n")
    runtime.chmod(0o755)
    directory = tmp_path / "c"
    directory.mkdir()
    found = restored(tmp_path, "running")
    state.save(directory, found)
    target = made_of(runtime, directory)
    config = Config(runtime_path=runtime, state_path=tmp_path, store_path=tmp_path / "store")
    with pytest.raises(ShimError, match="temporarily unavailable"):
        restore.clear(config, target)
    assert state.load(directory) == found
    runtime.write_text("#!/bin/sh\necho 'container does not exist' >&2\nexit 1\n")
    assert not restore.clear(config, target)
    assert state.load(directory) is None
