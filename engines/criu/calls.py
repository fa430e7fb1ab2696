"""Runs the real runtime for one call: watched by a guardian, within a deadline, stage by stage."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.criu import guardian
from engines.criu.journal import Journal, read
from engines.criu.phases import Script, Stage
from engines.criu.undo import Outcome, lock, undo

_GUARDIAN_GRACE_S = 5.0
_VETO_S = 5.0  # for CRIU to undo a dump itself, before it is killed

OnStage = Callable[[Stage], None]


class Guarded:
    """The frame of one call: what is undone if its body fails, or if this very process dies.

    Entering writes the journal and starts the guardian, both before anything is touched. Leaving by an
    exception undoes the call, unless `undo` has been called; leaving always settles it.
    """

    def __init__(self, journal: Journal, timeout_s: float) -> None:
        self.journal = journal
        self.deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._guardian: subprocess.Popen[bytes] | None = None
        self._outcome: Outcome | None = None

    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def undo(self) -> Outcome:
        """Undo the call; the same outcome if asked again."""
        if self._outcome is None:
            with lock(Path(self.journal.state)):
                # The guardian undoes a call that is stuck past its deadline; then there is nothing left here.
                self._outcome = undo(read(Path(self.journal.state)) or self.journal)
                self.journal.remove()
        return self._outcome

    def __enter__(self) -> Guarded:
        self.journal.write()
        # The same interpreter with the same isolation as the launcher's: it starts in 8 ms, beside our work.
        self._guardian = subprocess.Popen(
            [
                *(sys.executable, "-IS", guardian.__file__, self.journal.state),
                str(self._timeout_s + _GUARDIAN_GRACE_S),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            env={"PATH": self.journal.search_path},
        )
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.undo()
        self.journal.remove()
        if self._guardian and self._guardian.stdin:
            with contextlib.suppress(OSError):
                self._guardian.stdin.write(b"done")
            with contextlib.suppress(OSError):
                self._guardian.stdin.close()
            self._guardian.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the runtime ended. refused: what a stage's callback raised."""

    returncode: int
    timed_out: bool = False
    refused: BaseException | None = None


def run(argv: Sequence[str], guarded: Guarded, script: Script, on_stage: OnStage, *, inherit: bool) -> Ended:
    """Run the runtime until it ends, its deadline passes, or a stage is refused.

    on_stage: called while CRIU waits; raising makes CRIU undo. inherit: the runtime gets this process's
    standard streams and inheritable descriptors (a restore hands them to the container); else it gets none.
    """
    stream = None if inherit else subprocess.DEVNULL
    journal = guarded.journal
    process = subprocess.Popen(
        argv,
        stdin=stream,
        stdout=stream,
        stderr=stream,
        close_fds=not inherit,
        start_new_session=True,
        umask=-1 if inherit else 0o077,
        env={**os.environ, "PATH": journal.search_path, "CRIU_CONFIG_FILE": journal.config_path},
    )
    refused: BaseException | None = None
    ended = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(script, select.POLLIN)
        deadline = guarded.deadline
        while process.poll() is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return Ended(returncode=-1, timed_out=refused is None, refused=refused)
            poll.poll(left_s * 1000 + 1)
            for stage in script.stages():
                try:
                    on_stage(stage)
                    go_on = guarded.remaining_s() > 0
                except BaseException as error:
                    refused, go_on = error, False
                    deadline = time.monotonic() + _VETO_S
                script.answer(go_on=go_on)
        return Ended(returncode=process.returncode, refused=refused)
    finally:
        os.close(ended)
        if process.poll() is None:
            # The group first, without which the wait below would not end; `undo` looks for the rest.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


# --- what went wrong -----------------------------------------------------------------------------------

_NOISE = re.compile(
    r"RLIMIT_NOFILE|Dumping FAILED|Restoring FAILED|Could not process rule: File exists|cgroupd: recv req"
    r"|Pre-dumping FAILED|killed by signal 9: Killed|Failed to wait inprogress|cr-restore.*failed"
)
_ADVICE = (
    (r"io_uring", "start the container with its io_uring calls answered by ENOSYS, then try again"),
    (r"No space left", "free space, or give the image another place"),
    (r"[Ii]n-?flight|skip-in-flight", "try again once the connection is accepted"),
    (r"Can't bind inet socket|Can't connect inet socket", "give the container its old address, or close its"
     " connections at restore"),
    (r"execvp\(|not found in \$?PATH", "install the named program where the runtime finds it"),
    (r"has bad (size|mode|build-ID)", "restore over the files the container had at the dump"),
    (r"mapping for|mountpoint", "give the new container the mounts of the old one, at the same places"),
    (r"ptrace|attach|seize", "look for a debugger, or for a process that does not stop, in the container"),
)  # fmt: skip


def last_error(log_path: Path) -> str:
    """CRIU's last error in a log that says something, without place and time; empty if there is none."""
    found = ""
    with contextlib.suppress(OSError), log_path.open(errors="replace") as log:
        for line in log:
            at = line.find("Error (")
            if at >= 0 and not _NOISE.search(line):
                found = line[at:].partition("): ")[2].strip() or line[at:].strip()
    return found


def runtime_error(log_path: Path) -> str:
    """The runtime's last error message in its JSON log, empty if there is none."""
    import json

    found = ""
    with contextlib.suppress(OSError):
        for line in log_path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if record.get("level") in ("error", "fatal"):
                    found = str(record.get("msg", ""))
    return found


def advice(cause: str) -> str:
    """What to do about a cause."""
    for pattern, words in _ADVICE:
        if re.search(pattern, cause):
            return words
    return "see the log"


def cap(path: Path, *, limit_bytes: int) -> None:
    """Cut a log to its first tenth and its last part, if it is longer than limit_bytes."""
    with contextlib.suppress(OSError):
        size = path.stat().st_size
        if size <= limit_bytes:
            return
        head = limit_bytes // 10
        with path.open("rb") as file:
            first = file.read(head)
            file.seek(size - (limit_bytes - head))
            rest = file.read()
        path.write_bytes(first + b"\n[... cut ...]\n" + rest)
