"""kill of a container that torpor is restoring or holds."""

from __future__ import annotations

from shim import state
from shim.verbs.context import Context


def serve(context: Context) -> int | None:
    """Hand the signal over to the runtime.

    SIGKILL ends held tasks at once (the runtime thaws them for it, and they die before they run); any other
    signal waits for `start`, as it is the application's to handle. A restore that is still at work is
    interrupted: what the caller wants dead must not be waited for.
    """
    found = state.load(context.directory)
    if found is not None and found.phase == "restoring":
        state.interrupt(context.directory)
    return None
