"""The container's own terminal (process.terminal), its window size and settings."""

import sys

sys.path.insert(0, "/workloads")
import os
import termios

from common import check, run, same


def setup():
    settings = termios.tcgetattr(0)
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(0, termios.TCSANOW, settings)
    group = os.tcgetpgrp(0)

    def verify():
        check(os.isatty(0) and os.isatty(1), "standard streams are no terminal")
        same(termios.tcgetattr(0)[3], settings[3], "terminal settings")
        same(os.tcgetpgrp(0), group, "foreground process group")

    return verify


run(setup)
