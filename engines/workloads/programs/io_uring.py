"""An io_uring with a mapped ring, as Node.js, PyTorch's store and many databases use one.

Usage: io_uring.py [denied]. denied: there is none, and it stays so; programs fall back to other ways then,
and so does this one.
"""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import errno
import mmap
import os

from common import Absent, check, run

LIBC = ctypes.CDLL(None, use_errno=True)
SETUP, ENTER = 425, 426


def setup():
    parameters = ctypes.create_string_buffer(120)
    ring = LIBC.syscall(SETUP, 8, parameters)
    if ring < 0:
        code = ctypes.get_errno()
        if "denied" in sys.argv:
            # The second from a runtime that does not let filters choose their errors.
            check(code in (errno.ENOSYS, errno.EPERM), f"programs may not fall back: {os.strerror(code)}")
            return lambda: check(LIBC.syscall(SETUP, 8, parameters) < 0, "io_uring came up by itself")
        raise Absent(f"no io_uring here: {os.strerror(code)}")
    area = mmap.mmap(ring, 4096, flags=mmap.MAP_SHARED)
    area[:1]

    def verify():
        check(LIBC.syscall(ENTER, ring, 0, 0, 0, None, 0) == 0, "the ring is broken")

    return verify


run(setup)
