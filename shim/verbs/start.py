"""start of a restored container: an image that may be used once is consumed, then the tasks run."""

from __future__ import annotations

from shim.start import start
from shim.verbs.context import Context


def serve(context: Context) -> int | None:
    """Release a held container; None if it is not held. Raises ShimError, EngineError."""
    started = start(context.config, context.container_id, context.directory, context.engine_settings)
    return 0 if started else None
