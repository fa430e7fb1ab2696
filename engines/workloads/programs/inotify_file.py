"""inotify and fanotify: watches on single files of the root file system."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import os

from common import check, run

LIBC = ctypes.CDLL(None, use_errno=True)


def setup():
    os.makedirs("/opt/app/conf.d")
    for path in ("/opt/app/conf.d/settings", "/tmp/other"):
        with open(path, "w") as file:
            file.write("old")
    watcher = LIBC.inotify_init1(os.O_NONBLOCK)
    for path in (b"/opt/app/conf.d/settings", b"/tmp/other", b"/opt/app"):
        check(LIBC.inotify_add_watch(watcher, path, 0x2) > 0, "inotify_add_watch failed")

    def verify():
        with open("/opt/app/conf.d/settings", "a") as file:
            file.write("new")
        check(len(os.read(watcher, 4096)) >= 16, "no event of a file that changed")

    return verify


run(setup)
