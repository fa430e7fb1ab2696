"""Starts a program exactly as asked, the environment to the byte, and reads what the recorder wrote down."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

EXIT_STATUS = 42

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One start of the recorder: exit status (negative: the signal), whether the process stayed the same,
    the raw argv and environment, and everything else it saw, one fact a line."""

    status: int
    same_process: bool
    argv: list[bytes]
    environment: list[bytes]
    facts: bytes


def build_recorder(path: Path) -> Path:
    """Compile the recorder to `path`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the recorder needs a C compiler; ./run test installs one"
    source = Path(__file__).with_name("recorder.c")
    subprocess.run([compiler, "-O1", "-w", "-o", str(path), str(source)], check=True)
    return path


def start(
    program: Path, argv: Sequence[bytes], environment: Sequence[bytes], prepare: Callable[[], object]
) -> tuple[int, int]:
    """Fork, run `prepare` in the child, then execve with exactly these blocks. Returns (pid, exit status)."""
    words = (ctypes.c_char_p * (len(argv) + 1))(*argv, None)
    entries = (ctypes.c_char_p * (len(environment) + 1))(*environment, None)
    path = os.fsencode(program)
    pid = os.fork()
    if pid == 0:
        try:
            prepare()
            _LIBC.execve(path, words, entries)
        finally:
            os._exit(99)
    _, status = os.waitpid(pid, 0)
    return pid, os.waitstatus_to_exitcode(status)


def record(
    program: Path,
    recorder: Path,
    argv: Sequence[bytes],
    environment: Sequence[bytes],
    prepare: Callable[[], object] = lambda: None,
) -> Record:
    """Start `program`, which must end up as `recorder`, and return what that saw."""
    path = recorder.with_name(recorder.name + ".record")
    path.unlink(missing_ok=True)
    pid, status = start(program, argv, environment, prepare)
    data = path.read_bytes()
    cmdline, data = _block(data, b"cmdline")
    environ, data = _block(data, b"environ")
    facts, _, own_pid = data.rpartition(b"pid ")
    return Record(
        status=status,
        same_process=int(own_pid) == pid,
        argv=cmdline.split(b"\0")[:-1],
        environment=environ.split(b"\0")[:-1],
        # A process group or session of its own bears the process's number, as a limit may by chance.
        facts=re.sub(rb"^(NS\w+:.*\t)%d$" % pid, rb"\1SELF", facts, flags=re.MULTILINE),
    )


def _block(data: bytes, name: bytes) -> tuple[bytes, bytes]:
    found, length, rest = data.split(b" ", 2)
    assert found == name
    return rest[: int(length)], rest[int(length) + 1 :]
