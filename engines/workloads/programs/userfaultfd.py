"""A userfaultfd, with which a program serves its own page faults."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import os
import struct

from common import Absent, check, run

LIBC = ctypes.CDLL(None, use_errno=True)
SYSCALL = {"x86_64": 323, "aarch64": 282}.get(os.uname().machine, -1)


def setup():
    descriptor = LIBC.syscall(SYSCALL, os.O_CLOEXEC | 1)
    if descriptor < 0:
        raise Absent(f"no userfaultfd: {os.strerror(ctypes.get_errno())}")

    def verify():
        import fcntl

        answer = fcntl.ioctl(descriptor, 0xC018AA3F, struct.pack("3Q", 0xAA, 0, 0))
        check(struct.unpack("3Q", answer)[0] == 0xAA, "the descriptor is broken")

    return verify


run(setup)
