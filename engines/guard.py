"""What the engines' frames of a call share: a guardian process, turns at undoing, and half-made images.

Imported by the guardians' undo, so only the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from pathlib import Path


class Guardian:
    """A process that undoes a call if this one dies before it dismisses it.

    program: a Python file, run with args and the environment env. Its standard input is a pipe, on which
    `done` comes, or the end of file when this process is dead.
    """

    def __init__(self, program: str, *args: str, env: Mapping[str, str]) -> None:
        # The same interpreter with the same isolation as the launcher's: it starts in 8 ms, beside our work.
        self._process = subprocess.Popen(
            [sys.executable, "-IS", program, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            env=env,
        )

    def dismiss(self) -> None:
        """The call has ended, or is undone: wait until the guardian is gone."""
        pipe = self._process.stdin
        if pipe:
            with contextlib.suppress(OSError):
                pipe.write(b"done")
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()


@contextlib.contextmanager
def lock(path: Path) -> Generator[None]:
    """Hold the right to undo for a container: engine, guardian and later calls take turns. Raises OSError."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_partial(image_path: Path, *, made: bool) -> None:
    """Remove the files a dump wrote; also the directory, if the dump made it and nothing else is in it."""
    if not image_path.is_dir():
        return
    for entry in os.scandir(image_path):
        if not entry.is_dir(follow_symlinks=False):
            Path(entry.path).unlink(missing_ok=True)
    if made:
        with contextlib.suppress(OSError):
            image_path.rmdir()
