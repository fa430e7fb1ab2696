"""POSIX shared memory and named semaphores, two processes at them."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import ctypes.util
import mmap
import os

from common import check, eventually, run, same

LIBC = ctypes.CDLL(None, use_errno=True)


def setup():
    LIBC.sem_open.restype = ctypes.c_void_p
    ping = LIBC.sem_open(b"/torpor-ping", os.O_CREAT, 0o600, 0)
    pong = LIBC.sem_open(b"/torpor-pong", os.O_CREAT, 0o600, 2)
    check(ping and pong, f"sem_open failed: {os.strerror(ctypes.get_errno())}")
    ping, pong = ctypes.c_void_p(ping), ctypes.c_void_p(pong)
    shared = os.open("/dev/shm/torpor-memory", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(shared, 8192)
    memory = mmap.mmap(shared, 8192)
    memory[:5] = b"hello"
    child = os.fork()
    if child == 0:
        while True:
            LIBC.sem_wait(ping)
            memory[100] += 1
            LIBC.sem_post(pong)

    def value(semaphore):
        found = ctypes.c_int()
        LIBC.sem_getvalue(semaphore, ctypes.byref(found))
        return found.value

    def verify():
        same(memory[:5], b"hello", "shared memory")
        same(value(pong), 2, "the semaphore's value")
        LIBC.sem_post(ping)
        eventually(lambda: memory[100] == 1 and value(pong) == 3, "the other process answers")
        again = ctypes.c_void_p(LIBC.sem_open(b"/torpor-pong", 0))
        same(value(again), 3, "the semaphore opened again by its name")

    return verify


run(setup)
