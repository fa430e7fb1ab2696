"""A seccomp filter that answers mkdir with an error of its own."""

import sys

sys.path.insert(0, "/workloads")
import errno
import os

from common import check, run, same

# The first is what the spec wants; a runtime that knows no errnoRet gives the second.
ANSWERS = (118, errno.EPERM)


def refused():
    try:
        os.mkdir("/tmp/forbidden")
    except OSError as error:
        return error.errno
    os.rmdir("/tmp/forbidden")
    return 0


def mode():
    with open("/proc/self/status") as file:
        return [line.split()[1] for line in file if line.startswith("Seccomp")]


def setup():
    answer = refused()
    check(answer in ANSWERS, "the filter is not there")
    before = mode()

    def verify():
        same(refused(), answer, "the filter's answer")
        same(mode(), before, "the filter's mode")

    return verify


run(setup)
