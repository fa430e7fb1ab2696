"""A pipe in packet mode (O_DIRECT)."""

import sys

sys.path.insert(0, "/workloads")
import os

from common import run, same


def setup():
    reader, writer = os.pipe2(os.O_DIRECT)
    os.write(writer, b"first")
    os.write(writer, b"second")

    def verify():
        same([os.read(reader, 100), os.read(reader, 100)], [b"first", b"second"], "packets")

    return verify


run(setup)
