"""How long each phase of a checkpoint or restore took: timings.json, which the simulator also reads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from engines.api import DumpStats, Restored
from shim.state import make_private

N_KEPT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """One checkpoint or restore. phases: name to seconds; they may overlap and need not add up to total_s.

    dump, restored: what the engine itself measured; None for the other operation.
    """

    operation: Literal["checkpoint", "restore"]
    container_id: str
    engine: str
    image: str
    started: str
    total_s: float
    phases: dict[str, float]
    image_bytes: int = 0
    dump: DumpStats | None = None
    restored: Restored | None = None
    schema: int = 1


@dataclass(slots=True)
class Stopwatch:
    """Collects phases of one operation. Times are seconds of the monotonic clock."""

    begun: float = field(default_factory=time.monotonic)
    phases: dict[str, float] = field(default_factory=dict[str, float])

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Add the time spent inside to the phase `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - start

    @property
    def total_s(self) -> float:
        """Seconds since the stopwatch was made."""
        return time.monotonic() - self.begun


def encode(timings: Timings) -> bytes:
    """What a timings.json holds."""
    return msgspec.json.format(msgspec.json.encode(timings), indent=2) + b"\n"


def record(store_path: Path, timings: Timings) -> None:
    """Keep a timings.json in the store's history, newest 1,000.

    Never raises: what was done is done, whether its times can be kept or not.
    """
    directory = store_path / "timings"
    with contextlib.suppress(OSError):
        make_private(directory)
        stamp = timings.started.replace(":", "").replace("-", "").replace(".", "")
        path = directory / f"{stamp}-{timings.operation}-{timings.container_id[:64]}.json"
        path.write_bytes(encode(timings))
        path.chmod(0o600)
        for old in sorted(directory.iterdir())[:-N_KEPT]:
            old.unlink(missing_ok=True)
