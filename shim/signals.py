"""One signal is enough: the first one ends a call in order, and no other disturbs its undoing.

A signal that comes when there is nothing left to undo changes nothing: the call is carried through.
"""

from __future__ import annotations

import signal
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_S = 0.002


class Ended(KeyboardInterrupt):
    """A signal has ended the call. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


def end_once() -> None:
    """From now on the first SIGINT, SIGTERM or SIGHUP raises Ended, others do nothing."""
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def too_late() -> None:
    """From now on SIGINT, SIGTERM and SIGHUP do nothing."""
    for number in _ENDING:
        if signal.getsignal(number) is _end:
            # A handler of ours would be taken away again while Python ends.
            signal.signal(number, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)
    _raise(number, frame)


def _raise(number: int, frame: FrameType | None) -> None:
    if _imports(frame):
        # Python may swallow what is raised there, and keep the lock that all other threads' imports wait for.
        signal.signal(signal.SIGALRM, lambda _, later: _raise(number, later))
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        raise Ended(number)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
