"""System V shared memory, semaphores and message queues, with content."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import os
import struct

from common import Absent, check, run, same

LIBC = ctypes.CDLL(None, use_errno=True)
IPC_CREAT, IPC_RMID, GETVAL, SETVAL, IPC_NOWAIT = 0o1000, 0, 12, 16, 0o4000


def setup():
    LIBC.shmat.restype = ctypes.c_void_p
    segment = LIBC.shmget(0x70707, 65536, IPC_CREAT | 0o600)
    if segment < 0:
        raise Absent(f"no System V shared memory: {os.strerror(ctypes.get_errno())}")
    address = LIBC.shmat(segment, None, 0)
    ctypes.memmove(address, b"in a segment", 12)
    doomed = LIBC.shmget(0, 4096, IPC_CREAT | 0o600)
    removed = LIBC.shmat(doomed, None, 0)
    ctypes.memmove(removed, b"in a removed one", 16)
    LIBC.shmctl(doomed, IPC_RMID, None)
    semaphores = LIBC.semget(0x70708, 3, IPC_CREAT | 0o600)
    check(semaphores >= 0, "semget failed")
    for number in range(3):
        LIBC.semctl(semaphores, number, SETVAL, 10 + number)
    queue = LIBC.msgget(0x70709, IPC_CREAT | 0o600)
    check(queue >= 0, "msgget failed")
    for kind, text in ((1, b"first"), (2, b"second"), (1, b"third")):
        check(LIBC.msgsnd(queue, struct.pack("q", kind) + text, len(text), 0) == 0, "msgsnd failed")

    def receive(kind):
        message = ctypes.create_string_buffer(64)
        size = LIBC.msgrcv(queue, message, 50, ctypes.c_long(kind), IPC_NOWAIT)
        return message.raw[8 : 8 + size] if size >= 0 else None

    def verify():
        same(ctypes.string_at(address, 12), b"in a segment", "the segment")
        same(ctypes.string_at(removed, 16), b"in a removed one", "the removed segment")
        same(LIBC.shmget(0x70707, 65536, 0), segment, "the segment's id")
        again = LIBC.shmat(segment, None, 0)
        ctypes.memmove(again, b"IN", 2)
        same(ctypes.string_at(address, 2), b"IN", "one segment, two addresses")
        values = [LIBC.semctl(semaphores, number, GETVAL) for number in range(3)]
        same(values, [10, 11, 12], "semaphores")
        same(
            [receive(2), receive(1), receive(1), receive(0)],
            [b"second", b"first", b"third", None],
            "messages",
        )

    return verify


run(setup)
