"""Runs runsc for one call: watched by a guardian, within a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.guard import Guardian
from engines.gvisor import guardian
from engines.gvisor.journal import MARK, WORK, Journal
from engines.gvisor.undo import Outcome, undo_own

_GUARDIAN_GRACE_S = 5.0
_CAUSE_CHARS = 500

_ADVICE = (
    (r"no space left", "free space, or give the image another place"),
    (r"using hostinet", "start the container without --network=host"),
    (r"cannot be saved in connected state", "close the connection, then try again"),
    (
        r"deleted and invalidated dentries",
        "let the program close the file that it deleted, then try again",
    ),
    (r"does not support save/restore", "close the named device before the checkpoint, then try again"),
    (
        r"no host FD available",
        "the image was taken while an exec session lived: checkpoint again",
    ),
    (r"no server FD available", "give the new container the mounts of the old one, at the same places"),
    (r"inconsistent private memory files|CtxMemoryFileMap", "restore with the --overlay2 of the dump"),
    (r"incompatible FeatureSet", "restore on a node whose processor has what the old one had"),
    (r"different fields|version does not match", "restore with the runsc that made the image"),
    (r"cannot run with network enabled in root", "use --network=none, or a newer runsc"),
    (r"already has a filestore file", "remove the named file if no container uses it"),
    (r"no such file or directory", "restore over the files that the container had open at the dump"),
    (r"EOF", "look whether the sandbox was killed, for example for its memory limit"),
)


# What runsc says before the cause, and causes that only its developers understand.
_PLAIN = (
    (r'^checkpoint failed: checkpointing container "[^"]*": (encoding error: )?', ""),
    (
        r'^gofer\.dentry\("(.*)"\)\.beforeSave: deleted and invalidated dentries.*',
        r"it has the deleted file '\1' of a mount open, which gVisor cannot save",
    ),
)

_NATURE = re.compile(
    r"using hostinet|cannot be saved in connected state|deleted and invalidated dentries"
    r"|does not support save/restore"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command of runsc ended. cause: its complaint in one line, empty if it had none."""

    returncode: int
    cause: str = ""
    timed_out: bool = False

    @property
    def failed(self) -> bool:
        """Whether it did not do its work."""
        return self.timed_out or self.returncode != 0

    @property
    def by_nature(self) -> bool:
        """Whether gVisor said that it cannot save something the container has, whenever it is asked."""
        return not self.timed_out and _NATURE.search(self.cause) is not None


class Guarded:
    """The frame of one call: what is undone if its body fails, or if this very process dies.

    Entering writes the journal and starts the guardian, both before anything is touched. Leaving by an
    exception undoes the call, unless `undo` has been called; leaving always settles it.
    """

    def __init__(self, journal: Journal, timeout_s: float) -> None:
        self.journal = journal
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._guardian: Guardian | None = None
        self._outcome: Outcome | None = None

    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def undo(self) -> Outcome:
        """Undo the call; the same outcome if asked again."""
        if self._outcome is None:
            self._outcome = undo_own(self.journal)
        return self._outcome

    def note(self) -> bool:
        """Write down what was learnt; False if the deadline has passed, or the call is undone."""
        return self.remaining_s() > 0 and self.journal.update()

    def run(self, *argv: str, inherit: bool = False) -> Ended:
        """Run runsc with these words after its global options, until it ends or the deadline passes.

        inherit: it gets this process's standard streams and inheritable descriptors, which a container then
        has; else it gets none.
        """
        journal = self.journal
        log_path = Path(journal.state, WORK, f"{argv[0]}.log")
        words: Sequence[str] = [
            *(journal.runtime, *journal.runtime_args, "--root", journal.root),
            *("--log", str(log_path), "--log-format", "json", *argv),
        ]
        stream = None if inherit else subprocess.DEVNULL
        process = subprocess.Popen(
            words,
            stdin=stream,
            stdout=stream,
            stderr=stream,
            close_fds=not inherit,
            start_new_session=True,
            umask=-1 if inherit else 0o077,
            env={**os.environ, "PATH": journal.search_path, MARK: journal.token},
        )
        try:
            process.wait(self.remaining_s())
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return Ended(returncode=-1, cause=_complaint(log_path), timed_out=True)
            raise
        cause = _complaint(log_path) if process.returncode else ""
        return Ended(returncode=process.returncode, cause=cause)

    def __enter__(self) -> Guarded:
        self.journal.write()
        self._guardian = Guardian(
            *(guardian.__file__, self.journal.state, self.journal.token),
            str(self._timeout_s + _GUARDIAN_GRACE_S),
            env={"PATH": self.journal.search_path},
        )
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.undo()
        self.journal.settle()
        if self._guardian:
            self._guardian.dismiss()


def _complaint(log_path: Path) -> str:
    """The last error in runsc's log, its first line: the rest is Go's stack."""
    found = ""
    try:
        text = log_path.read_text(errors="replace")
    except OSError:
        return ""
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:  # runsc puts no line ends between its records
        try:
            record, end = decoder.raw_decode(text, at)
        except ValueError:
            break
        if record.get("level") in ("error", "fatal"):
            found = str(record.get("msg", ""))
        at = text.find("{", end)
    return found.strip().partition("\n")[0].rstrip(":. ")[:_CAUSE_CHARS]


def explain(words: str, ended: Ended, outcome: Outcome, log_path: Path) -> str:
    """The message of a failed call: what was tried, why it failed, what to do."""
    cause = ended.cause or f"runsc ended with status {ended.returncode}"
    todo = next((advice for pattern, advice in _ADVICE if re.search(pattern, cause)), "see the log")
    for pattern, words_instead in _PLAIN:
        cause = re.sub(pattern, words_instead, cause)
    if ended.timed_out:
        cause = "the deadline passed" + (f" (last: {ended.cause})" if ended.cause else "")
        todo = "give it more time"
    if outcome.problems:
        cause += f"; could not undo: {'; '.join(outcome.problems)}"
    where = f" (log: {log_path})" if log_path.exists() and not ended.by_nature else ""
    return f"{words}: {cause}{where}; {todo}"
