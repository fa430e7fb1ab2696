"""Private, shared, anonymous and file-backed mappings, with holes, guards and protections."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import hashlib
import mmap
import os
import signal
import time

from common import check, eventually, run, same

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
MIB = 1 << 20


def setup():
    private = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, len(private), 7 * PAGE):
        private[page : page + 8] = page.to_bytes(8, "big")
    shared = mmap.mmap(-1, MIB, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    shared[:6] = b"shared"
    with open("/tmp/mapped", "w+b") as file:
        file.write(os.urandom(4 * PAGE))
        file.flush()
        on_file = mmap.mmap(file.fileno(), 4 * PAGE)
        copy = mmap.mmap(file.fileno(), 4 * PAGE, flags=mmap.MAP_PRIVATE)
    on_file[:4] = b"file"
    copy[PAGE : PAGE + 4] = b"mine"
    punched = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    punched[:] = b"x" * MIB
    punched.madvise(mmap.MADV_DONTNEED, 64 * PAGE, 64 * PAGE)
    readable = mmap.mmap(-1, 4 * PAGE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    readable[:4] = b"read"
    address = ctypes.addressof(ctypes.c_char.from_buffer(readable))
    check(LIBC.mprotect(ctypes.c_void_p(address), PAGE, mmap.PROT_READ) == 0, "mprotect failed")
    # Before the fork: whoever asks at once must not end a child that does not know the signal yet.
    signal.signal(signal.SIGUSR2, lambda *_: shared.__setitem__(slice(100, 105), b"child"))
    child = os.fork()
    while child == 0:
        time.sleep(0.01)
    wanted = hashlib.sha256(private).hexdigest()

    def protections():
        with open("/proc/self/maps") as maps:
            for line in maps:
                start, end = (int(word, 16) for word in line.split()[0].split("-"))
                if start <= address < end:
                    return line.split()[1]
        return ""

    def verify():
        same(hashlib.sha256(private).hexdigest(), wanted, "private memory")
        same(shared[:6], b"shared", "shared memory")
        os.kill(child, signal.SIGUSR2)
        eventually(lambda: shared[100:105] == b"child", "memory is shared with a child")
        same(on_file[:4], b"file", "a file's mapping")
        on_file[8:12] = b"more"
        with open("/tmp/mapped", "rb") as file:
            content = file.read()
        same(content[8:12], b"more", "writing through a mapping")
        same(copy[PAGE : PAGE + 4], b"mine", "a private copy of a file")
        check(content[PAGE : PAGE + 4] != b"mine", "a private copy got into the file")
        same(punched[64 * PAGE : 128 * PAGE], bytes(64 * PAGE), "a hole in memory")
        same(punched[: 64 * PAGE], b"x" * 64 * PAGE, "memory before the hole")
        same(protections()[:3], "r--", "protection")
        same(readable[:4], b"read", "memory that may only be read")

    return verify


run(setup)
