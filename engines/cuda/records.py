"""What the engine writes down: in an image, and in a container's state directory between calls.

Standard library only: the undo of a killed call reads them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines.api import GpuNeed, ImageCorrupt
from engines.cuda.driver import Driver

SCHEMA = 1
IN_IMAGE = "cuda-gpus.json"
_OLD_IN_IMAGE = (
    "torpor-gpus.json"  # of earlier images; not to be written: see `engines.api.CheckpointRequest`
)
CALL = "cuda-call.json"
HELD = "cuda-held.json"
SUSPENDED = "torpor-gpus-suspended.json"  # in the runtime's state of the container: it goes with it


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that has its GPU memory in the host's.

    inner: its process id in the container's pid namespace and in those below, which a restore keeps.
    gpus: UUID to bytes.
    """

    inner: tuple[int, ...]
    comm: str
    gpus: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Asleep:
    """Processes whose GPU memory is in the host's. pairs: where a restore shall go, old UUID to new."""

    holders: tuple[Holder, ...]
    needs: tuple[GpuNeed, ...]
    pairs: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(kw_only=True)
class Call:
    """A call that is under way, for whoever must undo it.

    operation: "checkpoint", "suspend", "resume", "release", "restore" or "end". processes: (pid, start time)
    on the host, in the order in which they were locked. groups: the container's cgroups. was_frozen: by
    somebody else, before. suspended: path of the record of a container whose GPU memory is in the host's.
    image: what a dump writes; image_made: its directory did not exist before.
    """

    operation: str
    container_id: str
    runtime: list[str]
    search_path: str
    driver: Driver
    groups: dict[str, str]
    was_frozen: bool
    processes: list[tuple[int, int]]
    pairs: dict[str, str] = field(default_factory=dict[str, str])
    suspended: str = ""
    image: str = ""
    image_made: bool = False


def _write(path: Path, document: Mapping[str, Any]) -> None:
    draft = path.with_name(f".{path.name}")
    with draft.open("w") as file:
        json.dump({"schema": SCHEMA, **document}, file)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {document.get('schema')}, this is for {SCHEMA}")
    return document


def write_asleep(path: Path, asleep: Asleep) -> None:
    """Write, by rename. Raises OSError."""
    _write(path, asdict(asleep))


def read_asleep(path: Path) -> Asleep | None:
    """Read; None if there is no such file. Raises ValueError if it is unreadable."""
    try:
        document = _read(path)
        if document is None:
            return None
        return Asleep(
            holders=tuple(
                Holder(
                    inner=tuple(int(pid) for pid in holder["inner"]),
                    comm=str(holder["comm"]),
                    gpus={str(uuid): int(size) for uuid, size in holder["gpus"].items()},
                )
                for holder in document["holders"]
            ),
            needs=tuple(
                GpuNeed(
                    uuid=str(need["uuid"]),
                    model=str(need["model"]),
                    memory_bytes=int(need["memory_bytes"]),
                    driver=str(need["driver"]),
                )
                for need in document["needs"]
            ),
            pairs={str(old): str(new) for old, new in document["pairs"].items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error


def read_image(image_path: Path) -> Asleep:
    """What an image of this engine says about GPUs. Raises ImageCorrupt."""
    words = f"could not read image '{image_path}'"
    try:
        found = read_asleep(image_path / IN_IMAGE) or read_asleep(image_path / _OLD_IN_IMAGE)
    except (OSError, ValueError) as error:
        raise ImageCorrupt(f"{words}: {error}; take the checkpoint again, or copy it again") from error
    if found is None:
        raise ImageCorrupt(
            f"{words}: {IN_IMAGE} is missing, so it was not made by the engine criu-cuda; restore it with "
            "the engine that made it"
        )
    return found


def write_call(state_path: Path, call: Call) -> None:
    """Write the journal of a call. Raises OSError."""
    _write(state_path / CALL, asdict(call))


def read_call(state_path: Path) -> Call | None:
    """The journal of a call that has not ended, None if there is none. Raises ValueError."""
    document = _read(state_path / CALL)
    if document is None:
        return None
    del document["schema"]
    driver = document.pop("driver")
    processes = [(int(pid), int(start)) for pid, start in document.pop("processes")]
    try:
        return Call(
            **document,
            processes=processes,
            driver=Driver(site=tuple(driver["site"]), program=driver["program"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{state_path / CALL} is damaged: {error!r}") from error


def remove(path: Path) -> None:
    """Remove a file that may be gone."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
