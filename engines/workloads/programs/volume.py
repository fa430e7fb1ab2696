"""Files on a volume that the container shares with the node: volume.py kept|deleted."""

import sys

sys.path.insert(0, "/workloads")
import os

from common import run, same


def kept():
    log = open("/volume/log", "ab", buffering=0)
    log.write(b"line 1\n")
    data = open("/volume/data", "w+b", buffering=0)
    data.write(b"0123456789")
    data.seek(3)

    def verify():
        log.write(b"line 2\n")
        with open("/volume/log", "rb") as file:
            lines = file.read().splitlines()
        # Clones share the volume, so another may have written too.
        same((lines[0], lines[-1]), (b"line 1", b"line 2"), "the log")
        same(data.read(), b"3456789", "the position in a file")

    return verify


def deleted():
    temporary = open("/volume/temporary", "w+b", buffering=0)
    temporary.write(b"deleted on a volume")
    os.unlink("/volume/temporary")

    def verify():
        temporary.seek(0)
        same(temporary.read(), b"deleted on a volume", "a deleted file")

    return verify


run({"kept": kept, "deleted": deleted}[sys.argv[1]])
