"""Numbers with units, as people write them: `5m`, `4.86 TB`, `20 Gbps`, `$3.06/h`."""

from __future__ import annotations

import difflib
import math
import re

_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_VALUE = re.compile(rf"^\s*{_NUMBER}\s*([A-Za-zµ$/%]*)\s*$")
_PRICE = re.compile(rf"^\s*(?:\$\s*{_NUMBER}|{_NUMBER}\s*(?:\$|USD))\s*/\s*([A-Za-z]+)\s*$")

TIMES = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
    "w": 604800.0,
}  # fmt: skip
_POWERS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
SIZES = {f"{prefix}B": factor for prefix, factor in (_POWERS | _BINARY).items()}
BANDWIDTHS = (
    {f"{unit}/s": factor for unit, factor in SIZES.items()}
    | {f"{prefix}bps": factor / 8 for prefix, factor in _POWERS.items()}
    | {f"{prefix}bit/s": factor / 8 for prefix, factor in _POWERS.items()}
)
RATES = {f"/{unit}": 1 / seconds for unit, seconds in TIMES.items()}


class UnitError(ValueError):
    """A text is no number with a unit of the kind that is wanted. The message goes on after 'is ...; '."""


def _read(text: str, units: dict[str, float], example: str) -> float:
    match = _VALUE.match(text)
    if match is None:
        raise UnitError(f"it must be a number with a unit, like {example}")
    number, unit = float(match[1]), match[2]
    if not unit and number == 0:
        return 0.0
    if unit not in units:
        if not unit:
            raise UnitError(f"it has no unit; write it like {example}")
        close = difflib.get_close_matches(unit, units, 1, 0.4)
        near = close[0] if close else next((one for one in units if one.lower() == unit.lower()), "")
        hint = f"did you mean '{near}'" if near else f"there are {', '.join(units)}"
        raise UnitError(f"'{unit}' is no unit here; {hint}")
    return _finite(number * units[unit])


def _finite(value: float) -> float:
    """A value that a number holds. Raises UnitError."""
    if not math.isfinite(value):
        raise UnitError("it is too large for a number")
    return value


def seconds(text: str) -> float:
    """A time in seconds. Raises UnitError."""
    return _read(text, TIMES, "5m")


def size(text: str) -> float:
    """A size in bytes. Raises UnitError."""
    return _read(text, SIZES, "80GB")


def bandwidth(text: str) -> float:
    """A bandwidth in bytes a second; `bps` counts bits. Raises UnitError."""
    return _read(text, BANDWIDTHS, "20Gbps or 2.5GB/s")


def rate(text: str) -> float:
    """How often a second, of `3/h`. Raises UnitError."""
    return _read(text, RATES, "3/h")


def price(text: str) -> float:
    """Dollars a second, of `$3.06/h`. Raises UnitError."""
    match = _PRICE.match(text)
    if match is None or match[3] not in TIMES:
        raise UnitError("it must be dollars for a time, like $3.06/h")
    return _finite(float(match[1] or match[2]) / TIMES[match[3]])


def price_of_size(text: str) -> float:
    """Dollars a byte, of `$0.02/GB`. Raises UnitError."""
    match = _PRICE.match(text)
    if match is None or match[3] not in SIZES:
        raise UnitError("it must be dollars for a size, like $0.02/GB")
    return _finite(float(match[1] or match[2]) / SIZES[match[3]])
