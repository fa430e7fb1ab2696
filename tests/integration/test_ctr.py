"""torpor under containerd's own command: run, checkpoint, restore at create by an annotation."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containerd import Containerd
from tests.support.containers import until
from tests.support.counter import UNTIL_ASLEEP
from tests.support.ctr import Tasks
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine


@pytest.fixture
def tasks(daemon: Containerd, torpor: Torpor, tmp_path: Path) -> Iterator[Tasks]:
    tasks = Tasks(daemon, torpor, tmp_path)
    yield tasks
    tasks.close()


def checkpoint(tasks: Tasks, container_id: str, name: str) -> int:
    """`ctr task checkpoint` into a directory, imported as `name`; the last number before it."""
    folder = tasks.path / name
    last = tasks.until_number(container_id, 5)
    tasks.ctr("task", "checkpoint", "--image-path", folder, container_id)
    assert (folder / "inventory.img").exists()
    assert (folder / "torpor-manifest.json").exists()
    archive = tasks.path / f"{name}.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(folder, arcname="checkpoint")
    tasks.torpor.import_archive(archive, name)
    return last


def test_a_counter_sleeps_and_wakes_as_another_container(tasks: Tasks) -> None:
    tasks.run("one")
    last = checkpoint(tasks, "one", "ctr-image")
    tasks.until_number("one", last + 10)
    tasks.remove("one")
    tasks.run("two", "--annotation", "torpor.dev/restore-from=ctr-image")
    tasks.until_number("two", last + 5)
    numbers = tasks.numbers("two")
    assert last <= numbers[0] <= last + UNTIL_ASLEEP
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert "exec-1 9" in tasks.ctr(
        "task", "exec", "--exec-id", "e", "two", "sh", "-c", "echo exec-$$ 9 | sed s/-[0-9]*/-1/"
    )
    tasks.ctr("task", "pause", "two")
    until(lambda: tasks.status("two") == "PAUSED", what="the task pauses")
    tasks.ctr("task", "resume", "two")
    until(lambda: tasks.status("two") == "RUNNING", what="the task goes on")
    tasks.ctr("task", "kill", "--signal", "SIGKILL", "two")
    until(lambda: tasks.status("two") == "STOPPED", what="the task ends")


def test_a_stopped_source_wakes_under_its_own_name(tasks: Tasks) -> None:
    tasks.run("same")
    last = checkpoint(tasks, "same", "same-image")
    tasks.remove("same")
    tasks.log_path("same").unlink()
    tasks.run("same", "--annotation", "torpor.dev/restore-from=same-image")
    tasks.until_number("same", last + 5)
    assert tasks.numbers("same")[0] >= last


def test_ctr_says_why_a_restore_failed(tasks: Tasks) -> None:
    said = tasks.run("none", "--annotation", "torpor.dev/restore-from=no-such-image", check=False)
    assert "no-such-image" in said
    assert "could not" in said
    assert tasks.numbers("none") == []
