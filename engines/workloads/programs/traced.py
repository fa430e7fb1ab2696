"""A child under a debugger (ptrace)."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import os
import time

from common import Absent, check, run

LIBC = ctypes.CDLL(None, use_errno=True)


def setup():
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(0.01)
    if LIBC.ptrace(0x4206, child, None, None):
        raise Absent(f"no debugging here: {os.strerror(ctypes.get_errno())}")

    def verify():
        with open(f"/proc/{child}/status") as file:
            tracer = next(line.split()[1] for line in file if line.startswith("TracerPid"))
        check(tracer == str(os.getpid()), "nobody debugs the child")

    return verify


run(setup)
