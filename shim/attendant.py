"""The process that stands on the host for a container in a pod of gVisor.

runsc gives the second and later containers of a sandbox no process of their own, names the sandbox's instead,
and takes their streams from whoever calls `start`. A caller made for runc waits for a process, and gives the
streams to `create`. So `create` starts this one, which becomes the caller's as a container's first process
does: it holds the streams until `start` borrows them, then waits for the container inside and ends as that
ends. Until `start` it ends with the sandbox, whoever else was killed. It is a shell, because there is one for
every container, all its life.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from shim import state
from shim.errors import ShimError

_GO = "go"  # below a container's state directory: a fifo
_READY_S = 5.0
_PIDFD_GETFD = 438  # the same on all architectures

# `runsc wait` says {"id":"...","exitStatus":3}; it fails when the sandbox dies, which no container survives.
# Before it can be asked, a part of the script looks whether the sandbox lives. It holds none of the streams,
# and opens the fifo for both directions, so that it never waits. The shell itself waits in opening the fifo:
# until then its descriptors 0 to 2 are the container's.
_SCRIPT = """\
sandbox=$1 go=$2
shift 2
{
    while kill -0 "$sandbox" && kill -0 $$; do sleep 1; done
    kill -0 $$ && echo over 1<>"$go"
} </dev/null >/dev/null 2>&1 &
read -r word <"$go"
trap : TERM; kill -TERM 0; trap - TERM
[ "$word" = go ] || exit 137
said=$("$@" </dev/null 2>/dev/null) || exit 137
said=${said##*'"exitStatus":'}
exit "${said%%[!0-9]*}"
"""


def begin(directory: Path, wait: Sequence[str], *, sandbox: int, name: str, terminal: bool) -> int:
    """Start the attendant of a container that was created, with this process's streams; its pid.

    directory: torpor's state of the container. wait: the command line that waits for the container's end.
    sandbox: pid of the sandbox. name: what the attendant shows as. terminal: the container has one already,
    and the streams are only this call's, whose end the caller waits for. Raises OSError.
    """
    go_path = directory / _GO
    go_path.unlink(missing_ok=True)
    os.mkfifo(go_path, 0o600)
    stream = subprocess.DEVNULL if terminal else None
    with _no_signal_ignored():
        process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, name, str(sandbox), str(go_path), *wait],
            stdin=stream,
            stdout=stream,
            stderr=stream,
            cwd="/",
            env={"PATH": os.environ.get("PATH", "")},
            start_new_session=True,
        )
    try:
        draft = directory / f"{state.ATTENDANT}.new"
        draft.write_text(f"{process.pid} {state.start_time(process.pid)}")
        (directory / state.HELD).touch(mode=0o600)
        draft.rename(directory / state.ATTENDANT)
    except BaseException:
        _kill(process.pid, signal.SIGKILL)  # nobody would find it
        raise
    return process.pid


@contextlib.contextmanager
def _no_signal_ignored() -> Generator[None]:
    """Have a child start with no signal ignored or blocked: a shell cannot change what it began with."""
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def join(pid: int, cgroup: str) -> None:
    """Put an attendant into its container's control groups, if the runtime made any.

    cgroup: as in the specification. One in systemd's words is left to whoever reads those.
    """
    root = Path("/sys/fs/cgroup")
    if not cgroup.startswith("/") or ".." in cgroup:
        return
    for hierarchy in (root, *root.iterdir()):
        with contextlib.suppress(OSError):  # no such group, or no such hierarchy
            (hierarchy / cgroup[1:] / "cgroup.procs").write_text(str(pid))


def has(directory: Path) -> bool:
    """Whether a container has an attendant, alive or not."""
    return (directory / state.ATTENDANT).exists()


def find(directory: Path) -> int | None:
    """The pid of a container's attendant, None if there is none that lives."""
    try:
        pid, started = (directory / state.ATTENDANT).read_text().split()
        row = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return int(pid) if row[19] == started and row[0] not in "ZX" else None


@contextlib.contextmanager
def streams(directory: Path) -> Generator[None]:
    """Have the container's streams as this process's own, for a call of runsc in between.

    Raises ShimError if its attendant is gone, or will not give them.
    """
    pid = find(directory)
    if pid is None:
        raise ShimError(
            f"could not start container '{directory.name}': the process that holds its streams is gone; "
            "delete it, and create it again"
        )
    saved = [os.dup(number) for number in range(3)]
    try:
        for number, theirs in enumerate(_take(pid)):
            os.dup2(theirs, number)
            os.close(theirs)
        yield
    finally:
        for number, ours in enumerate(saved):
            os.dup2(ours, number)
            os.close(ours)


def _take(pid: int) -> list[int]:
    """Copies of a process's descriptors 0 to 2. Raises ShimError."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        found = [int(libc.syscall(_PIDFD_GETFD, process, number, 0)) for number in range(3)]
        error = ctypes.get_errno()
    finally:
        os.close(process)
    if min(found) < 0:
        for number in found:
            if number >= 0:
                os.close(number)
        raise ShimError(f"could not take the streams of process {pid}: {os.strerror(error)}; start it again")
    return found


def go(directory: Path) -> None:
    """Tell the attendant that the container runs. Nothing if it is gone: then its caller knows already."""
    deadline = time.monotonic() + _READY_S
    while find(directory) and time.monotonic() < deadline:
        try:
            descriptor = os.open(directory / _GO, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # it has not come that far
            time.sleep(0.005)
            continue
        with contextlib.suppress(OSError):
            os.write(descriptor, b"go\n")
        os.close(descriptor)
        break
    (directory / state.HELD).unlink(missing_ok=True)


def end(directory: Path, number: int = signal.SIGKILL) -> None:
    """Send the attendant a signal, if it lives, and what works for it."""
    pid = find(directory)
    if pid is not None:
        _kill(pid, number)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
