"""Standard streams of containers: pipes and terminals that are always read, so that nobody blocks."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from collections.abc import Generator
from pathlib import Path


class Output:
    """What a container prints, through a pipe or, where `console_path` is given, a terminal.

    console_path: absent; the runtime connects to a socket there and hands over the terminal.
    """

    def __init__(self, console_path: Path | None = None) -> None:
        self.text = ""
        self.console_path = console_path
        self._listener: socket.socket | None = None
        if console_path:
            self.write_fd = os.open(os.devnull, os.O_WRONLY)
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(console_path))
            self._listener.listen(1)
            self._listener.settimeout(60)
            target = self._read_terminal
        else:
            self._read_fd, self.write_fd = os.pipe()
            target = self._read_pipe
        threading.Thread(target=target, daemon=True).start()

    def _read_pipe(self) -> None:
        self._read(self._read_fd)

    def _read_terminal(self) -> None:
        assert self._listener
        with self._listener, contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with connection:
                _, ancillary, _, _ = connection.recvmsg(4096, socket.CMSG_SPACE(4))
                descriptors = array.array("i")
                descriptors.frombytes(ancillary[0][2][:4])
            self._read(descriptors[0])

    def _read(self, descriptor: int) -> None:
        with open(descriptor, "rb", buffering=0) as stream, contextlib.suppress(OSError):
            while data := stream.read(65536):
                self.text += data.decode(errors="replace")

    def handed_over(self) -> None:
        """Close our copy of the writing end."""
        os.close(self.write_fd)


@contextlib.contextmanager
def borrowed(output: Output, error_fd: int | None = None) -> Generator[None]:
    """This process's standard streams are a container's while the body runs; a restore hands them over.

    error_fd: what is to be standard error, None for the output.
    """
    kept = [os.dup(number) for number in (0, 1, 2)]
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(nothing, 0)
        os.dup2(output.write_fd, 1)
        os.dup2(output.write_fd if error_fd is None else error_fd, 2)
        yield
    finally:
        for number, copy in enumerate(kept):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nothing)
        output.handed_over()
