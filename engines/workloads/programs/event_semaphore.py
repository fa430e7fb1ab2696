"""An eventfd that counts down by one at each read (EFD_SEMAPHORE)."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import os
import struct

from common import run, same


def setup():
    semaphore = ctypes.CDLL(None).eventfd(3, os.O_NONBLOCK | 1)
    return lambda: same([struct.unpack("Q", os.read(semaphore, 8))[0] for _ in range(3)], [1, 1, 1], "reads")


run(setup)
