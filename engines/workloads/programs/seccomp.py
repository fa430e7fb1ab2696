"""A seccomp filter that answers mkdir with an error of its own."""

import sys

sys.path.insert(0, "/workloads")
import os

from common import check, run, same

ENOTNAM = 118


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
    check(refused() == ENOTNAM, "the filter is not there")
    before = mode()

    def verify():
        same(refused(), ENOTNAM, "the filter's answer")
        same(mode(), before, "the filter's mode")

    return verify


run(setup)
