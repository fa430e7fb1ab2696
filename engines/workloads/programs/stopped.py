"""A child that was stopped on purpose (SIGSTOP)."""

import sys

sys.path.insert(0, "/workloads")
import os
import signal
import time

from common import eventually, run


def state(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(") ")[2].split()[0]


def setup():
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(0.01)
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)

    def verify():
        # Its stop is a signal to it, which it meets when it is its turn.
        eventually(lambda: state(child) == "T", "the child is stopped")
        os.kill(child, signal.SIGCONT)
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)

    return verify


run(setup)
