"""A System V segment in an IPC namespace that the container shares with its node."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import os

from common import Absent, run, same

LIBC = ctypes.CDLL(None, use_errno=True)


def setup():
    LIBC.shmat.restype = ctypes.c_void_p
    segment = LIBC.shmget(0, 4096, 0o1600)
    if segment < 0:
        raise Absent(f"no System V shared memory: {os.strerror(ctypes.get_errno())}")
    address = LIBC.shmat(segment, None, 0)
    # Removed, so that nothing is left on the node when the last one lets go.
    LIBC.shmctl(segment, 0, None)
    ctypes.memmove(address, b"in a segment", 12)
    return lambda: same(ctypes.string_at(address, 12), b"in a segment", "the segment")


run(setup)
