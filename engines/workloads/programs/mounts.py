"""Mounts made inside the container: tmpfs with content, a bind of a directory, a private /proc."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import os

from common import Absent, check, run, same

LIBC = ctypes.CDLL(None, use_errno=True)


def mount(source, target, kind, flags=0, data=None):
    os.makedirs(target, exist_ok=True)
    if LIBC.mount(source, target.encode(), kind, flags, data):
        raise Absent(f"no mounts within a container: {os.strerror(ctypes.get_errno())}")


def setup():
    mount(b"tmpfs", "/tmp/fast", b"tmpfs", 0, b"size=4m")
    with open("/tmp/fast/file", "w") as file:
        file.write("on a tmpfs")
    mount(b"/tmp/fast", "/tmp/again", None, 0x1000)
    kept = open("/tmp/again/file")
    if "overlay" in sys.argv:
        for name in ("lower", "upper", "work"):
            os.makedirs(f"/tmp/fast/{name}")
        options = b"lowerdir=/tmp/fast/lower,upperdir=/tmp/fast/upper,workdir=/tmp/fast/work"
        mount(b"overlay", "/tmp/layers", b"overlay", 0, options)

    def verify():
        same(kept.read(), "on a tmpfs", "an open file on a tmpfs")
        with open("/tmp/again/file") as file:
            same(file.read(), "on a tmpfs", "the bind")
        check(os.path.ismount("/tmp/fast") and os.path.ismount("/tmp/again"), "a mount is gone")
        if "overlay" in sys.argv:
            check(os.path.ismount("/tmp/layers"), "the overlay is gone")

    return verify


run(setup)
