"""Memory that even the kernel cannot read (memfd_secret)."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import mmap
import os

from common import Absent, run, same

LIBC = ctypes.CDLL(None, use_errno=True)


def setup():
    descriptor = LIBC.syscall(447, 0)
    if descriptor < 0:
        raise Absent(f"no secret memory: {os.strerror(ctypes.get_errno())}")
    os.ftruncate(descriptor, 4096)
    memory = mmap.mmap(descriptor, 4096, flags=mmap.MAP_SHARED)
    os.close(descriptor)
    memory[:6] = b"secret"
    return lambda: same(memory[:6], b"secret", "secret memory")


run(setup)
