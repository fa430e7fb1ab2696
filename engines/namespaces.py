"""Does something in a namespace of another container."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

T = TypeVar("T")
Kind = Literal["mnt", "net", "uts"]

_FLAGS: dict[Kind, int] = {"mnt": 0x20000, "net": 0x40000000, "uts": 0x4000000}  # CLONE_NEW... of sched.h
_CLONE_FS = 0x200


def inside(kind: Kind, path: Path, do: Callable[[], T]) -> T:
    """What `do` returns in a namespace. path: of the namespace. Raises OSError, and what `do` raises.

    A thread of its own joins the namespace and ends there: the caller's never changes.
    """
    # Loaded where they are needed: few starts of a container come here.
    import ctypes
    import threading

    results: list[T] = []
    failures: list[BaseException] = []

    def join() -> None:
        libc = ctypes.CDLL(None, use_errno=True)

        def call(status: int) -> None:
            if status:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(path))

        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if kind == "mnt":  # which the kernel refuses to a thread that shares its directory
                    call(libc.unshare(_CLONE_FS))
                call(libc.setns(descriptor, _FLAGS[kind]))
            finally:
                os.close(descriptor)
            results.append(do())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=join)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
