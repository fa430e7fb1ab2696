"""exec, pause and resume of a restored container that waits for `start`: refused, as for any created one."""

from __future__ import annotations

from shim.errors import ShimError
from shim.verbs.context import Context

_WHY = {
    "exec": "cannot exec in a created state",
    "pause": "the container is in a created state, not running",
    "resume": "the container is in a created state, not paused",
}


def serve(context: Context) -> int | None:
    """Refuse the call. Raises ShimError."""
    verb = context.call.verb
    raise ShimError(f"could not {verb} container '{context.container_id}': {_WHY[verb]}; start it first")
