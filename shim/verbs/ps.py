"""ps of a restored container that waits for `start`: its tasks exist, the runtime can list them."""

from __future__ import annotations

from shim.verbs.context import Context


def serve(context: Context) -> int | None:
    """Hand the call over."""
    del context
    return None
