"""What was done to the network, each step written down before it is taken, so that all can be undone.

A file of JSON lines: first the kernel's boot, since nothing of a network outlives it, then the steps, each
with what there was before. Every line is on disk before its step begins: a call that is killed leaves enough.
The lock on the file tells a call at work from one that died. On a tmpfs, `fsync` costs nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from netmig.errors import NetworkError
from netmig.identity import Identity, Route
from netmig.places import Place

SCHEMA = 1
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Created(msgspec.Struct, frozen=True, kw_only=True, tag_field="step", tag="created"):
    """A namespace is about to be made and pinned at a path where nothing was."""

    path: str


class Shaped(msgspec.Struct, frozen=True, kw_only=True, tag_field="step", tag="shaped"):
    """A namespace, and the other ends of its veths, are about to be changed; before: what they were."""

    netns: Place
    host: Place
    before: Identity


class Plugged(msgspec.Struct, frozen=True, kw_only=True, tag_field="step", tag="plugged"):
    """A host end is about to go into a bridge or out of it; before: the bridge that it was in."""

    host: Place
    end: str
    index: int
    before: str | None
    port: dict[str, int]


class Routed(msgspec.Struct, frozen=True, kw_only=True, tag_field="step", tag="routed"):
    """A route of the node is about to be replaced; before: those that it had to the same destination."""

    host: Place
    route: Route
    before: tuple[Route, ...]


class Proxied(msgspec.Struct, frozen=True, kw_only=True, tag_field="step", tag="proxied"):
    """The node is about to answer for an IPv6 address on one of its interfaces, which it did not before."""

    host: Place
    interface: str
    ip: str


class Set(msgspec.Struct, frozen=True, kw_only=True, tag_field="step", tag="set"):
    """A sysctl of the node is about to be changed."""

    host: Place
    name: str
    before: str


class Leased(msgspec.Struct, frozen=True, kw_only=True, tag_field="step", tag="leased"):
    """An address of a host-local network is about to become `owner`'s; before: whose it was, if anybody's."""

    network: str
    data_dir: str
    ip: str
    owner: str
    ifname: str
    before: str | None


Step = Created | Shaped | Plugged | Routed | Proxied | Set | Leased


class Journal:
    """The steps of one call, in order. Without a path they are in memory only and die with the process."""

    def __init__(self, path: Path | None = None) -> None:
        """A new journal. Raises NetworkError if the path is taken or cannot be written."""
        self.path = path
        self._steps: list[Step] = []
        self._fd = -1
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            self._write({"schema": SCHEMA, "boot": _boot()})
            _sync_directory(path.parent)
        except OSError as error:
            raise NetworkError(
                f"could not write network journal '{path}': {error.strerror}; "
                "undo the call that left it, or choose another directory"
            ) from error

    @classmethod
    def load(cls, path: Path) -> Journal | None:
        """The journal that a dead or finished call left; further steps go on in it.

        None if the call is at work still, or has come to its end meanwhile. Raises NetworkError.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise NetworkError(
                f"could not read network journal '{path}': {error.strerror}; name one that exists"
            ) from error
        journal = cls()
        journal.path, journal._fd = path, fd
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink == 0:
                raise BlockingIOError
            journal._steps, n_bytes = _read_steps(path)
            os.ftruncate(fd, n_bytes)
            if not n_bytes:
                journal._write({"schema": SCHEMA, "boot": _boot()})
        except BlockingIOError:
            journal.close()
            return None
        except BaseException:
            journal.close()
            raise
        return journal

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, the first first. Each may have been taken, wholly, in part or not at all."""
        return tuple(self._steps)

    def record(self, step: Step) -> None:
        """Put a step on disk; take it only after this. Raises NetworkError."""
        if self._fd >= 0:
            try:
                self._write(msgspec.to_builtins(step))
            except OSError as error:
                raise NetworkError(
                    f"could not write network journal '{self.path}': {error.strerror}; make room"
                ) from error
        self._steps.append(step)

    def close(self) -> None:
        """Leave the file to whoever loads it next."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def drop(self, keep: int) -> None:
        """All steps but the first `keep` are undone. The file goes with the last one, and not before."""
        del self._steps[keep:]
        if not self._steps:
            self.forget()

    def forget(self) -> None:
        """Nothing of it is to be undone any more: the file goes."""
        self._steps.clear()
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.close()

    def _write(self, document: Any) -> None:
        line = json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        if os.write(self._fd, line) != len(line):
            raise OSError(28, "no space is left")
        os.fsync(self._fd)


def _boot() -> str:
    return _BOOT.read_text().strip()


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_steps(path: Path) -> tuple[list[Step], int]:
    """The steps, and their length in bytes; a last line that was cut off was never taken."""
    data = path.read_bytes()
    *lines, rest = data.split(b"\n")
    try:
        first = json.loads(lines[0]) if lines else {"schema": SCHEMA, "boot": ""}
        if first["schema"] != SCHEMA:
            raise NetworkError(
                f"could not read network journal '{path}': its schema is {first['schema']!r} and {SCHEMA} is "
                "known here; use the torpor that wrote it"
            )
        if first["boot"] != _boot():
            return [], 0
        steps = [msgspec.convert(json.loads(line), Step, strict=True) for line in lines[1:]]
        return steps, len(data) - len(rest)
    except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise NetworkError(
            f"could not read network journal '{path}': {error}; look at the file, and remove it"
        ) from error
