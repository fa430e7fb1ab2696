"""Podman with gVisor through torpor: everyday calls, sleep by `torpor`, and what it cannot do is said."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containers import until
from tests.support.counter import COUNTER
from tests.support.podman import Podman
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine


@pytest.fixture
def podman(place: Path, tag: str, torpor: Torpor) -> Iterator[Podman]:
    client = Podman(place / f"g-{secrets.token_hex(2)}", tag, torpor.runtime_runsc)
    yield client
    client.close()


def until_number(podman: Podman, name: str, least: int) -> int:
    return until(lambda: next((n for n in podman.numbers(name) if n >= least), 0), what=f"{name}: {least}")


def test_run_exec_and_stop(podman: Podman) -> None:
    podman.run("plain", *COUNTER)
    until_number(podman, "plain", 3)
    assert "gVisor" in podman("exec", "plain", "dmesg").stdout
    assert podman("exec", "plain", "sh", "-c", "exit 5", check=False).returncode == 5
    podman("stop", "--time=10", "plain")
    assert podman.inspect("plain")["State"]["ExitCode"] == 42


def test_one_sleeps_and_wakes(podman: Podman, torpor: Torpor) -> None:
    podman.run("one", *COUNTER)
    last = until_number(podman, "one", 5)
    torpor("checkpoint", podman.inspect("one")["Id"], "--root", "/run/runsc", "--name", "pod-gv", "--stop")
    until(lambda: podman.inspect("one")["State"]["Status"] == "exited", what="Podman sees its end")
    podman.run("two", *COUNTER, options=["--annotation=torpor.dev/restore-from=pod-gv"])
    until_number(podman, "two", last + 5)
    numbers = podman.numbers("two")
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert numbers[0] > last
    podman("stop", "--time=10", "two")
    assert podman.inspect("two")["State"]["ExitCode"] == 42


def test_its_own_checkpoint_and_restore_are_refused_with_the_reason(podman: Podman) -> None:
    podman.run("place", *COUNTER)
    last = until_number(podman, "place", 3)
    for verb in ("checkpoint", "restore"):
        done = podman("container", verb, "place", check=False)
        assert done.returncode != 0
        assert "runtime does not support checkpoint/restore" in done.stderr
    until_number(podman, "place", last + 3)
