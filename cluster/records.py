"""What a migration has come to, on disk, so that whoever dies it can be brought to its end.

A departure (on the source) and an arrival (on the target) each have a directory under the migration's name:

    lock       held by the process that is at work on it
    plan.json  what it is about; written once at its beginning
    verdict    of a departure: `hold` from before the target may be asked to prepare, then `commit` or `abort`
               (see `engines.api.Verdict`). It is the decision of the whole migration.
    standing   of an arrival: `reserved`, `preparing`, `prepared`, `committed`, `running`, `settled`
    image      of an arrival: the digest of its image, from before the store has that
    wish       what an operator decided with --resolve: `source` or `target`
    boot       of an arrival: when its container was let go, by the kernel's name for the time since its start
    over       of a departure: `yes`: the target has said that it runs; then `deleted` here, then `cleared`;
               or `lost`: the target has not got it any more, and its image is one of this node's store
    stays      of a departure that was called off: the container runs on; only the target may not know yet
    left       of an arrival: its container has gone on to another node
    via        of a departure on routed networks: the target's addresses by which it is reached
    problem    what stood against the last try to bring it to its end

Everything else in it is made by `departure` and `arrival`. A line is replaced by a rename. The verdict is on
disk before the call returns, and so is that an arrival is settled, since its files outlive the kernel, and
that a departure has been deleted, cleared or lost, since its names may be another's then; the others need
only outlive the process: what they tell ends with the kernel.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from shim.errors import ShimError
from shim.state import make_private

PLAN = "plan.json"
VERDICT = "verdict"
STANDING = "standing"
IMAGE = "image"
WISH = "wish"
OVER = "over"
STAYS = "stays"
LEFT = "left"
BOOT = "boot"
VIA = "via"
PROBLEM = "problem"
LOCK = "lock"
_NAME = re.compile(r"[0-9a-f]{16}")

Wish = Literal["source", "target"]
Step = Literal["reserved", "preparing", "prepared", "committed", "running", "settled"]
STEPS: tuple[Step, ...] = ("reserved", "preparing", "prepared", "committed", "running", "settled")

T = TypeVar("T", bound=msgspec.Struct)


def new_name() -> str:
    """A name for a new migration."""
    return secrets.token_hex(8)


def check_name(name: str) -> str:
    """Return a migration's name, which becomes a path, if it is one. Raises ShimError."""
    if not _NAME.fullmatch(name):
        raise ShimError(f"could not find migration {name[:40]!r}: a name has sixteen hex digits")
    return name


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """A container that leaves.

    peer: the target's name. engine: the engine's. directory: torpor's state of the container. netns: path of
    its network namespace. identity: of that, encoded. owner: of its leases. guest: it is of a pod of a caller
    of its own, as is the one that is made for it on the other node, with an annotation that names this image.
    routed: each node has a pod network of its own. returning: then, it goes back to its home.
    """

    migration: str
    container_id: str
    root: str
    directory: str
    bundle: str
    peer: str
    engine: str
    netns: str
    identity: bytes
    owner: str
    guest: str = ""
    routed: bool = False
    returning: bool = False
    schema: int = 1


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A container that arrives. peer: the source's name; the rest as in `Departure`, on this node.

    away: the source is its home, where networks are routed. returns: this node is, and that is the migration
    in which it left.
    """

    migration: str
    container_id: str
    root: str
    directory: str
    peer: str
    engine: str
    netns: str
    identity: bytes
    owner: str
    guest: str = ""
    away: bool = False
    returns: str = ""
    schema: int = 1


class Record:
    """The directory of one migration on this node."""

    def __init__(self, parent: Path, migration: str) -> None:
        self.migration = check_name(migration)
        self.path = parent / migration

    def exists(self) -> bool:
        """Whether this node knows the migration."""
        return (self.path / PLAN).exists()

    @contextlib.contextmanager
    def begun(self) -> Generator[None]:
        """Make the directory, and be the one at work on it in the body. Raises OSError."""
        while True:
            make_private(self.path)
            with self.locked(wait=True) as ours:
                if ours:
                    yield
                    return

    def make(self, plan: msgspec.Struct) -> None:
        """Write what it is about: from now on it counts. Raises OSError."""
        _replace(self.path / PLAN, msgspec.json.encode(plan), durable=True)

    def plan(self, kind: type[T]) -> T:
        """What it is about. Raises ShimError."""
        try:
            return msgspec.json.decode((self.path / PLAN).read_bytes(), type=kind)
        except (OSError, msgspec.MsgspecError) as error:
            raise ShimError(
                f"could not read {self.path / PLAN}: {error}; bring that file back, or end its container, "
                "and only then remove the directory, in which a container that has arrived has its files"
            ) from None

    def write(self, name: str, word: str, *, durable: bool = False) -> None:
        """Write one of the lines. durable: it is on disk then, as a verdict always is. Raises OSError."""
        _replace(self.path / name, f"{word}\n".encode(), durable=durable or name == VERDICT)

    def read(self, name: str) -> str:
        """One of the lines, "" if it was not written."""
        try:
            return (self.path / name).read_text().strip()
        except FileNotFoundError:
            return ""

    def remove(self) -> None:
        """The migration is over for this node. The plan goes last: what is left until then is seen again."""
        with contextlib.suppress(FileNotFoundError):
            for entry in self.path.iterdir():
                if entry.name not in {PLAN, LOCK}:
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        shutil.rmtree(self.path, ignore_errors=True)

    @contextlib.contextmanager
    def locked(self, *, wait: bool = False) -> Generator[bool]:
        """Be the one at work on it in the body; False if somebody else is, or it is gone.

        wait: until they are done. The lock is a descriptor's: it goes with the process, and is not inherited.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(self.path / LOCK, flags, 0o600)
        except FileNotFoundError:
            yield False
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(descriptor)
            yield False
            return
        try:
            yield os.fstat(descriptor).st_nlink > 0
        finally:
            os.close(descriptor)


def begin_departure(record: Record, plan: Departure) -> None:
    """Write what it is about, unless the container is leaving already. Raises ShimError, OSError."""
    descriptor = os.open(record.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # of two who begin at the same time one sees the other
        for other in all_of(record.path.parent):
            if other.migration != record.migration and other.exists() and _goes_on(other):
                theirs = other.plan(Departure)
                if (theirs.container_id, theirs.root) == (plan.container_id, plan.root):
                    raise ShimError(
                        f"a migration of it to '{theirs.peer}' is under way, {other.migration}; wait for "
                        "that, or see `torpor migrate --list`"
                    )
        record.make(plan)
    finally:
        os.close(descriptor)


def _goes_on(record: Record) -> bool:
    """Whether somebody is at work on a departure, or has to bring it to its end, so that none may begin."""
    if record.read(STAYS) or record.read(OVER) in ("deleted", "cleared", "lost"):
        return False
    with record.locked() as ours:
        return not ours or bool(record.read(VERDICT))


def all_of(parent: Path) -> Iterator[Record]:
    """Every migration that a directory holds."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(parent.iterdir()):
            if _NAME.fullmatch(path.name):
                yield Record(parent, path.name)


def _replace(path: Path, data: bytes, *, durable: bool) -> None:
    draft = path.with_name(f".{path.name}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, data)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    draft.replace(path)
    if not durable:
        return
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
