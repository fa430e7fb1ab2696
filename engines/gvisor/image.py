"""What is in an image directory: runsc's files, and a record of what runsc does not write down.

runsc's `checkpoint.img` begins with a magic word and a JSON header, which tells how many containers are in it
and how it is compressed. Everything else that decides whether the image can be restored (the release of
runsc, its options, the privileges of the processes) stands in `gvisor.json`, which the
engine writes beside it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from engines.api import FileNeed, ImageCorrupt, ImageNotFound
from engines.gvisor.runsc import Task

STATE = "checkpoint.img"
PAGES = ("pages.img", "pages_meta.img")
RECORD = "gvisor.json"
MAGIC = b"gVisorSF"
SCHEMA = 1
_MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Member:
    """One container of a dumped pod: see `Record` for its parts."""

    spec: Mapping[str, Any]
    mounts: Mapping[str, Mapping[str, Any]]
    tasks: tuple[Task, ...]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What the engine writes down at the dump.

    runsc: its release; setup: the options an image depends on (see `runsc.setup`). spec: the parts of the
    dumped container's specification that say what its processes may do, without arguments and environment.
    mounts: destination as resolved inside the root file system to the specification's entry.
    tasks: its processes. memory_bytes: resident in the sandbox at the dump. terminal: see `terminal.read`.
    files: what it held of the node's files, where it is the only container of its sandbox.
    pod: every container of the sandbox by its name, the pause container by ""; empty if there is no pod.
    """

    schema: int = SCHEMA
    runsc: str
    setup: Mapping[str, str]
    spec: Mapping[str, Any]
    mounts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    tasks: tuple[Task, ...]
    memory_bytes: int = 0
    files: tuple[FileNeed, ...] = ()
    terminal: str = ""
    pod: Mapping[str, Member] = field(default_factory=dict[str, Member])

    def write(self, image_path: Path) -> None:
        """Put the record into an image."""
        path = image_path / RECORD
        path.write_text(json.dumps(asdict(self), sort_keys=True))
        path.chmod(0o600)


def header(image_path: Path) -> dict[str, str]:
    """Runsc's own header. Raises ImageNotFound, ImageCorrupt."""
    if not image_path.is_dir():
        raise ImageNotFound(f"there is no image at {image_path}")
    try:
        with (image_path / STATE).open("rb") as file:
            start = file.read(len(MAGIC) + 8)
            if len(start) < len(MAGIC) + 8 or not start.startswith(MAGIC):
                raise ImageCorrupt(f"{image_path / STATE} is no checkpoint of runsc")
            (length,) = struct.unpack(">Q", start[len(MAGIC) :])
            if length > _MAX_HEADER_BYTES:
                raise ImageCorrupt(f"{image_path / STATE} has a header of {length} bytes")
            text = file.read(length)
        document = json.loads(text)
    except FileNotFoundError as error:
        raise ImageCorrupt(f"{image_path} holds no {STATE}") from error
    except (OSError, ValueError) as error:
        raise ImageCorrupt(f"{image_path / STATE} cannot be read ({error})") from error
    if not isinstance(document, dict) or len(text) != length:
        raise ImageCorrupt(f"{image_path / STATE} is cut short")
    found = {str(key): str(value) for key, value in cast("dict[str, Any]", document).items()}
    if found.get("compression", "none") == "none":
        for name in PAGES:
            if not (image_path / name).is_file():
                raise ImageCorrupt(f"{image_path} lacks {name}")
    return found


def record(image_path: Path) -> Record:
    """The engine's record. Raises ImageCorrupt."""
    path = image_path / RECORD
    try:
        document = json.loads(path.read_bytes())
        found = cast("dict[str, Any]", document).get("schema") if isinstance(document, dict) else None
        if found != SCHEMA:
            raise ImageCorrupt(f"{path} has schema {found!r}, this is for {SCHEMA}")
        return msgspec.convert(document, Record, strict=True)
    except FileNotFoundError as error:
        raise ImageCorrupt(
            f"{image_path} has no {RECORD}, so that nobody knows what its processes may do"
        ) from error
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ImageCorrupt(f"{path} cannot be read ({error})") from error
