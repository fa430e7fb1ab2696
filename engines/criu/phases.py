"""Stops CRIU at chosen points and asks the engine's process how to go on.

CRIU runs an action script at every stage and waits for it. Ours tells the engine the stage through one pipe
and reads the verdict from another; it opens both through /proc of the engine's process, and is itself a
memory file that CRIU executes from there. So there is nothing on disk to clean up, a `noexec` state directory
does no harm, and when the engine dies, the script fails at once and CRIU undoes what it did; where the caller
keeps a verdict, the script obeys that.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import dataclass

from engines.criu.cgroups import Freezer

_MFD_EXEC = 0x10
_ACTIONS = ("pre-dump", "network-lock", "post-dump", "pre-restore", "setup-namespaces", "post-restore")

# A shell, since it must start in less than a millisecond: it runs up to eight times a call. It takes the
# word of a verdict as `Journal.verdict` does.
_SCRIPT = """#!/bin/sh
case "$CRTOOLS_SCRIPT_ACTION" in
{actions}) ;;
*) exit 0 ;;
esac
echo "$CRTOOLS_SCRIPT_ACTION $$ $PPID ${{CRTOOLS_INIT_PID:-0}}" >/proc/{pid}/fd/{ask} || exit 1
go_on() {{
    [ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || {thaw}
    exit 0
}}
if read -r answer </proc/{pid}/fd/{answer}; then
    [ "$answer" != yes ] || go_on
    exit 1
fi
while :; do
    word=
    read -r word <{verdict}
    case "$word" in
    commit) go_on ;;
    "" | abort) exit 1 ;;
    esac
    sleep 0.1
done
"""


@dataclass(frozen=True, slots=True)
class Stage:
    """CRIU waits at a stage. init_pid: of the container on the host, 0 if there is none yet."""

    action: str
    script_pid: int
    criu_pid: int
    init_pid: int


class Script:
    """The action script of one call. A context manager; `path` is what CRIU is told to run.

    verdict_path: see `engines.api.CheckpointRequest`, "" for none. freezer: of a source that the engine keeps
    frozen while a verdict is open; thawed at the last moment at which CRIU lives, since frozen tasks would
    not die.
    """

    def __init__(self, verdict_path: str = "", freezer: Freezer | None = None) -> None:
        self._ask_read, self._ask_write = os.pipe()
        self._answer_read, self._answer_write = os.pipe()
        os.set_blocking(self._ask_read, False)
        text = _SCRIPT.format(
            actions="|".join(_ACTIONS),
            pid=os.getpid(),
            ask=self._ask_write,
            answer=self._answer_read,
            verdict=shlex.quote(verdict_path or os.devnull),
            thaw=f"echo {freezer.thawed} >{shlex.quote(str(freezer.control))}" if freezer else ":",
        )
        # Reopened for reading only: the kernel does not execute what somebody may still write.
        writable = _memory_file()
        try:
            os.write(writable, text.encode())
            self._file = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(writable)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._pending = b""

    def fileno(self) -> int:
        """For poll: readable when CRIU waits at a stage."""
        return self._ask_read

    def stages(self) -> list[Stage]:
        """The stages at which CRIU waits now (one, or none)."""
        with contextlib.suppress(BlockingIOError):
            self._pending += os.read(self._ask_read, 4096)
        *lines, self._pending = self._pending.split(b"\n")
        found: list[Stage] = []
        for line in lines:
            action, *pids = line.decode().split()
            found.append(Stage(action, *map(int, pids)))
        return found

    def answer(self, *, go_on: bool) -> None:
        """Let CRIU go on, or make it undo what it did."""
        os.write(self._answer_write, b"yes\n" if go_on else b"no\n")

    def close(self) -> None:
        """A script that still waits fails now."""
        for descriptor in (
            self._ask_read,
            self._ask_write,
            self._answer_read,
            self._answer_write,
            self._file,
        ):
            os.close(descriptor)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _memory_file() -> int:
    try:
        return os.memfd_create("torpor-action", os.MFD_CLOEXEC | _MFD_EXEC)
    except OSError:
        # Kernels before 6.3 do not know the flag; there memory files are executable anyway.
        return os.memfd_create("torpor-action", os.MFD_CLOEXEC)
