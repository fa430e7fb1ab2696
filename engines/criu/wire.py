"""Reads the few numbers that a call needs from CRIU's files, without pycriu.

Importing pycriu costs about 80 ms, as much as a whole restore of a small container; a call needs four kinds
of number from fields that have kept their place in the protocol since CRIU 2. Whoever wants more of an
image uses `engines.criu.images`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

Fields = dict[int, list[int | bytes]]

_STOPPED = 3  # CRIU's TASK_STOPPED in core.proto
_TABLE_LETTERS = 21  # of the run id go into the name of CRIU's nftables table


def fields(message: bytes) -> Fields:
    """The fields of one protobuf message by number; a varint as int, everything else as bytes.

    Raises ValueError if it is not one.
    """
    found: Fields = {}
    at = 0
    try:
        while at < len(message):
            key, at = _varint(message, at)
            kind = key & 7
            if kind == 0:
                value, at = _varint(message, at)
            else:
                if kind == 2:
                    length, at = _varint(message, at)
                else:
                    length = {1: 8, 5: 4}[kind]
                value = message[at : at + length]
                if len(value) != length:
                    raise ValueError("truncated field")
                at += length
            found.setdefault(key >> 3, []).append(value)
    except (IndexError, KeyError) as error:
        raise ValueError("not a protobuf message") from error
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def first_entry(path: Path, *, magics: int = 2) -> Fields:
    """The first entry of a CRIU image file. Raises OSError, ValueError.

    magics: how many 4-byte magic numbers the file starts with: 1 for inventory.img, 2 for all others.
    """
    with path.open("rb") as file:
        data = file.read(1 << 20)
    start = 4 * magics + 4
    if len(data) < start:
        raise ValueError(f"{path.name} is too short")
    (size,) = struct.unpack_from("<I", data, start - 4)
    if len(data) < start + size:
        raise ValueError(f"{path.name} is truncated")
    return fields(data[start : start + size])


def _message(parent: Fields, number: int) -> Fields:
    value = parent.get(number, [b""])[0]
    return fields(value) if isinstance(value, bytes) else {}


def _number(parent: Fields, number: int) -> int:
    value = parent.get(number, [0])[0]
    return value if isinstance(value, int) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpNumbers:
    """CRIU's statistics of a dump; times in seconds."""

    freezing_s: float
    frozen_s: float
    memdump_s: float
    memwrite_s: float
    pages_scanned: int
    pages_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreNumbers:
    """CRIU's statistics of a restore; times in seconds."""

    forking_s: float
    restore_s: float
    pages_restored: int


def dump_numbers(work_path: Path) -> DumpNumbers | None:
    """Read `stats-dump`; None if there is none that can be read."""
    try:
        entry = _message(first_entry(work_path / "stats-dump"), 1)
    except (OSError, ValueError):
        return None
    return DumpNumbers(
        freezing_s=_number(entry, 1) / 1e6,
        frozen_s=_number(entry, 2) / 1e6,
        memdump_s=_number(entry, 3) / 1e6,
        memwrite_s=_number(entry, 4) / 1e6,
        pages_scanned=_number(entry, 5),
        pages_written=_number(entry, 7),
    )


def restore_numbers(work_path: Path) -> RestoreNumbers | None:
    """Read `stats-restore`; None if there is none that can be read."""
    try:
        entry = _message(first_entry(work_path / "stats-restore"), 2)
    except (OSError, ValueError):
        return None
    return RestoreNumbers(
        forking_s=_number(entry, 3) / 1e6,
        restore_s=_number(entry, 4) / 1e6,
        pages_restored=_number(entry, 5),
    )


def lock_table(image_path: Path) -> str | None:
    """Name of the nftables table with which the dump of this image locked the network."""
    try:
        run_id = first_entry(image_path / "inventory.img", magics=1).get(13, [b""])[0]
    except (OSError, ValueError):
        return None
    return table_of_run(run_id.decode()) if isinstance(run_id, bytes) and run_id else None


def table_of_run(run_id: str) -> str:
    """CRIU's table name for a run id; nftables names end there."""
    return f"CRIU-{run_id[:_TABLE_LETTERS]}"


def stopped_pids(image_path: Path) -> frozenset[int]:
    """Pids (in the container's pid namespace) of the tasks that had been stopped on purpose at the dump."""
    stopped: set[int] = set()
    for path in image_path.glob("core-*.img"):
        try:
            entry = first_entry(path)
            state = _number(_message(entry, 3), 1)
        except (OSError, ValueError):
            continue
        if state == _STOPPED:
            stopped.add(int(path.name[len("core-") : -len(".img")]))
    return frozenset(stopped)
