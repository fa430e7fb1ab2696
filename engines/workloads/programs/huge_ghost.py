"""A deleted open file of 300 MiB."""

import sys

sys.path.insert(0, "/workloads")
import os

from common import run, same


def setup():
    file = open("/tmp/ghost", "w+b", buffering=0)
    block = os.urandom(1 << 20)
    for _ in range(300):
        file.write(block)
    os.unlink("/tmp/ghost")
    return lambda: same(os.pread(file.fileno(), 1 << 20, 299 << 20), block, "its last mebibyte")


run(setup)
