"""What probes have in common.

A probe never raises. What it cannot find out it leaves out, and says why: a verdict for that node is then
`unknown` where it depends on it, never a guess.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TIMEOUT_S = 20.0


class Untold(Exception):  # no error of the caller's
    """The node does not tell. The message is the reason."""


@dataclass(frozen=True, kw_only=True)
class System:
    """Where a probe looks.

    root: where /proc, /sys and /dev are looked up. tools: programs by name. search_path: the PATH for them.
    store_path: where images are kept. bundle_path: where containers' root file systems lie.
    """

    root: Path = Path("/")
    tools: Mapping[str, Path] = field(default_factory=dict[str, Path])
    search_path: str = os.defpath
    store_path: Path = Path("/var/lib")
    bundle_path: Path = Path("/run")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a probe found. values: fields of a Profile; unknown: what it could not find out, and why."""

    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    unknown: Mapping[str, str] = field(default_factory=dict[str, str])


Probe = Callable[[System], Answer]


def probe(name: str) -> Callable[[Callable[[System], Mapping[str, Any]]], Probe]:
    """Make a function a probe: whatever it raises becomes the reason why `name` is unknown."""

    def wrap(ask: Callable[[System], Mapping[str, Any]]) -> Probe:
        @functools.wraps(ask)
        def run(system: System) -> Answer:
            try:
                return Answer(values=ask(system))
            except Exception as error:
                return Answer(unknown={name: " ".join(str(error).split())[:200] or type(error).__name__})

        return run

    return wrap


def output(system: System, *argv: str | Path, timeout_s: float = _TIMEOUT_S) -> str:
    """What a program prints. Raises Untold if it does not run or fails."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env={**os.environ, "PATH": system.search_path},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Untold(f"{argv[0]} does not run: {error}") from error
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise Untold(f"{argv[0]}: {last[0]}")
    return done.stdout or done.stderr
