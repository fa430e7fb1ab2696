"""Files with holes, one written and one mapped: they keep their data, and their holes take no space."""

import sys

sys.path.insert(0, "/workloads")
import mmap
import os

from common import Absent, check, run, same

MIB = 1 << 20


def blocks(file):
    return os.fstat(file.fileno()).st_blocks * 512


def setup():
    written = open("/tmp/written", "w+b", buffering=0)
    written.truncate(64 * MIB)
    os.pwrite(written.fileno(), b"abc", 33 * MIB)
    mapped = open("/tmp/mapped", "w+b", buffering=0)
    mapped.truncate(64 * MIB)
    holes = mmap.mmap(mapped.fileno(), 64 * MIB)
    holes[33 * MIB : 33 * MIB + 3] = b"abc"
    for file, what in ((written, "written"), (mapped, "mapped")):
        if (size := blocks(file)) > MIB:
            raise Absent(f"this kernel counts holes of a {what} file as data: {size >> 20} of 64 MiB")

    def verify():
        same(holes[33 * MIB : 33 * MIB + 3], b"abc", "a mapping with holes")
        for file, what in ((written, "written"), (mapped, "mapped")):
            same(os.pread(file.fileno(), 5, 33 * MIB - 1), b"\0abc\0", f"data of the {what} file")
            check(blocks(file) < MIB, f"the holes of the {what} file were filled")
        same(os.fstat(written.fileno()).st_size, 64 * MIB, "the size")

    return verify


run(setup)
