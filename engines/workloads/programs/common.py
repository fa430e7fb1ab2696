"""What all programs here share: set something up, say `ready`, and when asked tell whether all is as it was.

A program calls `run(setup)`. `setup` makes the state and returns `verify`, which raises when something is
not as it was. SIGUSR1 asks, once: the answer is `ok`, or `bad: WHY`. What the machine cannot give is
`absent: WHY`. In between the program prints `tick N`, so that one sees it run. Standard library only.
"""

import errno
import os
import signal
import sys
import time

_TICK_S = 0.02
# How a kernel says that it has no such thing.
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)


class Absent(Exception):
    """This machine lacks what the program needs."""


class Asked:
    """Whether somebody asked."""

    now = False


def say(*words):
    """Print one line at once: in one write, so that what a signal handler prints is not in its middle."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def check(condition, why):
    """Raise unless the condition holds."""
    if not condition:
        raise AssertionError(why)


def same(found, wanted, what):
    """Raise unless two values are the same."""
    check(found == wanted, f"{what}: {found!r} instead of {wanted!r}")


def eventually(condition, why, timeout_s=20.0):
    """Wait until the condition holds; raise after timeout_s seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        check(time.monotonic() < deadline, f"not within {timeout_s} s: {why}")
        time.sleep(0.005)


def run(setup):
    """Run a program; never returns."""
    signal.signal(signal.SIGUSR1, lambda *_: setattr(Asked, "now", True))
    try:
        verify = setup()
    except Absent as reason:
        say("absent:", reason)
        sys.exit(0)
    except BaseException as failure:
        if isinstance(failure, OSError) and failure.errno in _UNKNOWN:
            say(f"absent: this kernel does not have it: {failure}")
            sys.exit(0)
        say(f"bad: could not set up: {type(failure).__name__}: {failure}")
        os._exit(1)
    say("ready")
    tick = 0
    while True:
        tick += 1
        say("tick", tick)
        deadline = time.monotonic() + _TICK_S
        while not Asked.now and time.monotonic() < deadline:
            time.sleep(_TICK_S / 4)
        if Asked.now:
            Asked.now = False
            try:
                verify()
            except BaseException as failure:
                say("bad:", " ".join(f"{type(failure).__name__}: {failure}".split()))
            else:
                say("ok")
