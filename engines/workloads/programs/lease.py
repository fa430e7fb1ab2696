"""A lease on a file: its holder is told when somebody else opens it."""

import sys

sys.path.insert(0, "/workloads")
import fcntl
import os

from common import run, same


def setup():
    descriptor = os.open("/tmp/lease", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    return lambda: same(fcntl.fcntl(descriptor, fcntl.F_GETLEASE), fcntl.F_WRLCK, "the lease")


run(setup)
