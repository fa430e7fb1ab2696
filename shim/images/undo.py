"""Taking back a root file system difference, so that a container can still start cold.

An overlay does not notice what is changed behind its back, so the changes are removed from the upper
directory while the overlay is unmounted, and then it is mounted again as it was. A copy of what the upper
directory held lies beside it: there may be more of it than the node has memory, and what a file system can
share it does not copy. A record in the container's state says how far all that is, for whoever comes after a
call that was killed. What a node that was switched off left goes with the caller's own directory, or when
something is restored there again.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
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
    overlay is mounted, None if it is not to be mounted again. source, options, super_options: of that mount.
    """

    step: Literal["copying", "kept", "wiping", "moving"]
    root: str | None
    upper: str
    source: str
    options: Sequence[str]
    super_options: Sequence[str]

    @property
    def backup_path(self) -> Path:
        upper = Path(self.upper)
        return upper.with_name(f".torpor-{upper.name}")


def save_upper(view: RootfsView, record_path: Path, *, timeout_s: float) -> None:
    """Keep a copy of the upper directory of a container that has not run yet.

    record_path: a file of the container's state. timeout_s: of copying, seconds.
    Raises ImageError; then, and after a call that was killed, `undo_apply` removes what there is.
    """
    if view.upper_path is None or view.mount is None:
        return
    record = _Record(
        step="copying",
        root=str(view.path),
        upper=str(view.upper_path),
        source=view.mount.source,
        options=view.mount.options,
        super_options=view.mount.super_options,
    )
    try:
        _write(record_path, record)
        shutil.rmtree(record.backup_path, ignore_errors=True)
        words = ("du", "--summarize", "--block-size=1", "--", record.upper)
        n_bytes = int(_run(*words, timeout_s=timeout_s).split()[0])
        n_free = shutil.disk_usage(record.upper).free
        if n_bytes > n_free:
            raise ImageError(
                f"could not keep a copy of upper directory '{record.upper}': it holds {n_bytes} bytes and "
                f"{n_free} are free beside it; free some space",
                after="stopped",
            )
        record.backup_path.mkdir(mode=0o700)
        _copy(record.upper, record.backup_path, timeout_s=timeout_s)
        _write(record_path, replace(record, step="kept"))
    except (OSError, subprocess.SubprocessError) as error:
        raise ImageError(
            f"could not keep a copy of upper directory '{record.upper}': {_cause(error)}", after="stopped"
        ) from error


def undo_apply(record_path: Path) -> None:
    """Make the root file system what it was at `save_upper`, and remove the copy.

    Nothing happens without a record. Called again after it was killed, it ends the same. An overlay that its
    caller has unmounted stays so. Raises ImageError if it cannot: then the container must not start.
    """
    record = _read(record_path)
    if record is None:
        return
    try:
        # Its caller may have removed it all, or the copy be gone as another one was made.
        if record.step != "copying" and Path(record.upper).is_dir() and record.backup_path.is_dir():
            _put_back(record_path, record)
        forget(record_path)
    except (OSError, subprocess.SubprocessError) as error:
        raise ImageError(
            f"could not undo the changes in upper directory '{record.upper}': {_cause(error)}; what it held "
            f"is in '{record.backup_path}'; delete the container",
            after="stopped",
        ) from error


def forget(record_path: Path) -> None:
    """Remove the copy and its record, if there are any. Raises OSError."""
    record = _read(record_path)
    if record is None:
        return
    _write(record_path, replace(record, step="copying"))  # half of it must never be put back
    shutil.rmtree(record.backup_path, ignore_errors=True)
    record_path.unlink()


def _put_back(record_path: Path, record: _Record) -> None:
    mounted = _is_mounted(record)
    if record.step == "kept":
        record = replace(record, step="wiping", root=record.root if mounted else None)
        _write(record_path, record)
    if mounted and record.root is not None:
        _call("umount2", os.fsencode(record.root), ctypes.c_int(0))
    if record.step == "wiping":
        for entry in list(os.scandir(record.upper)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                Path(entry.path).unlink()
        record = replace(record, step="moving")
        _write(record_path, record)
    for entry in list(os.scandir(record.backup_path)):
        Path(entry.path).rename(Path(record.upper, entry.name))
    _copy(record.backup_path, record.upper)  # it is empty: owner, mode, times and attributes of the top
    if record.root is not None and Path(record.root).is_dir():
        there = mount_at(Path(record.root))
        if there is None or there.kind != "overlay":  # else a new one of the caller's
            _mount_again(record, record.root)


def _is_mounted(record: _Record) -> bool:
    mount = mount_at(Path(record.root)) if record.root is not None else None
    uppers = [option for option in record.super_options if option.startswith("upperdir=")]
    return mount is not None and mount.kind == "overlay" and set(uppers) <= set(mount.super_options)


def _read(record_path: Path) -> _Record | None:
    try:
        return _Record(**json.loads(record_path.read_bytes()))
    except FileNotFoundError:
        return None


def _write(record_path: Path, record: _Record) -> None:
    """Replace the record at once. It may name what is no text, which only this kind of JSON can."""
    temporary = record_path.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(record)))
    temporary.replace(record_path)


def _copy(source: str | Path, destination: str | Path, *, timeout_s: float | None = None) -> None:
    """Everything below, with owners, modes, times, links, whiteouts and attributes; shutil loses some."""
    words = ("cp", "--archive", "--reflink=auto", "--no-target-directory", "--")
    _run(*words, str(source), str(destination), timeout_s=timeout_s)


def _run(*words: str, timeout_s: float | None) -> bytes:
    return subprocess.run(
        words, check=True, capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL
    ).stdout


def _mount_again(record: _Record, root: str) -> None:
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
            os.fsencode(root),
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
    output = getattr(error, "stderr", None) or b""
    return os.fsdecode(output).strip() or str(error)
