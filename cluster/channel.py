"""Messages and files over a stream of bytes.

A message is four bytes of length (big-endian) and JSON. Whoever waits for an answer hears `Busy` every
second; silence for longer than `SILENCE_S` means that the other side, or the way there, is gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from cluster.messages import Busy, Message, Refusal, Said
from engines.api import printable
from shim.errors import ShimError

SILENCE_S = 5.0
_BUSY_S = 1.0
_MAX_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_SMALL_BYTES = 1 << 16
_LENGTH = struct.Struct(">I")
_OLD = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_decoder = msgspec.json.Decoder(Said)

T = TypeVar("T", bound=Message)

OnChunk = Callable[[memoryview], None]
"""Called with each piece of a file that goes through."""


class Lost(ShimError):
    """The other side is gone, or cannot be reached."""


class Refused(ShimError):
    """The other side said no; the message is its own sentence. lost: as in `Refusal`."""

    def __init__(self, message: str, *, lost: bool = False) -> None:
        super().__init__(message)
        self.lost = lost


class Stream(Protocol):
    """Bytes both ways. All raise OSError, `recv_into` returns 0 at the end."""

    def recv_into(self, buffer: memoryview, /) -> int: ...
    def sendall(self, data: bytes | memoryview, /) -> None: ...
    def settimeout(self, timeout_s: float | None, /) -> None:
        """How long a single receive or send may take, seconds; None for ever."""
        ...

    def close(self) -> None: ...


class Channel:
    """One connection. peer: the name of the node at the other end, as it proved it ("" over a pipe)."""

    def __init__(self, stream: Stream, peer: str) -> None:
        self.peer = peer
        self._stream = stream
        self._sending = threading.Lock()
        self._held = b""  # what waits for more

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._stream.close()

    def send(self, message: Message, *, more: bool = False) -> None:
        """Say something. more: as in `send_file`. Raises Lost."""
        data = msgspec.json.encode(message)
        with self._sending:
            self._put(_LENGTH.pack(len(data)) + data, more=more)

    def flush(self) -> None:
        """Send what waits for more. Raises Lost."""
        with self._sending:
            self._put(b"", more=False)

    def _put(self, data: bytes | memoryview, *, more: bool) -> None:
        with self._lossy():
            if len(self._held) + len(data) < _SMALL_BYTES:
                self._held += data
                data = b""
            if self._held and (data or not more):
                self._stream.sendall(self._held)
                self._held = b""
            if data:
                self._stream.sendall(data)

    def receive(self, *, patient: bool = False, max_bytes: int = _MAX_BYTES) -> Said:
        """What the other side says next. patient: wait for ever. max_bytes: of a message. Raises Lost."""
        with self._lossy():
            self._stream.settimeout(None if patient else SILENCE_S)
        head = self._exactly(_LENGTH.size)
        (length,) = _LENGTH.unpack(head)
        if length > max_bytes:
            raise Lost(f"could not understand node '{self.peer}': a message of {length} bytes")
        if patient:
            with self._lossy():
                self._stream.settimeout(SILENCE_S)
        try:
            return _decoder.decode(self._exactly(length))
        except msgspec.MsgspecError as error:
            raise Lost(
                f"could not understand node '{self.peer}': {printable(str(error))}; install the same torpor "
                "on both"
            ) from error

    def answer(self, kind: type[T]) -> T:
        """Wait for the answer to what was asked. Raises Refused, Lost."""
        while True:
            said = self.receive()
            if isinstance(said, Busy):
                continue
            if isinstance(said, kind):
                return said
            if isinstance(said, Refusal):
                raise Refused(printable(said.cause), lost=said.lost)
            raise Lost(f"could not understand node '{self.peer}': it answered {type(said).__name__}")

    def ask(self, message: Message, kind: type[T]) -> T:
        """Say something and wait for the answer. Raises Refused, Lost."""
        self.send(message)
        return self.answer(kind)

    @contextlib.contextmanager
    def busy(self) -> Generator[None]:
        """The other side is told that work goes on while the body runs."""
        done = threading.Event()

        def tell() -> None:
            while not done.wait(_BUSY_S):
                with contextlib.suppress(Lost):
                    self.send(Busy())

        thread = threading.Thread(target=tell, name="busy")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def send_file(
        self,
        path: Path,
        size_bytes: int,
        on_chunk: OnChunk | None = None,
        *,
        offset: int = 0,
        more: bool = False,
    ) -> None:
        """Send bytes of a file from `offset` on, which its message has announced.

        more: what is small may wait here until more is sent or `flush` is called. Raises Lost, OSError.
        """
        buffer = memoryview(bytearray(min(size_bytes, _CHUNK_BYTES)))
        left = size_bytes
        with path.open("rb", buffering=0) as file, self._sending:
            file.seek(offset)
            while left:
                n_read = file.readinto(buffer[: min(left, _CHUNK_BYTES)])
                if not n_read:
                    raise Lost(f"could not send {path}: it is shorter than it was; try again")
                if on_chunk is not None:
                    on_chunk(buffer[:n_read])
                left -= n_read
                self._put(buffer[:n_read], more=more)

    def receive_file(self, path: Path | None, size_bytes: int, *, offset: int = 0) -> None:
        """Write a file's bytes to a new file (mode 0600), or from `offset` on behind those that came before.

        None only takes them off the channel. Raises Lost; OSError if they cannot be written, after all of
        them were taken off.
        """
        buffer = memoryview(bytearray(min(size_bytes, _CHUNK_BYTES)))
        failure: OSError | None = None
        descriptor = -1
        left = size_bytes
        try:
            try:
                descriptor = _open(path, offset)
            except OSError as error:
                failure = error
            while left:
                part = buffer[: min(left, _CHUNK_BYTES)]
                self._fill(part)
                left -= len(part)
                try:
                    while part and failure is None:
                        part = part[os.write(descriptor, part) :]
                except OSError as error:
                    failure = error
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if failure is not None:
            raise failure

    def _exactly(self, n_bytes: int) -> bytes:
        buffer = bytearray(n_bytes)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def _fill(self, view: memoryview) -> None:
        with self._lossy():
            while view:
                n_read = self._stream.recv_into(view)
                if not n_read:
                    raise Lost(f"could not hear node '{self.peer}' any more: it hung up")
                view = view[n_read:]

    @contextlib.contextmanager
    def _lossy(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise Lost(f"could not reach node '{self.peer}': {error.strerror or error}") from error


def _open(path: Path | None, offset: int) -> int:
    """Where bytes go: a new file, or the end of one that has `offset` bytes. Raises OSError."""
    if path is None:
        return os.open(os.devnull, os.O_WRONLY)
    if not offset:
        return os.open(path, _NEW, 0o600)
    descriptor = os.open(path, _OLD)
    if (size_bytes := os.fstat(descriptor).st_size) != offset:
        os.close(descriptor)
        raise OSError(errno.ESPIPE, f"it has {size_bytes} bytes where {offset} came before", str(path))
    return descriptor
