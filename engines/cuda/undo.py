"""Undoes a call of the CRIU+CUDA engine that died, and watches over one that is under way.

CRIU's part is undone first, by CRIU's own undo, then the GPU's: every process of the container gets its GPU
memory back and runs on. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from engines.api import EngineError
from engines.criu import cgroups
from engines.criu import undo as criu
from engines.cuda import guardian, records, stage
from engines.cuda.records import Call
from engines.guard import Guardian, lock, remove_partial
from engines.processes import alive

LOCK = "cuda-undo.lock"
_FREEZE_S = 5.0
_GONE_S = 10.0
_TOOL_S = 10.0


def undo_pending(state_path: Path) -> list[str]:
    """Undo the call whose journals stand in a state directory; what went wrong, in words."""
    if not state_path.is_dir():
        return []
    outcome = criu.undo_pending(state_path)
    problems = list(outcome.problems) if outcome else []
    with lock(state_path / LOCK):
        call = records.read_call(state_path)
        if call is None:
            return problems
        problems += _undo(state_path, call)
        records.remove(state_path / records.CALL)
    return problems


def _undo(state_path: Path, call: Call) -> list[str]:
    freezer = cgroups.freezer(call.groups)
    if call.operation in ("restore", "end"):
        records.remove(state_path / records.HELD)
        return _end(call)
    if freezer and freezer.is_frozen():
        freezer.thaw()  # the driver's part in a process must run
    if call.operation == "resume":
        problems = stage.put_away(call.driver, call.processes)
    else:
        problems = stage.give_back(call.driver, call.processes, call.pairs)
    if call.operation == "release":
        records.remove(state_path / records.HELD)
        return _end(call) if problems else []
    if freezer and call.was_frozen:
        freezer.freeze(timeout_s=_FREEZE_S)
    if call.image and any(alive(*process) for process in call.processes):
        # The source was to run on, and whoever wanted the image does not know that it is complete.
        remove_partial(Path(call.image), made=call.image_made)
    if call.operation in ("checkpoint", "suspend") and not problems:
        records.remove(Path(call.suspended))
    return problems


def _end(call: Call) -> list[str]:
    """Kill the container; `restore`: remove it too, since its caller has not heard of it."""
    own = cgroups.strictly_own(call.groups)
    freezer = cgroups.freezer(own)
    until = time.monotonic() + _GONE_S
    while pids := cgroups.tasks(own):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if freezer:
            freezer.thaw()
        if time.monotonic() > until:
            return ["tasks of the container do not die"]
        time.sleep(0.005)
    if call.operation != "restore":
        return []
    try:
        done = subprocess.run(
            [*call.runtime, "delete", "--force", call.container_id],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TOOL_S,
            check=False,
            env={**os.environ, "PATH": call.search_path},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [str(error)]
    return [done.stderr.strip()] if done.returncode else []


class Guarded:
    """The frame of a call that touches GPUs: it is undone if its body fails, or if this very process dies."""

    def __init__(self, state_path: Path, call: Call) -> None:
        self.state_path = state_path
        self.call = call
        self.problems: list[str] = []
        self._guardian: Guardian | None = None

    def __enter__(self) -> Guarded:
        records.write_call(self.state_path, self.call)
        self._guardian = Guardian(guardian.__file__, str(self.state_path), env=os.environ)
        return self

    def become(self, operation: str) -> None:
        """From now on the call is undone in another way."""
        self.call.operation = operation
        records.write_call(self.state_path, self.call)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.problems = undo_pending(self.state_path)
        if self.problems and isinstance(error, EngineError):
            error.undone = False  # for those errors that nobody words anew
        records.remove(self.state_path / records.CALL)
        if self._guardian:
            self._guardian.dismiss()
