"""Where a call tells what happened: the caller's log, stderr, and the audit log of the node."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

AUDIT_MAX_BYTES = 16 << 20
N_KEPT_LOGS = 50


def now() -> str:
    """The time in RFC 3339, UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def runtime_error(message: str, *, log_path: str, log_format: str) -> None:
    """Report a failed OCI verb as runc does: one entry in the caller's log, the same text on stderr.

    Callers decode the whole log file as a stream of JSON objects and take the last error, so one entry is
    written with one `write`, appended, and nothing else ever.
    """
    message = " ".join(message.split())
    if log_path:
        entry = {"level": "error", "msg": message, "time": now()}
        line = json.dumps(entry) if log_format == "json" else f'time="{now()}" level=error msg={message!r}'
        with contextlib.suppress(OSError):
            descriptor = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
            try:
                os.write(descriptor, line.encode("utf-8", "surrogateescape") + b"\n")
            finally:
                os.close(descriptor)
    with contextlib.suppress(OSError):
        os.write(2, f"torpor: {message}\n".encode("utf-8", "surrogateescape"))


def _caller() -> dict[str, object]:
    parent = os.getppid()
    try:
        name = Path(f"/proc/{parent}/comm").read_text(errors="replace").strip()
    except OSError:
        name = "unknown"
    return {"uid": os.getuid(), "pid": parent, "program": name}


def audit(store_path: Path, event: str, **fields: object) -> None:
    """Append one JSON line to the node's audit log: who, what, which image, with what verdict.

    Never raises: a full disk must not stop a container. The file is turned over once at 16 MiB.
    """
    entry = {"time": now(), "event": event, "who": _caller(), **fields}
    path = store_path / "audit.log"
    with contextlib.suppress(OSError):
        if not store_path.is_dir():
            store_path.parent.mkdir(parents=True, exist_ok=True)
            store_path.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_size > AUDIT_MAX_BYTES:
                path.replace(path.with_suffix(".log.1"))
            os.write(descriptor, json.dumps(entry, default=str).encode() + b"\n")
        finally:
            os.close(descriptor)


def keep(error: BaseException, state_path: Path, container_id: str) -> None:
    """Move the log of a failed engine call to where it outlives the container, and name that place instead.

    The newest 50 are kept, below `failed/` of the state directory.
    """
    from engines.api import EngineError  # not above: the hot path, too, tells its errors here

    if not isinstance(error, EngineError) or error.log_path is None or not error.log_path.is_file():
        return
    directory = state_path / "failed"
    kept = directory / f"{container_id}.{error.log_path.name}"
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(error.log_path, kept)
        error.args = (str(error).replace(str(error.log_path), str(kept)),)
        error.log_path = kept
        for old in sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-N_KEPT_LOGS]:
            old.unlink()


def internal_error(error: BaseException, state_path: Path) -> str:
    """Keep the traceback of a defect of torpor in a file, and return the sentence for the user."""
    import traceback

    path = state_path / "last-defect.txt"
    try:
        state_path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(f"{now()} {' '.join(sys.argv)}\n{''.join(traceback.format_exception(error))}")
        where = f" (traceback: {path})"
    except OSError:
        where = ""
    return f"internal error, a defect of torpor: {type(error).__name__}: {error}{where}; please report it"
