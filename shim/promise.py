"""A container that is about to come from another node, into a pod that its caller makes here.

The caller's `create` waits for the image, restores it and holds it, mute; its `start` waits for the verdict.
Until that is `commit` nothing of the container may run here, nor anything in its place: it runs at its
source, or may. Whoever moves it keeps, beside the images of the store,

    STORE/promised/<namespace or _>/<name>/
        plan.json   whose it is, and the name that the container had in its pod (`Plan`)
        lock        held by a `create` that waits or is at work
        waiting     who that is
        image       the digest of the image, once it is in the store
        failure     why the `create` has ended without a container
        verdict     `commit` or `abort`
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Literal

import msgspec

from shim.errors import Busy, CalledOff, ShimError
from shim.images.layout import Reference
from shim.state import make_private

PATIENCE_S = 100.0
"""How long a caller is kept waiting, at `create` and at `start`; the kubelet gives a runtime 120 s."""

_PLAN = "plan.json"
_LOOK_S = 0.01
_BUSY_S = 0.5  # longer than anybody only looks


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """The container of a `create` that waits.

    root: the runtime's --root. directory: torpor's state of it. netns: path of its pod's network namespace.
    """

    container_id: str
    root: str
    directory: str
    netns: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is promised. migration: whose it is: another one of the same name has no say in it."""

    migration: str
    name: str


class Promise:
    """One container that is to come, at a place in the store of this node."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, store_path: Path, reference: Reference) -> Promise:
        """The promise of an image, whether or not there is one."""
        return cls(store_path / "promised" / reference.directory)

    def exists(self) -> bool:
        """Whether there is such a promise."""
        return (self.path / _PLAN).exists()

    # --- who moves it ----------------------------------------------------------------------------------

    def make(self, plan: Plan) -> None:
        """Promise it. Raises ShimError if it is promised already, OSError."""
        make_private(self.path)
        draft = self._draft(plan.migration, msgspec.json.encode(plan).decode())
        try:
            (self.path / _PLAN).hardlink_to(draft)  # of two at the same time one is told
        except FileExistsError:
            raise ShimError(
                f"image '{self.path.name}' is on its way here already; choose another name"
            ) from None
        finally:
            draft.unlink()
        self._sync()

    def is_of(self, migration: str) -> bool:
        """Whether there is such a promise, and it is a migration's. Raises CalledOff if it is damaged."""
        plan = self._plan()
        return plan is not None and plan.migration == migration

    def waiting(self) -> Waiting | None:
        """Who waits for it, or is at work; None if nobody."""
        with self._locked() as free:
            if free:
                return None
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((self.path / "waiting").read_bytes(), type=Waiting)
        return None

    def came(self, digest: str) -> None:
        """The image is in the store. Raises OSError."""
        self._write("image", digest)

    def failure(self) -> str:
        """Why there is no container."""
        return self._read("failure")

    def decide(self, migration: str, verdict: Literal["commit", "abort"]) -> None:
        """Let it run, or never, if it is the migration's. Durable when this returns.

        Raises CalledOff, OSError.
        """
        if self.is_of(migration):
            self._write("verdict", verdict)

    def remove(self, migration: str) -> None:
        """It is over, if it is the migration's: a `create` or a `start` that waits fails. Idempotent.

        What says whose it is goes last: what is left until then is found again. Raises CalledOff.
        """
        (self.path / f".{migration}.new").unlink(missing_ok=True)
        if self.is_of(migration):
            for entry in self.path.iterdir():
                if entry.name != _PLAN:
                    entry.unlink(missing_ok=True)
            (self.path / _PLAN).unlink()
        if self.exists():
            return
        shutil.rmtree(self.path, ignore_errors=True)  # of who looked meanwhile
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    # --- who makes its container -----------------------------------------------------------------------

    @property
    def container_name(self) -> str:
        """The name that the container had in its pod. Raises CalledOff, also if the promise is gone."""
        plan = self._plan()
        if plan is None:
            raise _called_off(f"could not use image '{self.path.name}'")
        return plan.name

    @contextlib.contextmanager
    def awaited(self, who: Waiting) -> Generator[None]:
        """Wait until the image is there, and restore it in the body. Raises Busy, CalledOff."""
        with self._locked(wait_s=_BUSY_S) as ours:
            if not ours:
                raise Busy(
                    f"could not create container '{who.container_id}': another one waits for image "
                    f"'{self.path.name}'; remove one of them"
                )
            self._write("waiting", msgspec.json.encode(who).decode())
            (self.path / "failure").unlink(missing_ok=True)
            what = f"could not create container '{who.container_id}'"
            self._wait(lambda: self._read("image"), what, "its image did not come")
            try:
                yield
            except Exception as error:
                with contextlib.suppress(OSError):  # gone with the promise
                    self._write("failure", " ".join(str(error).split()))
                raise

    def permits(self, container_id: str, digest: str) -> None:
        """Wait until the container may run. Raises CalledOff if it may not.

        digest: of the image that it was restored from: the promise may be another one by now.
        """
        what = f"could not start container '{container_id}'"

        def look() -> str:
            verdict = self._read("verdict")
            if self._read("image") != digest:  # in this order: the image comes before its verdict
                raise _called_off(what)
            return verdict

        self._wait(look, what, "nobody has decided whether it is to run here")

    def _wait(self, look: Callable[[], str], what: str, late: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = look()
            if not self.exists() or self._read("verdict") == "abort":
                raise _called_off(what)
            if found:
                return
            if time.monotonic() > deadline:
                raise CalledOff(f"{what}: {late} within {PATIENCE_S:g} s; see torpor migrate --list")
            time.sleep(_LOOK_S)

    def _plan(self) -> Plan | None:
        try:
            return msgspec.json.decode((self.path / _PLAN).read_bytes(), type=Plan)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise CalledOff(
                f"could not read {self.path / _PLAN}: {error}; end its migration, then remove the directory"
            ) from None

    # --- files -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self, *, wait_s: float = 0.0) -> Generator[bool]:
        """Hold the lock in the body; False if somebody else does for so long, or there is no promise."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(self.path / "lock", flags, 0o600)
        except FileNotFoundError:
            yield False
            return
        deadline = time.monotonic() + wait_s
        ours = False
        try:
            while not ours:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    ours = True
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(_LOOK_S)
            yield ours
        finally:
            os.close(descriptor)

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text()
        except FileNotFoundError:
            return ""

    def _write(self, name: str, text: str) -> None:
        self._draft(name, text).replace(self.path / name)
        self._sync()

    def _draft(self, name: str, text: str) -> Path:
        draft = self.path / f".{name}.new"
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return draft

    def _sync(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _called_off(what: str) -> CalledOff:
    return CalledOff(f"{what}: its migration was called off, and it runs on where it was")
