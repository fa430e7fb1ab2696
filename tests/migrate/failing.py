"""`torpor` with a fault at one point: failing.py POINT ACTION DIRECTORY ARGUMENTS...

POINT is `before|after MODULE:NAME[=WORD][#N]`: a function or method of torpor's, of whose calls (with WORD
among its arguments) the N-th is meant, by default the first. ACTION is `kill`, by SIGKILL, of this process
and all that it has forked, or `cut`: it waits there until the test has cut the link. DIRECTORY gets a file
`reached`, and for `cut` the test puts `go` there.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POINT = re.compile(r"(before|after) ([\w.]+):([\w.]+)(?:=(\w+))?(?:#(\d+))?")


def arm(point: str, act: Callable[[], None]) -> None:
    """Let `act` be called at the point."""
    match = POINT.fullmatch(point)
    assert match, point
    when, module, name, word, number = match.groups()
    owner: Any = importlib.import_module(module)
    *parents, last = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = owner.__dict__[last]
    plain = original.__func__ if isinstance(original, classmethod) else original
    left = [int(number or 1)]

    @functools.wraps(plain)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        meant = word is None or any(
            word in (each, type(each).__name__) for each in args if not callable(each)
        )
        if meant:
            left[0] -= 1
        hit = meant and left[0] == 0
        if hit and when == "before":
            act()
        result = plain(*args, **kwargs)
        if hit and when == "after":
            act()
        return result

    setattr(owner, last, classmethod(wrapped) if isinstance(original, classmethod) else wrapped)


def main() -> None:
    point, action, directory, *words = sys.argv[1:]

    def act() -> None:
        Path(directory, "reached").touch()
        if action == "kill":
            os.killpg(0, signal.SIGKILL)
        while not Path(directory, "go").exists():
            time.sleep(0.005)

    arm(point, act)
    from shim.cli.main import main as torpor

    sys.argv = ["torpor", *words]
    torpor()


if __name__ == "__main__":
    main()
