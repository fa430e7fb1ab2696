"""Undoes a GPU call when the process that makes it dies. Run as a program: guardian.py STATE.

Standard input is a pipe from the engine. `done` on it: nothing to do. End of file without that: the engine
died. It runs in a session of its own and holds nothing of its parent's.
"""

import os
import sys


def main() -> int:
    """Watch, and undo if need be. Imports the undo only when there is something to undo."""
    if os.read(0, 16) == b"done":
        return 0
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # noqa: PTH100, PTH120
    from pathlib import Path

    from engines.cuda.undo import undo_pending

    state = Path(sys.argv[1])
    for problem in undo_pending(state):
        with (state / "undo.log").open("a") as log:
            log.write(f"{problem}\n")
    return 0


if __name__ == "__main__":
    # The engine waits for us: leave out what Python would tidy up.
    os._exit(main())
