"""eventfd, epoll (nested), inotify on a directory, signalfd, memfd (sealed)."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import fcntl
import mmap
import os
import select
import signal
import struct

from common import check, run, same

LIBC = ctypes.CDLL(None, use_errno=True)


def setup():
    event = LIBC.eventfd(7, os.O_NONBLOCK)
    inner, outer = select.epoll(), select.epoll()
    reader, writer = os.pipe()
    inner.register(reader, select.EPOLLIN | select.EPOLLET)
    outer.register(inner.fileno(), select.EPOLLIN)
    outer.register(event, select.EPOLLOUT)
    os.mkdir("/tmp/watched")
    watcher = LIBC.inotify_init1(os.O_NONBLOCK)
    check(LIBC.inotify_add_watch(watcher, b"/tmp/watched", 0x100) > 0, "inotify_add_watch failed")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    signals = LIBC.signalfd(-1, struct.pack("Q", 1 << (signal.SIGUSR2 - 1)), os.O_NONBLOCK)
    memory = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.write(memory, b"in a memfd")
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    mapped = mmap.mmap(memory, 10)

    def verify():
        same(struct.unpack("Q", os.read(event, 8))[0], 7, "the eventfd")
        check(not inner.poll(0), "epoll reports what did not happen")
        os.write(writer, b"x")
        found = dict(outer.poll(2))
        check(inner.fileno() in found and event in found, f"nested epoll: {found}")
        open("/tmp/watched/new", "w").close()
        check(b"new" in os.read(watcher, 4096), "inotify")
        os.kill(os.getpid(), signal.SIGUSR2)
        same(struct.unpack_from("I", os.read(signals, 128))[0], signal.SIGUSR2, "signalfd")
        same(os.pread(memory, 100, 0), b"in a memfd", "the memfd")
        mapped[0:2] = b"IN"
        same(os.pread(memory, 2, 0), b"IN", "the mapped memfd")
        same(fcntl.fcntl(memory, fcntl.F_GET_SEALS), fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK, "seals")

    return verify


run(setup)
