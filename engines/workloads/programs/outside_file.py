"""A descriptor of a file outside the container, inherited at its start."""

import sys

sys.path.insert(0, "/workloads")
import os

from common import run, same


def setup():
    size = os.fstat(2).st_size
    return lambda: same(os.fstat(2).st_size, size, "the file")


run(setup)
