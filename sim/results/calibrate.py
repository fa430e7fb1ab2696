"""What checkpoints and restores of a runtime cost, from its timings.json files: a measured.json.

Studies read it (`costs: {file: measured.json}`) and draw from its quantiles, not from a mean. Times of a
phase are also fitted as `base + bytes / bandwidth` by least squares, and each is foretold from a fit of all
the others: how far that is off says how much a figure for another size of image is worth.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from sim.errors import BROKEN, SimError, why
from sim.maths.statistics import quantile
from sim.results.tables import write_atomically

SHARES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

STALL, PERSIST, RESTORE = "stall", "persist", "restore"
"""Phases that studies read: how long a container stood still, the rest of its checkpoint, and its restore."""

_DUMP = {"freezing_s": "freezing", "memdump_s": "memory dump", "memwrite_s": "memory write", "gpu_s": "gpu"}


@dataclass(frozen=True)
class Fit:
    """`base_s + bytes / bytes_per_s`; without a bandwidth where times do not grow with bytes."""

    base_s: float
    bytes_per_s: float | None

    def seconds(self, size: float) -> float:
        """What it makes of so many bytes."""
        return self.base_s + (size / self.bytes_per_s if self.bytes_per_s else 0.0)


@dataclass(frozen=True)
class Phase:
    """Times of one phase.

    Attributes:
        n: how many were measured.
        mean_s: their mean.
        times_s: quantiles, at `SHARES`.
        fit: over the bytes of the image.
        observed_s: the times, in the order of the files.
        predicted_s: each foretold from all the others; empty for fewer than three.
        error: median of |foretold - measured| / measured; None where nothing was foretold.

    """

    n: int
    mean_s: float
    times_s: tuple[float, ...]
    fit: Fit
    observed_s: tuple[float, ...]
    predicted_s: tuple[float, ...]
    error: float | None


@dataclass(frozen=True)
class Calibration:
    """Everything that was measured. `sources`: name and SHA-256 of each file; bytes are those of images."""

    engines: tuple[str, ...]
    checkpoints: int
    restores: int
    image_bytes: tuple[float, ...]
    phases: Mapping[str, Phase]
    sources: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Timing:
    operation: str
    engine: str
    image_bytes: float
    phases: Mapping[str, float]


def files(paths: Iterable[Path]) -> list[Path]:
    """The timings files that are named, or lie below folders that are.

    Raises:
        SimError: a path is not there, or there is no file at all.

    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            # An image has a timings.json; a store's history has a folder `timings` of them.
            found += sorted(
                {*path.rglob("timings.json"), *path.rglob("timings/*.json"), *path.glob("*.json")}
            )
        elif path.exists():
            found.append(path)
        else:
            raise SimError(
                f"could not read timings '{path}': there is no such file or folder; check the path"
            )
    if not found:
        raise SimError("could not read timings: there is no timings.json; give files, or a store's folder")
    return list(dict.fromkeys(found))


def _bad(path: Path, wrong: str) -> SimError:
    return SimError(f"could not read timings '{path}': {wrong}; give a timings.json as torpor writes it")


def _number(path: Path, document: Mapping[str, Any], key: str) -> float:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise _bad(path, f"{key} is {reprlib.repr(value)}, which is no time or size")
    return float(value)


def _read(path: Path) -> tuple[_Timing, str]:
    try:
        data = path.read_bytes()
        document = json.loads(data)
    except BROKEN as error:
        raise _bad(path, why(error)) from error
    if not isinstance(document, dict) or document.get("schema") != 1:  # pyright: ignore[reportUnknownMemberType]
        raise _bad(path, "it has no schema 1")
    fields: dict[str, Any] = document  # pyright: ignore[reportUnknownVariableType]
    operation = fields.get("operation")
    if operation not in ("checkpoint", "restore"):
        raise _bad(path, f"operation is {reprlib.repr(operation)}; it must be checkpoint or restore")
    total_s = _number(path, fields, "total_s")
    raw = fields.get("phases")
    if not isinstance(raw, dict):
        raise _bad(path, "phases is no object")
    named: dict[str, Any] = raw  # pyright: ignore[reportUnknownVariableType]
    phases = {f"{operation}: {name}": _number(path, named, name) for name in sorted(named)}
    dump: Any = fields.get("dump")
    if operation == "restore":
        phases[RESTORE] = total_s
    elif isinstance(dump, dict):
        numbers: dict[str, Any] = dump  # pyright: ignore[reportUnknownVariableType]
        # Work stops while GPUs are emptied, too, which the time frozen does not hold.
        stall_s = _number(path, numbers, "frozen_s") + _number(path, {"gpu_s": 0.0} | numbers, "gpu_s")
        phases[STALL], phases[PERSIST] = stall_s, max(0.0, total_s - stall_s)
        for key, name in _DUMP.items():
            # An engine that does not tell says 0.
            if numbers.get(key):
                phases[f"checkpoint: {name}"] = _number(path, numbers, key)
    size = _number(path, {"image_bytes": 0} | fields, "image_bytes")
    timing = _Timing(operation, str(fields.get("engine", "")), size, phases)
    return timing, hashlib.sha256(data).hexdigest()


def fit(sizes: Sequence[float], times_s: Sequence[float]) -> Fit:
    """Least squares of `base + bytes / bandwidth`, neither below 0; the mean where bytes explain nothing."""
    n = len(times_s)
    mean_size, mean_s = math.fsum(sizes) / n, math.fsum(times_s) / n
    spread = math.fsum((size - mean_size) ** 2 for size in sizes)
    together = math.fsum((x - mean_size) * (y - mean_s) for x, y in zip(sizes, times_s, strict=True))
    # Sizes that differ by less than a hundredth say nothing of how times grow with them.
    if n < 2 or spread <= n * (0.01 * mean_size) ** 2 or together <= 0:
        return Fit(mean_s, None)
    slope = together / spread
    base_s = mean_s - slope * mean_size
    if base_s < 0:
        base_s = 0.0
        slope = math.fsum(x * y for x, y in zip(sizes, times_s, strict=True)) / math.fsum(
            x * x for x in sizes
        )
    return Fit(base_s, 1 / slope)


def _phase(samples: Sequence[tuple[float, float]]) -> Phase:
    sizes = [size for size, _ in samples]
    times_s = [seconds for _, seconds in samples]
    ordered = sorted(times_s)
    predicted: list[float] = []
    if len(samples) >= 3:
        for left in range(len(samples)):
            others = fit(sizes[:left] + sizes[left + 1 :], times_s[:left] + times_s[left + 1 :])
            predicted.append(others.seconds(sizes[left]))
    off = sorted(abs(told - seen) / seen for told, seen in zip(predicted, times_s, strict=False) if seen > 0)
    return Phase(
        n=len(samples),
        mean_s=math.fsum(times_s) / len(times_s),
        times_s=tuple(quantile(ordered, share) for share in SHARES),
        fit=fit(sizes, times_s),
        observed_s=tuple(times_s) if predicted else (),
        predicted_s=tuple(predicted),
        error=quantile(off, 0.5) if off else None,
    )


def calibrate(paths: Iterable[Path]) -> Calibration:
    """Read timings files.

    Args:
        paths: files, and folders to look for them in.

    Raises:
        SimError: a file is none, or no checkpoint is among them.

    """
    timings: list[_Timing] = []
    sources: list[tuple[str, str]] = []
    for path in files(paths):
        timing, digest = _read(path)
        # An image and the history of its store both have the file of a checkpoint.
        if digest not in {known for _, known in sources}:
            timings.append(timing)
            sources.append((path.name, digest))
    samples: dict[str, list[tuple[float, float]]] = {}
    for timing in timings:
        for name, seconds in timing.phases.items():
            samples.setdefault(name, []).append((timing.image_bytes, seconds))
    if STALL not in samples:
        raise SimError(
            "could not calibrate: no checkpoint that tells how long it froze is among the timings; give "
            "those of one"
        )
    main = [name for name in (STALL, PERSIST, RESTORE) if name in samples]
    sizes = sorted(timing.image_bytes for timing in timings if timing.operation == "checkpoint")
    return Calibration(
        engines=tuple(sorted({timing.engine for timing in timings})),
        checkpoints=len(sizes),
        restores=len(timings) - len(sizes),
        image_bytes=tuple(quantile(sizes, share) for share in SHARES),
        phases={name: _phase(samples[name]) for name in (*main, *sorted(set(samples) - set(main)))},
        sources=tuple(sources),
    )


def save(calibration: Calibration, path: Path) -> None:
    """Write a measured.json."""
    document = {"schema": 1, "shares": SHARES, **asdict(calibration)}
    write_atomically(path, (json.dumps(document, indent=2) + "\n").encode())


def load(path: Path) -> Calibration:
    """Read a measured.json.

    Raises:
        SimError: it is none.

    """
    try:
        document = json.loads(path.read_bytes())
        if document["schema"] != 1 or tuple(document["shares"]) != SHARES:
            raise ValueError("it has another schema")
        return msgspec.convert(document, Calibration)
    except (*BROKEN, msgspec.ValidationError) as error:
        raise SimError(
            f"could not read '{path}': {why(error)}; make one with `torpor sim calibrate TIMINGS... -o FILE`"
        ) from error
