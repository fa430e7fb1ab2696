"""Undoes a checkpoint or a restore that died half-way, from its journal.

Three callers: the engine after a failure or a deadline, the guardian after the engine's own death, and
`GvisorEngine.undo` when both are gone. Every step is safe to repeat. Standard library only.

A save goes on inside the sandbox when runsc's command is killed, and cannot be called off: the undo waits for
its end. A paused container whose sandbox is dead counts as paused for ever, so it is deleted with force.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engines.guard import remove_partial
from engines.gvisor.journal import MARK, Journal
from engines.processes import alive, start_time

_GONE_S = 10.0
_SAVE_S = 600.0  # a save that takes longer than this is stuck
_TOOL_S = 10.0

State = Literal["running", "paused", "stopped"]


@dataclass(kw_only=True)
class Outcome:
    """What an undo came to. problems: what could not be undone, in words.

    completed: a checkpoint whose source was allowed to die was carried through.
    """

    state: State
    completed: bool = False
    problems: list[str] = field(default_factory=list[str])


def undo_pending(state_path: Path, token: str | None = None) -> Outcome | None:
    """Undo the call whose journal stands in a state directory; None if there is none.

    token: undo only the call that has it, None for any.
    """
    if not state_path.is_dir():
        return None
    with Journal.undoing(state_path):
        journal = Journal.read(state_path)
        if journal is None or token not in {None, journal.token}:
            return None
        outcome = undo(journal)
        journal.remove()
        return outcome


def undo_own(journal: Journal) -> Outcome:
    """Undo a call of this process. If its guardian or a later call has done so, only say what came of it."""
    with Journal.undoing(Path(journal.state)):
        if journal.stands():
            outcome = undo(journal)
            journal.remove()
            return outcome
    lives = alive(journal.sandbox, journal.sandbox_start)
    state: State = "stopped" if not lives else "paused" if journal.was_paused else "running"
    return Outcome(state=state, completed=journal.committed and not lives)


def undo(journal: Journal) -> Outcome:
    """Undo one call, whose processes may still live. The caller holds `Journal.undoing`."""
    outcome = Outcome(state="stopped")
    if not end_call(journal):
        outcome.problems.append("runsc's processes of the call do not die")
    if journal.operation == "restore":
        remove_container(journal, outcome)
        return outcome
    return _undo_dump(journal, outcome)


def _undo_dump(journal: Journal, outcome: Outcome) -> Outcome:
    image = Path(journal.image)
    if not _await_save(journal, image):
        outcome.problems.append("the save does not end")
    if journal.committed:
        remove_container(journal, outcome)
        outcome.completed = True
        return outcome
    remove_partial(image, made=journal.image_made)
    if not alive(journal.sandbox, journal.sandbox_start):
        remove_container(journal, outcome)
        return outcome
    if journal.was_paused:
        outcome.state = "paused"
        return outcome
    complaint = runsc(journal, "resume", journal.container_id)
    if complaint and "state running" not in complaint:
        outcome.problems.append(complaint)
        outcome.state = "paused"
    else:
        outcome.state = "running"
    return outcome


# --- processes -----------------------------------------------------------------------------------------


def call_processes(journal: Journal) -> list[int]:
    """The processes of runsc's command line that a call started. Sandboxes do not inherit the mark."""
    mark = f"{MARK}={journal.token}".encode()
    found: list[int] = []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def end_call(journal: Journal) -> bool:
    """Kill all processes of a call and wait until they are gone; False if one would not go."""
    deadline = time.monotonic() + _GONE_S
    while pids := call_processes(journal):
        for pid in pids:
            _kill(pid)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _await_save(journal: Journal, image: Path) -> bool:
    """Wait until the sandbox has no file of the image open; False if it goes on for ever."""
    deadline = time.monotonic() + _SAVE_S
    while alive(journal.sandbox, journal.sandbox_start) and _holds_image(journal.sandbox, image):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _holds_image(pid: int, image: Path) -> bool:
    try:
        files = {(entry.stat().st_dev, entry.stat().st_ino) for entry in os.scandir(image)}
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found = Path(descriptor.path).stat()
                if (found.st_dev, found.st_ino) in files:
                    return True
    except OSError:
        return False
    return False


def end_sandbox(journal: Journal) -> bool:
    """Kill a sandbox and what runsc started for it, and wait until they are gone or zombies."""
    deadline = time.monotonic() + _GONE_S
    if alive(journal.sandbox, journal.sandbox_start):
        _kill(journal.sandbox)
    while pids := _sandbox_processes(journal):
        for pid in pids:
            _kill(pid)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _sandbox_processes(journal: Journal) -> list[int]:
    """A container's sandbox and gofer, by their command lines. Others' gofers end with their sandbox."""
    root = os.path.realpath(journal.root)
    found: list[int] = []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = Path("/proc", name, "cmdline").read_bytes().decode(errors="replace").split("\0")
            # A sandbox has the id as its last word, a gofer has only the bundle.
            sandbox_id = journal.sandbox_id or journal.container_id
            mark = {"runsc-sandbox": sandbox_id, "runsc-gofer": f"--bundle={journal.bundle}"}
            roots = {os.path.realpath(word[7:]) for word in words if word.startswith("--root=")}
            if mark.get(words[0]) in words and root in roots and start_time(int(name)):
                found.append(int(name))
    return found


# --- what is left ---------------------------------------------------------------------------------------


def remove_container(journal: Journal, outcome: Outcome) -> None:
    """End a container's sandbox and remove everything that runsc keeps of it.

    The other containers of a pod die with it; their files are left to whoever deletes them.

    runsc's own `delete --force` waits for ever for a sandbox that nobody reaps; then its files are removed.
    """
    if not end_sandbox(journal):
        outcome.problems.append("the sandbox does not die")
    if not _state_files(journal):
        _remove_filestore(journal)
        return
    complaint = runsc(journal, "delete", "--force", journal.container_id)
    if complaint and "does not exist" not in complaint and not complaint.startswith(_SLOW):
        outcome.problems.append(complaint)
    for path in _state_files(journal):
        path.unlink(missing_ok=True)
    _remove_filestore(journal)


def _state_files(journal: Journal) -> list[Path]:
    root, name = Path(journal.root), journal.container_id
    stem = f"{name}_sandbox:{journal.sandbox_id or name}"
    names = (f"{stem}.state", f"{stem}.lock", f"runsc-{name}.sock")
    return [path for path in (root / name for name in names) if os.path.lexists(path)]


def _remove_filestore(journal: Journal) -> None:
    if journal.rootfs:
        # Whoever has a file there, it bears the sandbox's name.
        sandbox_id = journal.sandbox_id or journal.container_id
        Path(journal.rootfs, f".gvisor.filestore.{sandbox_id}").unlink(missing_ok=True)


_SLOW = "runsc does not end"


def runsc(journal: Journal, *args: str) -> str:
    """Run a verb of runsc; the first line of its complaint, empty if it succeeded."""
    argv = [journal.runtime, *journal.runtime_args, "--root", journal.root, *args]
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={"PATH": journal.search_path},
        start_new_session=True,
    )
    try:
        _, complaint = process.communicate(timeout=_TOOL_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"{_SLOW}: {' '.join(args)}"
    if process.returncode == 0:
        return ""
    return complaint.strip().partition("\n")[0] or f"runsc {args[0]} exits {process.returncode}"
