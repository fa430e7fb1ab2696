"""timerfd (fast, slow, absolute), interval timers, alarm, and a monotonic clock that never goes back."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import os
import select
import signal
import struct
import time

from common import check, eventually, run

LIBC = ctypes.CDLL(None, use_errno=True)
TFD_NONBLOCK = os.O_NONBLOCK


def timerfd(first_s, every_s):
    descriptor = LIBC.timerfd_create(time.CLOCK_MONOTONIC, TFD_NONBLOCK)
    check(descriptor >= 0, "timerfd_create failed")

    def parts(seconds):
        return int(seconds), int(seconds % 1 * 1e9)

    spec = struct.pack("4q", *parts(every_s), *parts(first_s))
    check(LIBC.timerfd_settime(descriptor, 0, spec, None) == 0, "timerfd_settime failed")
    return descriptor


def ticks(descriptor):
    return struct.unpack("Q", os.read(descriptor, 8))[0]


def setup():
    seen = {"real": 0, "alarm": 0, "virtual": 0}
    signal.signal(signal.SIGVTALRM, lambda *_: seen.update(virtual=seen["virtual"] + 1))
    signal.signal(signal.SIGALRM, lambda *_: seen.update(alarm=seen["alarm"] + 1))
    fast, slow, once = timerfd(0.002, 0.002), timerfd(0.5, 0.5), timerfd(1.5, 0)
    never = timerfd(10_000, 0)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.01, 0.01)
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    poll = select.epoll()
    poll.register(fast, select.EPOLLIN)
    before = time.monotonic()

    def verify():
        check(time.monotonic() >= before, "the monotonic clock went back")
        for _ in range(5):  # not only once: it must stay periodic
            check(poll.poll(2), "the fast timer stands still")
            check(ticks(fast) > 0, "no tick of the fast timer")
        check(select.select([slow], [], [], 5)[0], "the slow timer stands still")
        ticks(slow)
        check(select.select([slow], [], [], 5)[0], "the slow timer went off only once")
        check(select.select([once], [], [], 5)[0], "the single timer is lost")
        check(not select.select([never], [], [], 0)[0], "a timer went off much too early")
        eventually(lambda: seen["alarm"] > 0, "SIGALRM of a single alarm")
        check(seen["alarm"] == 1, f"a single alarm went off {seen['alarm']} times")
        count = seen["virtual"]
        deadline = time.monotonic() + 5
        while seen["virtual"] <= count + 2:
            check(time.monotonic() < deadline, "the timer of processor time stands still")

    return verify


run(setup)
