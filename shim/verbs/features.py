"""features: what the real runtime offers, and that torpor stands before it."""

from __future__ import annotations

import json
import subprocess
import sys

from shim.verbs.context import Context
from shim.version import VERSION


def serve(context: Context) -> int | None:
    """Print the runtime's features with torpor's annotations added; the runtime's own failure is its own."""
    answer = subprocess.run(
        [str(context.config.runtime_path), *context.handed_over],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if answer.returncode:
        return None
    try:
        document = json.loads(answer.stdout)
    except ValueError:
        return None
    document.setdefault("annotations", {}).update(
        {"dev.torpor.version": VERSION, "dev.torpor.restore-at-create": "true"}
    )
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return 0
