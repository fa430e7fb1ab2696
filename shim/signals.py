"""One signal is enough: the first one ends a call in order, and no other disturbs its undoing.

A signal that comes when there is nothing left to undo changes nothing: the call is carried through.
"""

from __future__ import annotations

import signal

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


def _end(number: int, frame: object) -> None:
    del frame
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)
    raise Ended(number)
