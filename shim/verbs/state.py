"""state of a restored container that waits for `start`: `created`, whatever the runtime calls it."""

from __future__ import annotations

import json
import sys

from shim import bundle, state
from shim.verbs.context import Context


def serve(context: Context) -> int | None:
    """Print what the runtime says, with `paused` told as `created`."""
    found = bundle.runtime_state(context.config.runtime_path, context.call.root, context.container_id)
    document = dict(found.raw)
    if found.status == "paused":
        document["status"] = "created"
    if (context.directory / state.ATTENDANT).exists():
        from shim import attendant

        if attendant.find(context.directory) is None:
            document.update(status="stopped", pid=0)
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return 0
