"""Runs the real runtime for one call: watched by a guardian, within a deadline, stage by stage."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.api import DumpFailed, EngineError, RestoreFailed, printable
from engines.criu import guardian
from engines.criu.journal import Journal
from engines.criu.phases import Script, Stage
from engines.criu.undo import Outcome, has_criu, undo_own
from engines.guard import Guardian

_GUARDIAN_GRACE_S = 5.0
_ORPHAN_S = 0.5  # for the runtime to notice that CRIU died
_VETO_S = 5.0  # for CRIU to undo a dump itself, before it is killed

OnStage = Callable[[Stage], None]


class Guarded:
    """The frame of one call: what is undone if its body fails, or if this very process dies.

    Entering writes the journal and starts the guardian, both before anything is touched. Leaving by an
    exception undoes the call, unless `undo` has been called, and the exception says what could not be undone.
    Leaving always settles it.
    """

    def __init__(self, journal: Journal, timeout_s: float) -> None:
        self.journal = journal
        self.deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._guardian: Guardian | None = None
        self._outcome: Outcome | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def undo(self) -> Outcome:
        """Undo the call; the same outcome if asked again."""
        if self._outcome is None:
            self._outcome = undo_own(self.journal)
            if self.process and not self._outcome.held:
                self.process.wait()
        return self._outcome

    def __enter__(self) -> Guarded:
        self.journal.write()
        self._guardian = Guardian(
            *(guardian.__file__, self.journal.state, str(self._timeout_s + _GUARDIAN_GRACE_S)),
            self.journal.token,
            env={"PATH": self.journal.search_path},
        )
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        outcome = self.undo() if error is not None else None
        if self._outcome is None or not self._outcome.held:
            self.journal.settle()
        if self._guardian:
            self._guardian.dismiss()
        if outcome is None or not outcome.problems:
            return
        message = f"{error}; could not undo: {'; '.join(outcome.problems)}; remove it by hand"
        if isinstance(error, EngineError):
            error.args, error.undone = (message,), False
        elif isinstance(error, Exception):
            failed = RestoreFailed if self.journal.operation == "restore" else DumpFailed
            raise failed(message, after=outcome.state, undone=False) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the runtime ended. refused: what a stage's callback raised; held: it waits for the verdict."""

    returncode: int
    timed_out: bool = False
    refused: BaseException | None = None
    held: bool = False


def run(
    argv: Sequence[str],
    guarded: Guarded,
    script: Script,
    on_stage: OnStage,
    *,
    on_criu_end: Callable[[], bool],
    inherit: bool,
) -> Ended:
    """Run the runtime until it ends, its deadline passes, or a stage is refused.

    on_stage: called while CRIU waits; raising makes CRIU undo. on_criu_end: called the moment CRIU is gone,
    however it went; tells whether it went well. inherit: the runtime gets this process's standard streams and
    inheritable descriptors (a restore hands them to the container); else it gets none.

    When this returns with the runtime alive, `Guarded.undo` ends it.
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
    guarded.process = process
    watch = _Watch(process.pid, script, journal)
    refused: BaseException | None = None
    deadline = guarded.deadline
    try:
        while process.poll() is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                late = guarded.remaining_s() <= 0 and refused is None
                return Ended(returncode=-1, timed_out=late, refused=refused)
            if watch.wait(left_s) and not on_criu_end():
                # runc waits for ever if a half-restored task still holds its connection to CRIU.
                deadline = min(deadline, time.monotonic() + _ORPHAN_S)
            for stage in script.stages():
                watch.criu(stage.criu_pid)
                try:
                    on_stage(stage)
                    go_on = guarded.remaining_s() > 0 and refused is None
                except BaseException as error:
                    refused, go_on = refused or error, False
                    deadline = time.monotonic() + _VETO_S
                verdict = journal.verdict()
                if verdict == "hold" and not go_on:
                    return Ended(returncode=-1, refused=refused, held=True)
                script.answer(go_on=go_on or verdict == "commit")
        return Ended(returncode=process.returncode, refused=refused)
    finally:
        watch.close()


class _Watch:
    """Waits for the runtime's end, CRIU's end, or a stage."""

    def __init__(self, pid: int, script: Script, journal: Journal) -> None:
        self._journal = journal
        self._log_path = journal.work_path / ("restore.log" if journal.operation == "restore" else "dump.log")
        self._runtime = os.pidfd_open(pid)
        self._criu: int | None = None
        self._criu_pid = 0
        self._told = False
        self._idle = 0
        self._poll = select.poll()
        self._poll.register(self._runtime, select.POLLIN)
        self._poll.register(script, select.POLLIN)

    def criu(self, pid: int) -> None:
        """Learn who CRIU is, to notice its end at once."""
        if self._criu_pid:
            return
        self._criu_pid = pid
        try:
            self._criu = os.pidfd_open(pid)
            self._poll.register(self._criu, select.POLLIN)
        except ProcessLookupError:
            self._idle = 2  # it is gone already

    def wait(self, timeout_s: float) -> bool:
        """Wait for something, but not longer than a second; whether CRIU has ended (told once)."""
        ready = [number for number, _ in self._poll.poll(min(timeout_s, 1.0) * 1000 + 1)]
        if self._criu is not None and self._criu in ready:
            self._poll.unregister(self._criu)
            os.close(self._criu)
            self._criu = None
            self._told = True
            return True
        # CRIU may die before its first stage; but a runtime may take its time until it starts it.
        if self._criu_pid == 0 and self._log_path.exists():
            self._idle = 0 if ready or has_criu(self._journal) else self._idle + 1
        if self._idle > 1 and not self._told:
            self._told = True
            return True
        return False

    def close(self) -> None:
        os.close(self._runtime)
        if self._criu is not None:
            os.close(self._criu)


# --- what went wrong -----------------------------------------------------------------------------------

_NOISE = re.compile(
    r"RLIMIT_NOFILE|Dumping FAILED|Restoring FAILED|Could not process rule: File exists|cgroupd: recv req"
    r"|Pre-dumping FAILED|killed by signal 9: Killed|Failed to wait inprogress|cr-restore.*failed"
)
# What CRIU meets when it gives up, after or even before it names the cause.
_GIVES_UP = re.compile(r"Unable to detach")
_CAUSE = re.compile(r"Unseizable non-zombie")
_ADVICE = (
    (r"io_uring", "start the container with its io_uring calls answered by ENOSYS, then try again"),
    (r"No space left", "free space, or give the image another place"),
    (r"[Ii]n-?flight|skip-in-flight", "try again once the connection is accepted"),
    (r"netlink: The socket has data", "try again once the program has read its netlink socket"),
    (r"File name too long", "let the program leave, or shorten, a path that is longer than CRIU can read"),
    (r"can't get /proc/self/cgroup fd", "a process may not read /proc/self/cgroup: look for a sandbox that it"
     " has put itself into (Landlock), which no restore could bring back"),
    (r"Address already in use", "end what has that address or name, or give the container another network"
     " namespace"),
    (r"Can't set lease", "end what has the file of the lease open"),
    (r"Can't open file .*Operation not permitted", "look whether the file is immutable (lsattr)"),
    (r"Can't (fork|clone)\b.*Resource temporarily unavailable", "raise the container's limit of processes"),
    (r"unixpacket .*EOF|type RESTORE errno 0", "look whether the container's memory limit is too tight for"
     " the image"),
    (r"Can't set 1:25 .*No such device", "give the container the network interface that its socket is bound"
     " to"),
    (r'failed to write "|hugetlb limit|unified on cgroup|wrong rlimit', "correct this limit in the new"
     " specification"),
    (r"Can't bind inet socket|Can't connect inet socket", "give the container its old address, or close its"
     " connections at restore"),
    (r"execvp\(|not found in \$?PATH", "install the named program where the runtime finds it"),
    (r"has bad (size|mode|build-ID)", "restore over the files the container had at the dump"),
    (r"mapping for|mountpoint", "give the new container the mounts of the old one, at the same places"),
    (r"ptrace|attach|[Ss]eiz", "look for a debugger, or for a process that does not stop, in the container"),
)  # fmt: skip


def criu_error(log_path: Path) -> str:
    """What CRIU's log says went wrong, without place and time; empty if it says nothing.

    It names files of the container: what cannot be printed is escaped. The first error is the cause, unless a
    later one names it better; the last is what it led to.
    """
    found: list[str] = []
    with contextlib.suppress(OSError), log_path.open(errors="replace") as log:
        for line in log:
            at = line.find("Error (")
            if at >= 0 and not _NOISE.search(line):
                found.append(line[at:].partition("): ")[2].strip() or line[at:].strip())
    found = [line for line in found if not _GIVES_UP.search(line)] or found
    if not found:
        return ""
    first = next((line for line in found if _CAUSE.search(line)), found[0])
    return printable(first if found[-1] == first else f"{first} (then: {found[-1]})")


def went_well(log_path: Path) -> bool:
    """Whether CRIU's log ends with success."""
    try:
        with log_path.open("rb") as log:
            log.seek(max(0, log_path.stat().st_size - 4096))
            return b"finished successfully" in log.read()
    except OSError:
        return False


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
