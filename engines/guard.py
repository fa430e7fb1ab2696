"""What the engines' calls share: a journal, a guardian process, turns at undoing, and half-made images.

Imported by the guardians' undo, so only the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Self


@dataclass(kw_only=True)
class Journal:
    """What a running call has touched, written down before it touches it. Paths are absolute, as text.

    If the call dies, its guardian, or an engine's `undo` later, reads here what there is to undo. The file
    lies in the container's state directory and is gone when nothing is left to undo.

    state: the container's state directory.
    token: tells this call from a later one for the same container, whose journal has the same place.
    """

    FILE: ClassVar[str]
    LOCK: ClassVar[str]
    SCHEMA: ClassVar[int] = 1

    schema: int = SCHEMA
    state: str
    token: str = field(default_factory=lambda: os.urandom(8).hex())

    @property
    def path(self) -> Path:
        """Where the journal is written."""
        return Path(self.state, self.FILE)

    @classmethod
    def undoing(cls, state_path: Path) -> contextlib.AbstractContextManager[None]:
        """Hold the right to undo for a container. Raises OSError."""
        return lock(state_path / cls.LOCK)

    @classmethod
    def read(cls, state_path: Path) -> Self | None:
        """The journal of a call that has not ended, None if there is none. Raises ValueError."""
        try:
            document = json.loads((state_path / cls.FILE).read_text())
        except FileNotFoundError:
            return None
        if document.get("schema") != cls.SCHEMA:
            raise ValueError(
                f"{state_path / cls.FILE} has schema {document.get('schema')}, this is for {cls.SCHEMA}"
            )
        known = {entry.name for entry in fields(cls)}
        return cls(**{key: value for key, value in document.items() if key in known})

    def write(self) -> None:
        """Write, by rename: a reader sees the old or the new one."""
        draft = self.path.with_suffix(".new")
        draft.write_text(json.dumps(asdict(self)))
        draft.rename(self.path)

    def stands(self) -> bool:
        """Whether the call still counts: not undone by somebody else, nor followed by a later one.

        The caller holds `undoing` for as long as it acts on the answer.
        """
        try:
            found = self.read(Path(self.state))
        except ValueError:
            return False
        return found is not None and found.token == self.token

    def update(self) -> bool:
        """Write again, if the call still counts; whether it does."""
        with contextlib.suppress(FileNotFoundError), self.undoing(Path(self.state)):
            if self.stands():
                self.write()
                return True
        return False

    def settle(self) -> None:
        """The call has ended well: there is nothing to undo."""
        with contextlib.suppress(FileNotFoundError), self.undoing(Path(self.state)):
            if self.stands():
                self.remove()

    def remove(self) -> None:
        """Nothing is left to undo. The caller holds `undoing`, and it is this call's."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


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
