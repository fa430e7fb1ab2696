"""A performance counter of the kernel."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import os
import struct

from common import Absent, check, run

LIBC = ctypes.CDLL(None, use_errno=True)
SYSCALL = {"x86_64": 298, "aarch64": 241}.get(os.uname().machine, -1)


def setup():
    attributes = ctypes.create_string_buffer(struct.pack("IIQ", 1, 112, 1), 112)
    flags = ctypes.c_ulong(1 << 5 | 1 << 6)
    ctypes.memmove(ctypes.addressof(attributes) + 40, ctypes.byref(flags), 8)
    descriptor = LIBC.syscall(SYSCALL, attributes, 0, -1, -1, 0)
    if descriptor < 0:
        raise Absent(f"no performance counters: {os.strerror(ctypes.get_errno())}")
    return lambda: check(len(os.read(descriptor, 8)) == 8, "the counter is broken")


run(setup)
