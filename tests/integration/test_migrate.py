"""Migrations between two nodes of a lab, in a room of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.netlab import room
from tests.support.containers import CHECKOUT

pytestmark = [pytest.mark.engine, pytest.mark.soak]


@pytest.mark.parametrize("play", ["scenes", "decisions", "refusals", "ways", "guests", "routed"])
def test_migrate(play: str) -> None:
    room.sweep()
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        f"tests/migrate/{play}.py",
    ]
    done = subprocess.run(
        room.words(words),
        env=room.environment(),
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0
