"""kill of a gVisor container, with runsc's answers in runc's words, by which callers know what is over.

A container that was created and not started runsc does not kill at all: then that process is killed which
stands for it, its attendant or its sandbox.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from shim import bundle, state
from shim.errors import ShimError, UsageError
from shim.verbs.context import Context

# What runsc says of a container whose sandbox is gone, or that has ended.
_OVER = ("sandbox is not running", "connecting to control server", "in state stopped", "no such process")


def serve(context: Context) -> int | None:
    """Send the signal. Raises ShimError."""
    if (context.directory / state.HELD).exists():
        return _kill_held(context)
    runtime = context.config.runtime_path
    answer = bundle.ask_runtime(runtime, (), *context.handed_over)
    if answer.returncode == 0:
        return 0
    cause = answer.stderr.strip().partition("\n")[0]
    if any(words in cause for words in _OVER) or _is_dead(context):
        cause = "container not running"
    elif "file does not exist" in cause:
        cause = "container does not exist"
    raise ShimError(f"could not kill container '{context.container_id}': {cause}")


def _is_dead(context: Context) -> bool:
    """Whether its sandbox is gone: runsc takes a paused container for paused for ever."""
    try:
        found = bundle.runtime_state(context.config.runtime_path, context.call.root, context.container_id)
    except ShimError:
        return False
    return not Path(f"/proc/{found.pid}").exists()


def _kill_held(context: Context) -> int:
    words = context.call.args[1:]
    number = _number(words[0] if words else "TERM")
    if (context.directory / state.ATTENDANT).exists():
        from shim import attendant

        pid = attendant.find(context.directory)
    else:
        found = bundle.runtime_state(context.config.runtime_path, context.call.root, context.container_id)
        pid = found.pid if found.status == "created" else None
    try:
        if pid is None:
            raise ProcessLookupError
        os.kill(pid, number)
    except ProcessLookupError:
        message = f"could not kill container '{context.container_id}': container not running"
        raise ShimError(message) from None
    return 0


def _number(word: str) -> int:
    try:
        if word.isdigit():
            return signal.Signals(int(word))
        return signal.Signals[word if word.startswith("SIG") else f"SIG{word}"]
    except (ValueError, KeyError):
        raise UsageError(
            f"could not kill a container: there is no signal '{word}'; give its number"
        ) from None
