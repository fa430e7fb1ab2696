"""Standard streams for a container that has no caller."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path


class Streams:
    """Pipes as this process's standard streams, which the container inherits; a `cat` takes what comes out.

    Not the files themselves: CRIU opens those anew, at their beginning, and could not dump the container
    again, since they lie outside of it. Standard input is at its end.
    """

    def __init__(self, log_path: Path | None, *, shown: bool = False) -> None:
        """log_path: where the output is appended; without it, it is shown here or dropped."""
        self._kept = [os.dup(number) for number in (0, 1, 2)]
        sink = open(log_path or os.devnull, "ab") if log_path or not shown else None  # noqa: PTH123, SIM115
        output, container = os.pipe()
        self._cat = subprocess.Popen(
            ["cat"], stdin=output, stdout=sink, stderr=subprocess.DEVNULL, start_new_session=True
        )
        if sink is not None:
            sink.close()
        nothing, closed = os.pipe()
        for descriptor, number in ((nothing, 0), (container, 1), (container, 2)):
            os.dup2(descriptor, number)
        for descriptor in (output, container, nothing, closed):
            os.close(descriptor)

    def back(self) -> None:
        """This process's own streams again."""
        for number, kept in enumerate(self._kept):
            os.dup2(kept, number)
            os.close(kept)

    def drain(self) -> None:
        """Wait until all that the container has said is through; its children may still hold the pipe."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._cat.wait(timeout=5)
