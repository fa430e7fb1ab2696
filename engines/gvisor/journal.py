"""The journal of a call to runsc. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from engines import guard

WORK = "work"
MARK = "TORPOR_GVISOR_CALL"
"""Environment variable by which the runtime's processes of a call are known. runsc does not hand it on."""


@dataclass(kw_only=True)
class Journal(guard.Journal):
    """One call.

    operation: "checkpoint" or "restore". token: runsc's processes of the call are known by it, too.
    image_made: the image directory did not exist before.
    sandbox, sandbox_start: the sandbox's process and its start time (clock ticks), 0 while there is none.
    sandbox_id: the container whose sandbox it is: the pod's pause container, or the container itself.
    was_paused: by somebody else, before. committed: the source may die, so the image must be kept.
    rootfs: of the container, where runsc leaves a file of its own. bundle: of the container.
    """

    FILE = "gvisor-call.json"
    LOCK = "gvisor-undo.lock"

    operation: str
    container_id: str
    runtime: str
    runtime_args: list[str]
    root: str
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
