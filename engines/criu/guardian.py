"""Undoes a call when the process that makes it dies. Run as a program: guardian.py STATE DEADLINE_S TOKEN.

Standard input is a pipe from the engine. `done` on it: nothing to do. End of file without that: the engine
died. Silence past the deadline (seconds from now): the engine is stuck, or its caller has yet to decide.
TOKEN names the call in its journal: a later call is not for this guardian to undo, however late it is. It
runs in a session of its own and holds nothing of its parent's, so that callers which wait for the end of a
pipe do not wait for it.
"""

import os
import select
import sys

_AGAIN_S = 1.0


def main() -> int:
    """Watch, and undo if need be. Imports the undo only when there is something to undo."""
    state, deadline_s, token = sys.argv[1:]
    patience_s = float(deadline_s)
    while True:
        ready, _, _ = select.select([0], [], [], patience_s)
        if ready and os.read(0, 16) == b"done":
            return 0
        sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # noqa: PTH100, PTH120
        from pathlib import Path

        from engines.criu.undo import undo_pending

        outcome = undo_pending(Path(state), token)
        if ready or not outcome or not outcome.held:
            break
        patience_s = _AGAIN_S
    if outcome:
        with Path(state, "undo.log").open("a") as log:
            log.write(f"{outcome}\n")
    return 0


if __name__ == "__main__":
    # The engine waits for us: leave out what Python would tidy up.
    os._exit(main())
