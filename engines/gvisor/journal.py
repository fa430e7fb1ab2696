"""What a running call has touched, written down before it touches it.

If the call dies, its guardian, or `undo` later, reads here what there is to undo. The file lies in the
container's state directory and is gone when nothing is left to undo. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from engines.guard import lock

SCHEMA = 1
NAME = "gvisor-call.json"
LOCK = "gvisor-undo.lock"
WORK = "work"
MARK = "TORPOR_GVISOR_CALL"
"""Environment variable by which the runtime's processes of a call are known. runsc does not hand it on."""


@dataclass(kw_only=True)
class Journal:
    """One call. Paths are absolute, as text.

    token: the call's own word, by which its guardian and runsc's processes of it are known.
    operation: "checkpoint" or "restore". state: the container's state directory.
    image_made: the image directory did not exist before.
    sandbox, sandbox_start: the sandbox's process and its start time (clock ticks), 0 while there is none.
    sandbox_id: the container whose sandbox it is: the pod's pause container, or the container itself.
    was_paused: by somebody else, before. committed: the source may die, so the image must be kept.
    rootfs: of the container, where runsc leaves a file of its own. bundle: of the container.
    """

    schema: int = SCHEMA
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    operation: str
    container_id: str
    runtime: str
    runtime_args: list[str]
    root: str
    state: str
    search_path: str
    image: str
    image_made: bool = False
    sandbox: int = 0
    sandbox_start: int = 0
    sandbox_id: str = ""
    was_paused: bool = False
    committed: bool = False
    rootfs: str = ""
    bundle: str = ""

    @property
    def path(self) -> Path:
        """Where the journal is written."""
        return Path(self.state, NAME)

    def write(self) -> None:
        """Write, by rename: a reader sees the old or the new one."""
        draft = self.path.with_suffix(".new")
        draft.write_text(json.dumps(asdict(self)))
        draft.rename(self.path)

    def remove(self) -> None:
        """Nothing is left to undo."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def read(state_path: Path) -> Journal | None:
    """The journal of a call that has not ended, None if there is none. Raises ValueError if unreadable."""
    try:
        document = json.loads((state_path / NAME).read_text())
    except FileNotFoundError:
        return None
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{state_path / NAME} has schema {document.get('schema')}, this is for {SCHEMA}")
    known = {entry.name for entry in fields(Journal)}
    return Journal(**{key: value for key, value in document.items() if key in known})


def undoing(state_path: Path) -> contextlib.AbstractContextManager[None]:
    """Hold the right to undo for a container. Raises OSError."""
    return lock(state_path / LOCK)
