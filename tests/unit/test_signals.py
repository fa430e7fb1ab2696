"""What a command says, and how it ends, when a signal ends it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_WAITS = """
import click, os, signal, sys
from shim.cli import main
module = type(sys)("waits")
@click.command()
def command():
    os.kill(os.getpid(), int(os.environ["NUMBER"]))
module.command = command
sys.modules["waits"] = module
main.COMMANDS["waits"] = ("waits", "")
main._exists = lambda name: True
main.main(["waits"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_named_and_told_to_the_shell(number: signal.Signals) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WAITS],
        env={"NUMBER": str(number.value), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stderr, done.returncode) == (f"Error: ended by {number.name}\n", 128 + number)
