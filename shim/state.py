"""What torpor knows of one container between two executions, kept so that a crash at any point can be undone.

A directory on tmpfs for each (real path of the runtime's root, container id); it is gone after a reboot, as
the runtime's own state is. The entry point decides by its existence whether a call is torpor's, so it exists
only for containers that torpor restores or has restored, and while it checkpoints one.
Beside it, `ID%exec` says when a gVisor container had its first exec session (`shim.entry.note_exec`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from shim.errors import Busy, ShimError

HELD = "held"
STATE = "state.json"
LOCK = "lock"
ENGINE = "engine"
VERDICT = "verdict"  # of a checkpoint whose caller keeps one: its path
STANDING = "standing"  # of a container that comes from another node: path of the word for how far that is
ATTENDANT = "attendant"  # see `shim.attendant`
UPPER = "upper.json"  # of the copy of a container's upper directory (`shim.images.undo`)
JOURNALS = "*-call.json"  # what engines write before they touch anything
NETWORK = "net"  # of the node: what calls write down of networks before they touch them

ContainerPhase = Literal["restoring", "held", "running"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerState:
    """A container that torpor restores or restored.

    phase: `restoring` (a call is at work, or died there), `held` (waits for `start`), `running`.
    image: its reference as text; digest: of its manifest; use: `move` images are consumed at `start`.
    created: RFC 3339. hostname: of the UTS namespace that the container shares, while it is restored.
    For pods that an engine restores as a whole: sandbox_id is that of the pod's pause container; in its own
    state, awaited are the names of the containers in the image that were not restored yet.
    promised: path of the promise of a container that comes from another node (`shim.promise`).
    """

    container_id: str
    root: str
    bundle: str
    phase: ContainerPhase
    engine: str
    image: str
    digest: str
    use: Literal["clone", "move"]
    created: str
    hostname: str = ""
    sandbox_id: str = ""
    container_name: str = ""
    awaited: tuple[str, ...] = ()
    promised: str = ""
    schema: int = 1


def make_private(directory: Path) -> None:
    """Make a directory and what is missing above it, each for root alone. Raises OSError."""
    if not directory.is_dir():
        make_private(directory.parent)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)


def load(directory: Path) -> ContainerState | None:
    """The state kept in a container's directory, None if there is none. Raises ShimError if it is damaged."""
    try:
        return msgspec.json.decode((directory / STATE).read_bytes(), type=ContainerState, strict=True)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ShimError(f"the state in {directory} is damaged ({error}); remove the directory") from None


def save(directory: Path, state: ContainerState) -> None:
    """Replace a container's state at once, marker of the held phase included."""
    temporary = directory / f"{STATE}.new"
    temporary.write_bytes(msgspec.json.encode(state))
    marker = directory / HELD
    # The marker only ever errs on the side of "held": then the slow path looks into the state itself.
    if state.phase == "held":
        marker.touch(mode=0o600)
    temporary.replace(directory / STATE)
    if state.phase != "held":
        marker.unlink(missing_ok=True)


def advance(directory: Path, state: ContainerState, phase: ContainerPhase) -> ContainerState:
    """Save the state with another phase, and return it."""
    state = replace(state, phase=phase)
    save(directory, state)
    return state


def note_engine(directory: Path, name: str) -> None:
    """Record which engine is about to checkpoint a container, for whoever must undo it."""
    (directory / ENGINE).write_text(name)


def engine_at_work(directory: Path) -> str | None:
    """The engine of a checkpoint that is at work, or died; None if there is none."""
    try:
        return (directory / ENGINE).read_text() or None
    except OSError:
        return None


def note_verdict(directory: Path, path: Path) -> None:
    """Record where the verdict on a checkpoint is kept, for whoever would end its source."""
    (directory / VERDICT).write_text(str(path))


def undecided(directory: Path) -> bool:
    """Whether a container is kept frozen because its checkpoint may yet wake up elsewhere, or not."""
    return _word(directory / VERDICT) == "hold"


def is_leaving(directory: Path) -> bool:
    """Whether a container stands still here because it may wake up elsewhere, or does already."""
    return _word(directory / VERDICT) in {"hold", "commit"}


def note_standing(directory: Path, path: Path) -> None:
    """Record where it is kept how far a container has come here, for whoever would start it."""
    (directory / STANDING).write_text(str(path))


def is_coming(directory: Path) -> bool:
    """Whether a container from another node may not run here, as nobody has decided where it is to run."""
    return _word(directory / STANDING) in {"reserved", "preparing", "prepared"}


def _word(path: Path) -> str:
    """What stands in the file that another one names, "" if there is none."""
    try:
        return Path(path.read_text()).read_text().strip()
    except OSError:
        return ""


def remove(directory: Path) -> None:
    """Forget a container. The state file goes last, so that a crash in between is seen and repeated."""
    with contextlib.suppress(FileNotFoundError):
        for entry in directory.iterdir():
            if entry.name not in {STATE, LOCK}:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def _holder(directory: Path) -> tuple[int, str] | None:
    try:
        pid, start = (directory / LOCK).read_text().split()
    except (OSError, ValueError):
        return None
    return int(pid), start


def start_time(pid: int) -> str:
    """When a process was started, in the kernel's clock ticks as text; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def interrupt(directory: Path) -> None:
    """Kill the torpor call that holds a container, so that `kill` and `delete --force` need not wait for it.

    Its guardian then undoes what it was doing. One that has let go of the container works on for others.
    """
    with contextlib.suppress(OSError), (directory / LOCK).open() as lock:
        try:
            # Shared: who is about to hold it is hindered for a moment, who looks as we do is not.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(directory)
            if holder and holder[0] != os.getpid() and start_time(holder[0]) == holder[1]:
                os.kill(holder[0], signal.SIGKILL)


def _is_open(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the file that is open."""
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def locked(directory: Path, *, wait_s: float, create: bool = False, aside: bool = False) -> Generator[None]:
    """Hold a container for one call.

    wait_s: how long to wait for another call, seconds. create: make the directory if it is absent, and
    remove it at the end if no state was saved in it. aside: by a call that is about another container, which
    `interrupt` must not kill.
    Raises Busy if another call holds it all that time, FileNotFoundError if there is no directory.
    """
    deadline = time.monotonic() + wait_s
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        if create:
            make_private(directory)
        try:
            descriptor = os.open(directory / LOCK, flags, 0o600)
        except FileNotFoundError:
            if create:  # the last holder has just removed it
                continue
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() >= deadline:
                holder = _holder(directory)
                who = f" (pid {holder[0]})" if holder else ""
                raise Busy(
                    f"container '{directory.name}' is held by another torpor call{who}; "
                    "try again when it is done"
                ) from None
            time.sleep(0.01)
            continue
        # The directory may have been removed, and made anew, between the opening and the lock.
        if _is_open(directory / LOCK, descriptor):
            break
        os.close(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        if not aside:
            os.pwrite(descriptor, f"{os.getpid()} {start_time(os.getpid())}".encode(), 0)
        yield
    finally:
        # An engine's journal that is still there is for its guardian, or for the next call, to undo.
        kept = (directory / STATE).exists() or (directory / ATTENDANT).exists()
        settled = not kept and not list(directory.glob(JOURNALS))
        if create and settled and _is_open(directory / LOCK, descriptor):
            remove(directory)
        os.ftruncate(descriptor, 0)  # who is named here may be killed
        os.close(descriptor)
