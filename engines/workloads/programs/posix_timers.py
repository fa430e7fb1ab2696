"""POSIX timers of the kernel (timer_create) that send signals to a thread and carry a value."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import signal
import struct

from common import check, eventually, run

LIBC = ctypes.CDLL(None, use_errno=True)
CLOCK_MONOTONIC = 1


def setup():
    seen = []
    number = signal.SIGRTMIN + 3
    signal.signal(number, lambda *_: seen.append(1))
    # struct sigevent: value, signal number, SIGEV_SIGNAL = 0
    event = struct.pack("qii48x", 4711, number, 0)
    timer = ctypes.c_void_p()
    check(LIBC.timer_create(CLOCK_MONOTONIC, event, ctypes.byref(timer)) == 0, "timer_create failed")
    spec = struct.pack("4q", 0, 50_000_000, 0, 50_000_000)
    check(LIBC.timer_settime(timer, 0, spec, None) == 0, "timer_settime failed")
    eventually(lambda: seen, "the timer goes off")

    def verify():
        count = len(seen)
        eventually(lambda: len(seen) > count + 2, "the timer goes on")
        found = ctypes.create_string_buffer(32)
        check(LIBC.timer_gettime(timer, found) == 0, "the timer is gone")
        check(struct.unpack("4q", found.raw)[1] == 50_000_000, "its interval changed")

    return verify


run(setup)
