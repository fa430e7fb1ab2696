"""exec, pause and resume of a restored container that waits for `start`: refused, as for any created one.

And resume of one that stands still because it leaves for another node.
"""

from __future__ import annotations

from shim import state
from shim.errors import ShimError, Undecided
from shim.verbs.context import Context

_WHY = {
    "exec": "cannot exec in a created state",
    "pause": "the container is in a created state, not running",
    "resume": "the container is in a created state, not paused",
}


def serve(context: Context) -> int | None:
    """Refuse the call; None if it is one to resume what is not held, and may go on here. Raises ShimError."""
    verb = context.call.verb
    if not (context.directory / state.HELD).exists():
        if state.undecided(context.directory):
            raise Undecided(verb, context.container_id, "is leaving for")
        if state.is_leaving(context.directory):
            raise ShimError(
                f"could not {verb} container '{context.container_id}': it has left for another node; see "
                "torpor migrate --list"
            )
        return None
    if state.is_coming(context.directory):
        raise Undecided(verb, context.container_id, "comes from")
    raise ShimError(f"could not {verb} container '{context.container_id}': {_WHY[verb]}; start it first")
