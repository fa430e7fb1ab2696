"""What the commands of `torpor sim` share."""

from __future__ import annotations

import importlib.util
import sys

from rich.console import Console

from sim.errors import SimError

EXTRA = ("numpy", "simpy", "yaml", "pyarrow", "joblib")


def needs_extra(what: str) -> None:
    """Refuse what needs the packages of the extra `sim` where one is missing.

    Raises:
        SimError: one is.

    """
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise SimError(f"could not {what}: {missing[0]} is missing; pip install '.[sim]'")


def console(*, error: bool = False) -> Console:
    """A console that does not fold lines where nobody looks at a screen."""
    stream = sys.stderr if error else sys.stdout
    return Console(file=stream) if stream.isatty() else Console(file=stream, width=260)
