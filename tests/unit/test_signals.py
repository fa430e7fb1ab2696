"""What a command says, and how it ends, when a signal ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

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
# What runs in the background of a shell ignores some.
signal.signal(int(os.environ["NUMBER"]), signal.SIG_DFL)
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


_IMPORTS = """
import os, signal, sys, threading
from shim.signals import Ended, end_once
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it may be ignored
end_once()
sys.path.insert(0, os.environ["MODULES"])
try:
    import slow
    for _ in range(10**9):
        pass
except Ended:
    import json  # no lock is left behind
    thread = threading.Thread(target=__import__, args=("decimal",), daemon=True)
    thread.start()
    thread.join(10)
    sys.exit(7 if slow.done and not thread.is_alive() else 8)
"""
_SLOW = """
import os, signal
done = False
os.kill(os.getpid(), signal.SIGTERM)
for _ in range(100_000):
    pass
done = True
"""


def test_an_import_is_not_torn(tmp_path: Path) -> None:
    """Python may lose what is raised there, and keep its lock of imports: other threads then hang."""
    (tmp_path / "slow.py").write_text(_SLOW)
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS],
        env={"MODULES": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        timeout=30,
        check=False,
    )
    assert done.returncode == 7
