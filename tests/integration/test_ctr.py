"""torpor under containerd's own command: run, checkpoint, restore at create by an annotation."""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containerd import Containerd, runc_options
from tests.support.containers import until
from tests.support.counter import COUNTER
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine


class Tasks:
    """Containers of one containerd namespace, which is also their cgroup's parent."""

    def __init__(self, daemon: Containerd, torpor: Torpor, path: Path) -> None:
        self.daemon = daemon
        self.torpor = torpor
        self.path = path
        self.ids: list[str] = []

    def ctr(self, *words: str | Path, check: bool = True) -> str:
        done = self.daemon.ctr(*words, namespace=self.daemon.tag, check=check)
        return done.stdout + done.stderr

    def run(self, container_id: str, *options: str, check: bool = True) -> str:
        """`ctr run`; what it printed."""
        image = self.daemon.image("busybox", namespace=self.daemon.tag)
        self.ids.append(container_id)
        runtime = runc_options(self.torpor.runtime, self.daemon)
        log = f"file://{self.log_path(container_id)}"
        return self.ctr(
            "run",
            "--detach",
            *runtime,
            "--log-uri",
            log,
            *options,
            image,
            container_id,
            *COUNTER,
            check=check,
        )

    def log_path(self, container_id: str) -> Path:
        return self.path / f"{container_id}.log"

    def numbers(self, container_id: str) -> list[int]:
        path = self.log_path(container_id)
        lines = path.read_text().splitlines() if path.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith("tick ")]

    def until_number(self, container_id: str, least: int) -> int:
        return until(
            lambda: next((n for n in self.numbers(container_id) if n >= least), 0), what=f"tick {least}"
        )

    def status(self, container_id: str) -> str:
        lines = self.ctr("task", "ls").splitlines()
        return next((line.split()[2] for line in lines if line.split()[0] == container_id), "")

    def remove(self, container_id: str) -> None:
        self.ctr("task", "kill", "--signal", "SIGKILL", container_id, check=False)
        with contextlib.suppress(AssertionError):
            until(lambda: self.status(container_id) in {"", "STOPPED"}, what="the task ends")
        self.ctr("task", "delete", "--force", container_id, check=False)
        self.ctr("container", "delete", container_id, check=False)

    def close(self) -> None:
        for container_id in self.ids:
            self.remove(container_id)


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
    assert last <= numbers[0] <= last + 20
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert "exec-1 9" in tasks.ctr(
        "task", "exec", "--exec-id", "e", "two", "sh", "-c", "echo exec-$$ 9 | sed s/-[0-9]*/-1/"
    )
    tasks.ctr("task", "pause", "two")
    assert tasks.status("two") == "PAUSED"
    tasks.ctr("task", "resume", "two")
    assert tasks.status("two") == "RUNNING"
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
