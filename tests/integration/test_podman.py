"""Podman with torpor as its runtime: its own checkpoint and restore commands, and restore at create."""

from __future__ import annotations

import pytest

from tests.support.containers import until
from tests.support.counter import COUNTER
from tests.support.podman import Podman
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine


def until_number(podman: Podman, name: str, least: int) -> int:
    return until(lambda: next((n for n in podman.numbers(name) if n >= least), 0), what=f"{name}: {least}")


def woken(podman: Podman, name: str, last: int) -> None:
    """The restored counter goes on above `last`. Podman keeps the old log, so numbers may start lower."""
    until_number(podman, name, last + 10)
    numbers = podman.numbers(name)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_export_and_import_under_another_name(podman: Podman, torpor: Torpor) -> None:
    podman.run("one", *COUNTER)
    last = until_number(podman, "one", 5)
    archive = podman.path / "one.tar.zst"
    podman("container", "checkpoint", "--export", archive, "one")
    assert podman.inspect("one")["State"]["Status"] == "exited"
    podman("rm", "--force", "--time=0", "one")
    podman("container", "restore", "--import", archive, "--name", "two")
    woken(podman, "two", last)
    assert podman("exec", "two", "sh", "-c", "exit 5", check=False).returncode == 5
    podman("stop", "--time=10", "two")
    assert podman.inspect("two")["State"]["ExitCode"] == 42


def test_checkpoint_and_restore_in_place(podman: Podman) -> None:
    podman.run("place", *COUNTER)
    last = until_number(podman, "place", 5)
    podman("container", "checkpoint", "place")
    podman("container", "restore", "place")
    woken(podman, "place", last)


def test_an_archive_of_podman_wakes_at_create(podman: Podman, torpor: Torpor) -> None:
    podman.run("source", *COUNTER)
    last = until_number(podman, "source", 5)
    archive = podman.path / "source.tar.zst"
    podman("container", "checkpoint", "--leave-running", "--export", archive, "source")
    until_number(podman, "source", last + 5)
    torpor.import_archive(archive, "from-podman")
    podman.run("woken", *COUNTER, options=["--annotation=torpor.dev/restore-from=from-podman"])
    woken(podman, "woken", last)
    assert podman.numbers("woken")[0] >= last
