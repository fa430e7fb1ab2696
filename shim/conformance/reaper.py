"""Orphans of this command are reaped at once.

runsc waits until its sandbox has left the process table, and a pid 1 that looks for zombies only now and then
keeps it waiting for seconds, at each container.
"""

from __future__ import annotations

import ctypes
import os
import signal

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def go_on_below() -> None:
    """Return in a child of this process. The process itself reaps, and ends as the child ends.

    To be called before any thread is started. Raises OSError.
    """
    child = os.fork()
    if child == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
        return
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the child as well

    def pass_on(_number: int, _frame: object) -> None:
        os.kill(child, signal.SIGINT)

    signal.signal(signal.SIGTERM, pass_on)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _prctl(option: int, argument: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")
