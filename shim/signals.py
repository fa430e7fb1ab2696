"""One signal is enough: the first one ends a call in order, and no other disturbs its undoing."""

from __future__ import annotations

import signal

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_once() -> None:
    """From now on the first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt, others do nothing."""
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: object) -> None:
    del frame
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt(number)
