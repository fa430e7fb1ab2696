"""Figures: values beside those of a peer, measured in turns in one run."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.support.containers import command, tool

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table. value, peer: medians in `unit`; ratio: value / peer.

    peer_name: what torpor is compared with. rounds: number of measurements of each. spread: from the
    lower to the upper quartile of the value.
    """

    name: str
    value: float
    unit: str
    peer: float
    ratio: float
    peer_name: str
    rounds: int
    spread: tuple[float, float]


Samples = Mapping[str, Sequence[float]]


class Series:
    """Collects samples by name and makes figures of them."""

    def __init__(self) -> None:
        self.samples: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, name: str, value: float) -> None:
        """Note one sample."""
        self.samples[name].append(value)

    def median(self, name: str) -> float:
        """The median of a name's samples."""
        return statistics.median(self.samples[name])

    def figure(self, name: str, ours: str, peer: str, *, peer_name: str, unit: str = "s") -> Figure:
        """A figure from the samples of two names."""
        values = self.samples[ours]
        value, least = self.median(ours), self.median(peer)
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (value, value, value)
        return Figure(
            name=name,
            value=value,
            unit=unit,
            peer=least,
            ratio=value / least if least else 0.0,
            peer_name=peer_name,
            rounds=len(values),
            spread=(low, high),
        )


def in_turns(items: Sequence[T], number: int) -> Sequence[T]:
    """The items of round `number`: each round begins with another one, so that none is always the first."""
    first = number % len(items)
    return (*items[first:], *items[:first])


def seconds(action: Callable[[], object]) -> float:
    """Seconds of the clock that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def spawn_s(argv: Sequence[str | Path]) -> float:
    """Seconds from the start of a program to its end. Raises AssertionError if it fails."""
    words = [str(word) for word in argv]
    start = time.perf_counter()
    pid = os.posix_spawn(words[0], words, os.environ)
    _, status = os.waitpid(pid, 0)
    elapsed = time.perf_counter() - start
    assert status == 0, words
    return elapsed


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    memory = Path("/proc/meminfo").read_text().split()
    return {
        "arch": platform.machine(),
        "kernel": platform.release(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "memory_bytes": int(memory[1]) * 1024,
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        "tools": {name: _version(name) for name in ("criu", "runc", "containerd", "podman")},
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _version(name: str) -> str:
    lines = command(tool(name), "--version").stdout.splitlines()
    words = lines[0].split() if lines else []
    return next((word for word in words if word.lstrip("v")[:1].isdigit()), "")
