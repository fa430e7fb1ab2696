"""Pseudo terminals: settings, window size, content under way, a session with a controlling terminal."""

import sys

sys.path.insert(0, "/workloads")
import fcntl
import os
import struct
import termios

from common import run, same


def setup():
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    settings = termios.tcgetattr(slave)
    settings[3] &= ~termios.ECHO & ~termios.ICANON
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    child = os.fork()
    if child == 0:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        while True:
            word = os.read(slave, 100)
            os.write(slave, b"%d:" % os.tcgetpgrp(slave) + word)

    def verify():
        size = struct.unpack("HHHH", fcntl.ioctl(slave, termios.TIOCGWINSZ, bytes(8)))[:2]
        same(size, (33, 101), "window size")
        same(termios.tcgetattr(slave)[3], settings[3], "terminal settings")
        os.write(master, b"hello")
        same(os.read(master, 100), b"%d:hello" % child, "the other side's answer")
        same(os.ttyname(slave)[:9], "/dev/pts/", "name of the terminal")

    return verify


run(setup)
