"""Taking back a root file system difference, so that a container can still start cold.

An overlay does not notice what is changed behind its back, so the changes are removed from the upper
directory while the overlay is unmounted, and then it is mounted again as it was. A copy of what the upper
directory held lies beside it: there may be more of it than the node has memory, and what a file system can
share it does not copy. A record in the container's state says how far all that is, for whoever comes after a
call that was killed. A copy without one, as a node that was switched off leaves it, may be all that there is
of what the directory held: it is never removed, and nothing is restored there until somebody has looked.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from engines.api import ImageError
from engines.mountinfo import unescaped
from shim.images.mounts import mount_at
from shim.images.rootfs import RootfsView
from shim.images.seal import cause_of

_FLAGS = {
    "ro": 1,
    "nosuid": 2,
    "nodev": 4,
    "noexec": 8,
    "sync": 16,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
    "strictatime": 1 << 24,
}
_NOT_OPTIONS = {"rw", "ro", "seclabel"}  # shown by the kernel, not understood by the file system

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class _Record:
    """What is known of the copy of an upper directory.

    step: `copying` (the copy is not whole, or is not any more), `kept` (it is whole), `wiping` (the overlay
    is unmounted, its upper directory is emptied), `moving` (the copy goes back into it). root: where the
    overlay was mounted. backup: path of the copy, of a name that no other has. source, options,
    super_options: of that mount. mount_again: whether it was still mounted when it was taken back.
    """

    step: Literal["copying", "kept", "wiping", "moving"]
    root: str
    upper: str
    backup: str
    source: str
    options: Sequence[str]
    super_options: Sequence[str]
    mount_again: bool = False


def save_upper(view: RootfsView, record_path: Path, *, timeout_s: float) -> None:
    """Keep a copy of the upper directory of a container that has not run yet.

    record_path: a file of the container's state. timeout_s: of copying, seconds.
    Raises ImageError; then, and after a call that was killed, `undo_apply` removes what there is.
    """
    if view.upper_path is None or view.mount is None:
        return
    upper, prefix = view.upper_path, f".torpor-{view.upper_path.name}"
    backup = upper.with_name(f"{prefix}-{secrets.token_hex(8)}")
    record = _Record(
        step="copying",
        root=str(view.path),
        upper=str(upper),
        backup=str(backup),
        source=view.mount.source,
        options=view.mount.options,
        super_options=view.mount.super_options,
    )
    what = f"could not keep a copy of upper directory '{upper}'"
    try:
        _write(record_path, record)
        backup.mkdir(mode=0o700)
        for other in upper.parent.iterdir():  # only now: of two calls at once each sees the other's
            if other != backup and other.name.rpartition("-")[0] == prefix:
                raise ImageError(
                    f"{what}: '{other}' is another restore's, so the directory may be half changed; delete "
                    "the container of that restore, or, if there is none any more, make the directory what "
                    "it was and remove the copy",
                    after="stopped",
                    undone=False,  # nor is it fit for a cold start
                )
        with _locked(backup) as lock:
            _copy(upper, backup, timeout_s=timeout_s, lock=lock)
        _write(record_path, replace(record, step="kept"))
    except (OSError, subprocess.SubprocessError) as error:
        raise ImageError(f"{what}: {_cause(error)}", after="stopped") from error


def undo_apply(record_path: Path) -> None:
    """Make the root file system what it was at `save_upper`, and remove the copy.

    Nothing happens without a record. Called again after it was killed, it ends the same. An overlay that its
    caller has unmounted stays so. Raises ImageError if it cannot: then the container must not start.
    """
    record = _read(record_path)
    if record is None:
        return
    what = f"could not undo the changes in upper directory '{record.upper}'"
    try:
        if record.step != "copying" and Path(record.upper).is_dir():  # its caller may have removed it all
            if not Path(record.backup).is_dir():
                raise ImageError(
                    f"{what}: its copy '{record.backup}' is gone; make the root file system anew and remove "
                    f"'{record_path}'",
                    after="stopped",
                )
            _put_back(record_path, record)
    except (OSError, subprocess.SubprocessError) as error:
        raise ImageError(
            f"{what}: {_cause(error)}; what it held is in '{record.backup}'; delete the container",
            after="stopped",
        ) from error
    forget(record_path)


def forget(record_path: Path) -> None:
    """Remove the copy and its record, if there are any. Raises ImageError."""
    record = _read(record_path)
    if record is None:
        return
    backup = Path(record.backup)
    try:
        _write(record_path, replace(record, step="copying"))  # half of it must never be put back
        if backup.exists():
            with _locked(backup):
                shutil.rmtree(backup)
        record_path.unlink()
    except OSError as error:
        raise ImageError(
            f"could not remove the copy '{backup}' of an upper directory: {cause_of(error)}; delete the "
            "container",
            after="stopped",
        ) from error


def _put_back(record_path: Path, record: _Record) -> None:
    mounted = _is_mounted(record)
    step = "wiping" if record.step == "kept" else record.step
    record = replace(record, step=step, mount_again=record.mount_again or mounted)
    _write(record_path, record)
    if mounted:
        _call("umount2", os.fsencode(record.root), ctypes.c_int(0))
    if record.step == "wiping":
        for entry in list(os.scandir(record.upper)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                Path(entry.path).unlink()
        record = replace(record, step="moving")
        _write(record_path, record)
    for entry in list(os.scandir(record.backup)):
        Path(entry.path).rename(Path(record.upper, entry.name))
    _copy(record.backup, record.upper)  # it is empty: owner, mode, times and attributes of the top
    if record.mount_again and Path(record.root).is_dir():
        there = mount_at(Path(record.root))
        if there is None or there.kind != "overlay":  # else a new one of the caller's
            _mount_again(record)


def _is_mounted(record: _Record) -> bool:
    mount = mount_at(Path(record.root))
    uppers = [option for option in record.super_options if option.startswith("upperdir=")]
    return mount is not None and mount.kind == "overlay" and set(uppers) <= set(mount.super_options)


def _read(record_path: Path) -> _Record | None:
    try:
        return _Record(**json.loads(record_path.read_bytes()))
    except FileNotFoundError:
        return None
    except (TypeError, ValueError):
        raise ImageError(
            f"could not read '{record_path}', which tells of the copy of an upper directory: it is damaged; "
            "make the root file system anew and remove the file",
            after="stopped",
        ) from None


def _write(record_path: Path, record: _Record) -> None:
    """Replace the record at once. It may name what is no text, which only this kind of JSON can."""
    temporary = record_path.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(record)))
    temporary.replace(record_path)


@contextlib.contextmanager
def _locked(backup: Path) -> Generator[int]:
    """Wait for the `cp` of a call that was killed, which dies a moment after it. Yields a descriptor."""
    descriptor = os.open(backup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _copy(
    source: str | Path, destination: str | Path, *, timeout_s: float | None = None, lock: int | None = None
) -> None:
    """Everything below, with owners, modes, times, links, whiteouts and attributes; shutil loses some.

    lock: a descriptor that stays open for as long as it copies, which is no longer than its caller lives.
    """
    # Not by a function of ours in the child: that forks whatever threads and libraries the caller has.
    words = () if lock is None else ("setpriv", "--pdeathsig", "KILL")
    words += ("cp", "--archive", "--reflink=auto", "--no-target-directory", "--")
    subprocess.run(
        (*words, str(source), str(destination)),
        check=True,
        capture_output=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "LC_ALL": "C"},
        pass_fds=() if lock is None else (lock,),
    )


def _mount_again(record: _Record) -> None:
    options: list[str] = []
    base = Path("/")
    for option in record.super_options:
        key, equals, value = option.partition("=")
        if key in _NOT_OPTIONS:
            continue
        plain = unescaped(value)
        if key == "lowerdir" and not plain.startswith("/"):
            first = plain.split(":")[0]
            base = next((up for up in Path(record.upper).parents if (up / first).is_dir()), base)
        if key == "workdir":
            # An overlay that syncs nothing leaves a mark there, beside which the kernel mounts none again.
            shutil.rmtree(Path(plain, "work", "incompat", "volatile"), ignore_errors=True)
        options.append(key + equals + plain.replace(",", "\\,"))
    flags = 0
    for word in record.options:
        flags |= _FLAGS.get(word, 0)
    old = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(base)  # layers may be named relative to a directory, to keep the options short
        _call(
            "mount",
            os.fsencode(record.source),
            os.fsencode(record.root),
            b"overlay",
            ctypes.c_ulong(flags),
            os.fsencode(",".join(options)),
        )
    finally:
        os.fchdir(old)
        os.close(old)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _cause(error: Exception) -> str:
    if isinstance(error, OSError):
        return cause_of(error)
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took longer than {error.timeout:g} s; set a longer restore_timeout_s"
    output = os.fsdecode(getattr(error, "stderr", None) or b"").strip()
    text = output.partition("\n")[0] or str(error)  # it goes on, and says the same of each file
    return (
        f"{text}; free some space" if text.endswith(("No space left on device", "quota exceeded")) else text
    )
