"""start of a restored container: an image that may be used once is consumed, then the tasks run.

Also that of a container in a gVisor pod, which takes its streams from here.
"""

from __future__ import annotations

import subprocess

from shim import state
from shim.start import start
from shim.verbs.context import Context


def serve(context: Context) -> int | None:
    """Release a held container; None if it is not held. Raises ShimError, EngineError."""
    directory = context.directory
    if (directory / state.ATTENDANT).exists() and not (directory / state.STATE).exists():
        return _start_attended(context)
    started = start(context.config, context.container_id, directory, context.engine_settings)
    return 0 if started else None


def _start_attended(context: Context) -> int:
    from shim import attendant

    argv = [str(context.config.runtime_path), *context.handed_over]
    with state.locked(context.directory, wait_s=5.0):
        with attendant.streams(context.directory):
            status = subprocess.run(argv, check=False, close_fds=False).returncode
        if status == 0:
            attendant.go(context.directory)
    return status
