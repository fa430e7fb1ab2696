"""Resource limits, nice value, umask, name, parent-death signal."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import os
import resource

from common import run, same

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_GET_PDEATHSIG, PR_SET_NAME, PR_GET_NAME, PR_SET_CHILD_SUBREAPER = 1, 2, 15, 16, 36


def setup():
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (4 << 20, resource.RLIM_INFINITY))
    nice = os.nice(5)
    os.umask(0o027)
    LIBC.prctl(PR_SET_NAME, b"renamed")
    LIBC.prctl(PR_SET_PDEATHSIG, 12)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")

    def verify():
        same(resource.getrlimit(resource.RLIMIT_NOFILE), (200, 300), "RLIMIT_NOFILE")
        same(resource.getrlimit(resource.RLIMIT_CORE), (0, 0), "RLIMIT_CORE")
        same(resource.getrlimit(resource.RLIMIT_STACK)[0], 4 << 20, "RLIMIT_STACK")
        same(os.nice(0), nice, "nice value")
        same(os.umask(0o027), 0o027, "umask")
        name = ctypes.create_string_buffer(16)
        LIBC.prctl(PR_GET_NAME, name)
        same(name.value, b"renamed", "name of the thread")
        number = ctypes.c_int()
        LIBC.prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
        same(number.value, 12, "parent-death signal")
        with open("/proc/self/oom_score_adj") as file:
            same(int(file.read()), 500, "oom_score_adj")

    return verify


run(setup)
