"""gVisor containers under containerd's runc shim, through torpor: they run, sleep and wake."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containerd import Containerd
from tests.support.containers import until
from tests.support.ctr import Tasks
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine


@pytest.fixture
def tasks(daemon: Containerd, torpor: Torpor, tmp_path: Path) -> Iterator[Tasks]:
    tasks = Tasks(daemon, torpor, tmp_path, torpor.runtime_runsc)
    yield tasks
    tasks.close()


def until_stopped(tasks: Tasks, container_id: str) -> None:
    until(lambda: tasks.status(container_id) == "STOPPED", what="the task ends")


def in_sequence(numbers: list[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_everyday_calls_reach_runsc(tasks: Tasks) -> None:
    tasks.run("every")
    tasks.until_number("every", 3)
    assert "gVisor" in tasks.ctr("task", "exec", "--exec-id", "e", "every", "dmesg")
    done = tasks.daemon.ctr(
        *("task", "exec", "--exec-id", "f", "every", "sh", "-c", "exit 7"),
        namespace=tasks.daemon.tag,
        check=False,
    )
    assert done.returncode == 7
    tasks.ctr("task", "pause", "every")
    until(lambda: tasks.status("every") == "PAUSED", what="the task pauses")
    tasks.ctr("task", "resume", "every")
    tasks.ctr("task", "kill", "--signal", "SIGTERM", "every")
    until_stopped(tasks, "every")
    assert "exit code 42" in tasks.ctr("task", "delete", "every", check=False)


def test_a_counter_sleeps_and_wakes_as_two_others(tasks: Tasks) -> None:
    tasks.run("asleep")
    last = tasks.until_number("asleep", 5)
    tasks.torpor("checkpoint", "asleep", "--root", root(tasks), "--name", "gv", "--stop", "--use", "clone")
    until_stopped(tasks, "asleep")
    tasks.ctr("task", "delete", "asleep", check=False)  # its log is complete only then
    before = tasks.numbers("asleep")
    assert before[-1] >= last
    for name in ("clone-1", "clone-2"):
        tasks.run(name, "--annotation", "torpor.dev/restore-from=gv")
    for name in ("clone-1", "clone-2"):
        tasks.until_number(name, before[-1] + 5)
        numbers = tasks.numbers(name)
        assert numbers[0] == before[-1] + 1
        assert in_sequence(numbers)
        # The image holds what it wrote to its root file system.
        said = tasks.ctr("task", "exec", "--exec-id", f"e-{name}", name, "cat", "/data/count")
        assert int(said.split()[-1]) >= numbers[0]
    rows = {row["id"]: row for row in tasks.torpor.json("ps")}
    assert rows["clone-1"]["phase"] == rows["clone-1"]["status"] == "running"
    assert rows["clone-1"]["engine"] == "gvisor"
    tasks.ctr("task", "kill", "--signal", "SIGTERM", "clone-1")
    until_stopped(tasks, "clone-1")
    assert "exit code 42" in tasks.ctr("task", "delete", "clone-1", check=False)


def test_one_that_runs_on_gives_an_image_by_the_caller_too(tasks: Tasks) -> None:
    tasks.run("source")
    folder = tasks.path / "image"
    last = tasks.until_number("source", 5)
    tasks.ctr("task", "checkpoint", "--image-path", folder, "source")
    assert (folder / "checkpoint.img").exists()
    with tarfile.open(tasks.path / "image.tar", "w") as tar:
        tar.add(folder, arcname="checkpoint")
    tasks.torpor.import_archive(tasks.path / "image.tar", "gv-archive")
    tasks.until_number("source", last + 5)
    tasks.run("woken1", "--annotation", "torpor.dev/restore-from=gv-archive")
    tasks.until_number("woken1", last + 5)
    assert tasks.numbers("woken1")[0] >= last


def test_an_image_for_one_use_is_used_up_at_start(tasks: Tasks) -> None:
    tasks.run("moving")
    tasks.until_number("moving", 5)
    tasks.torpor("checkpoint", "moving", "--root", root(tasks), "--name", "gv-move", "--stop")
    until_stopped(tasks, "moving")
    tasks.run("moved-1", "--annotation", "torpor.dev/restore-from=gv-move")
    tasks.until_number("moved-1", 6)
    said = tasks.run("moved-2", "--annotation", "torpor.dev/restore-from=gv-move", check=False)
    assert "has used it" in said


def test_an_exec_session_is_in_the_way(tasks: Tasks) -> None:
    tasks.run("busy")
    tasks.until_number("busy", 3)
    tasks.ctr("task", "exec", "--detach", "--exec-id", "guest", "busy", "sleep", "1000")
    said = tasks.torpor("checkpoint", "busy", "--root", root(tasks), "--name", "gv-busy", check=False)
    assert said.returncode == 1
    assert "an exec session runs in it (sleep" in said.stderr
    tasks.until_number("busy", tasks.numbers("busy")[-1] + 3)


def test_an_image_goes_only_through_its_own_runtime(tasks: Tasks) -> None:
    tasks.run("gv-only")
    tasks.until_number("gv-only", 3)
    tasks.torpor("checkpoint", "gv-only", "--root", root(tasks), "--name", "gv-only")
    runc = Tasks(tasks.daemon, tasks.torpor, tasks.path)
    try:
        said = runc.run("on-runc", "--annotation", "torpor.dev/restore-from=gv-only", check=False)
        assert "does not work through runc" in said
        said = tasks.torpor(
            *("checkpoint", "gv-only", "--root", root(tasks), "--name", "x", "--engine", "criu"), check=False
        ).stderr
        assert "does not work through runsc" in said
    finally:
        runc.close()


def test_a_damaged_image_is_refused_at_create(tasks: Tasks) -> None:
    tasks.run("sound")
    tasks.until_number("sound", 3)
    tasks.torpor("checkpoint", "sound", "--root", root(tasks), "--name", "gv-bad")
    pages = tasks.torpor.image_path("gv-bad") / "checkpoint" / "pages_meta.img"
    data = pages.read_bytes()
    pages.chmod(0o600)
    pages.write_bytes(data[:-1] + bytes([data[-1] ^ 0xFF]))
    said = tasks.run("unsound", "--annotation", "torpor.dev/restore-from=gv-bad", check=False)
    assert "pages_meta.img" in said
    assert tasks.numbers("unsound") == []


def test_a_restore_that_would_lack_a_file_is_refused_and_leaves_nothing(tasks: Tasks) -> None:
    there, empty = tasks.path / "there", tasks.path / "empty"
    there.mkdir()
    empty.mkdir()
    (there / "file").touch()
    argv = ("sh", "-c", "exec 3</mnt/file; i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.05; done")

    def mount(source: Path) -> tuple[str, ...]:
        return ("--mount", f"type=bind,src={source},dst=/mnt,options=rbind:ro")

    tasks.run("holds-file", *mount(there), argv=argv)
    tasks.until_number("holds-file", 3)
    tasks.torpor("checkpoint", "holds-file", "--root", root(tasks), "--name", "gv-file")
    wish = ("--annotation", "torpor.dev/restore-from=gv-file")
    said = tasks.run("lacks-file", *mount(empty), *wish, argv=argv, check=False)
    assert "the image has '/mnt/file' open, which cannot be found here: No such file" in said
    assert tasks.numbers("lacks-file") == []
    assert not list(root(tasks).glob("lacks-file*"))
    assert tasks.torpor.json("ps") == []
    tasks.run("has-file", *mount(there), *wish, argv=argv)
    tasks.until_number("has-file", 6)


def root(tasks: Tasks) -> Path:
    """The --root that containerd's shim gives to the runtime."""
    return tasks.daemon.runc_root / tasks.daemon.tag
