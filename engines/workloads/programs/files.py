"""Open files: deleted (small and over a mebibyte), appended to, at a position, and a deleted directory."""

import sys

sys.path.insert(0, "/workloads")
import hashlib
import mmap
import os

from common import check, run, same

MIB = 1 << 20


def setup():
    small = open("/tmp/small", "w+b", buffering=0)
    small.write(b"deleted but open")
    os.unlink("/tmp/small")
    content = os.urandom(3 * MIB)
    large = open("/tmp/large", "w+b", buffering=0)
    large.write(content)
    mapped = mmap.mmap(large.fileno(), 3 * MIB)
    os.unlink("/tmp/large")
    linked = open("/tmp/linked", "w+b", buffering=0)
    linked.write(b"one name of two")
    os.link("/tmp/linked", "/tmp/other-name")
    os.unlink("/tmp/linked")
    log = open("/tmp/log", "ab", buffering=0)
    log.write(b"line 1\n")
    half = open("/tmp/half", "w+b", buffering=0)
    half.write(b"0123456789")
    half.seek(4)
    twin = os.dup(half.fileno())
    os.mkdir("/tmp/doomed")
    doomed = os.open("/tmp/doomed", os.O_RDONLY | os.O_DIRECTORY)
    os.rmdir("/tmp/doomed")
    os.mkdir("/tmp/here")
    os.chdir("/tmp/here")
    handle = os.open("/tmp/half", os.O_PATH)

    def verify():
        small.seek(0)
        same(small.read(), b"deleted but open", "a deleted file")
        check(not os.path.exists("/tmp/small"), "a deleted file has a name again")
        same(os.fstat(small.fileno()).st_nlink, 0, "links of a deleted file")
        same(hashlib.sha256(mapped).digest(), hashlib.sha256(content).digest(), "a large deleted file")
        linked.seek(0)
        same(linked.read(), b"one name of two", "a file with another name")
        log.write(b"line 2\n")
        with open("/tmp/log", "rb") as file:
            same(file.read(), b"line 1\nline 2\n", "the log")
        same(os.read(twin, 3), b"456", "the position")
        same(half.tell(), 7, "the position that two descriptors share")
        same(os.getcwd(), "/tmp/here", "the working directory")
        same(os.listdir(doomed), [], "a deleted directory")
        same(os.stat(f"/proc/self/fd/{handle}").st_size, 10, "an O_PATH descriptor")

    return verify


run(setup)
