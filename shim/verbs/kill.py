"""kill of a gVisor container, with runsc's answers in runc's words, by which callers know what is over.

A container that was not started, or whose pod is not complete, runsc does not kill at all: then that process
is killed which stands for it, its attendant or its sandbox.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from shim import bundle, log, state
from shim.errors import NoContainer, ShimError, UsageError
from shim.verbs.context import Context

# What runsc says of a container whose sandbox is gone, or that has ended.
_OVER = ("sandbox is not running", "connecting to control server", "in state stopped", "no such process")
_NOT_RUNNING = "container not running"


def serve(context: Context) -> int | None:
    """Send the signal; the exit status. Raises ShimError where only the real runtime can know."""
    if (context.directory / state.HELD).exists():
        return _kill_held(context)
    sandbox_id = _half_a_pod(context)
    if sandbox_id and _asked(context):
        return _kill(context, _pid(context, sandbox_id), signal.SIGKILL)
    runtime = context.config.runtime_path
    answer = bundle.ask_runtime(runtime, (), *context.handed_over)
    if answer.returncode == 0:
        return 0
    if _end_forgotten(context):
        return 0
    cause = answer.stderr.strip().partition("\n")[0]
    if any(words in cause for words in _OVER) or _is_dead(context):
        cause = _NOT_RUNNING
    elif "file does not exist" in cause:
        cause = "container does not exist"
    return _refuse(context, cause)


def _refuse(context: Context, cause: str) -> int:
    """Tell it here: an error that is raised hands the call over, and runsc has other words."""
    message = f"could not kill container '{context.container_id}': {cause}"
    log.runtime_error(message, log_path=context.call.log, log_format=context.call.log_format)
    return 1


def _half_a_pod(context: Context) -> str:
    """The sandbox of a container that was restored in a pod which still waits for others, else "".

    Nothing runs in it that could get a signal, and the sandbox keeps the streams of the container. Without it
    the pod can never be complete, so all of it ends.
    """
    found = state.load(context.directory)
    if found is None or not found.sandbox_id:
        return ""
    sandbox = state.load(context.directory.parent / found.sandbox_id)
    return found.sandbox_id if sandbox is not None and sandbox.awaited else ""


def _end_forgotten(context: Context) -> bool:
    """End the attendant of a container that runsc keeps no state of, as after a restore that was killed."""
    if not (context.directory / state.ATTENDANT).exists():
        return False
    from shim import attendant

    pid = attendant.find(context.directory)
    if pid is None:
        return False
    try:
        bundle.runtime_state(context.config.runtime_path, context.call.root, context.container_id)
    except NoContainer:
        attendant.end(context.directory)
        return True
    return False


def _is_dead(context: Context) -> bool:
    """Whether its sandbox is gone: runsc takes a paused container for paused for ever."""
    try:
        found = bundle.runtime_state(context.config.runtime_path, context.call.root, context.container_id)
    except ShimError:
        return False
    try:
        row = Path(f"/proc/{found.pid}/stat").read_text(errors="replace")
    except OSError:
        return True
    return row.rpartition(")")[2].split()[0] in {"Z", "X"}


def _kill_held(context: Context) -> int:
    number = _asked(context)
    if (context.directory / state.ATTENDANT).exists():
        from shim import attendant

        return _kill(context, attendant.find(context.directory), number)
    return _kill(context, _pid(context, context.container_id), number)


def _pid(context: Context, sandbox_id: str) -> int | None:
    found = bundle.runtime_state(context.config.runtime_path, context.call.root, sandbox_id)
    return found.pid if found.pid > 0 else None


def _kill(context: Context, pid: int | None, number: int) -> int:
    try:
        if pid is None:
            raise ProcessLookupError
        os.kill(pid, number)
    except ProcessLookupError:
        return _refuse(context, _NOT_RUNNING)
    return 0


def _asked(context: Context) -> int:
    """The signal that the call names. Raises UsageError."""
    words = context.call.args[1:]
    return _number(words[0] if words else "TERM")


def _number(word: str) -> int:
    try:
        if word.isdigit():
            return int(word) and signal.Signals(int(word))  # 0 only asks whether there is a process
        return signal.Signals[word if word.startswith("SIG") else f"SIG{word}"]
    except (ValueError, KeyError):
        raise UsageError(
            f"could not kill a container: there is no signal '{word}'; give its number"
        ) from None
