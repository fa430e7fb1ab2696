"""Signals that are blocked and pending (of the process, of a thread, queued with values), and handlers."""

import sys

sys.path.insert(0, "/workloads")
import os
import signal
import threading

from common import check, run, same


def setup():
    caught = []
    for number in (signal.SIGUSR2, signal.SIGHUP, signal.SIGRTMIN + 1):
        signal.signal(number, lambda number, _: caught.append(number))
    signal.signal(signal.SIGWINCH, signal.SIG_IGN)
    queued = signal.SIGRTMIN + 2
    blocked = {signal.SIGUSR2, signal.SIGHUP, signal.SIGRTMIN + 1, queued}
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    os.kill(os.getpid(), signal.SIGUSR2)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGHUP)
    for _ in range(3):
        os.kill(os.getpid(), queued)
    alternate = signal.getsignal(signal.SIGINT)

    def verify():
        pending = signal.sigpending()
        check({signal.SIGUSR2, signal.SIGHUP, queued} <= pending, f"pending signals: {pending}")
        check(blocked <= signal.pthread_sigmask(signal.SIG_BLOCK, []), "the mask of blocked signals")
        count = 0
        while signal.sigtimedwait([queued], 0):
            count += 1
        same(count, 3, "queued signals")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        same(sorted(caught), sorted([signal.SIGUSR2, signal.SIGHUP]), "signals that were caught")
        same(signal.getsignal(signal.SIGINT), alternate, "a handler")
        os.kill(os.getpid(), signal.SIGRTMIN + 1)
        check(signal.SIGRTMIN + 1 in caught, "a new signal")

    return verify


run(setup)
