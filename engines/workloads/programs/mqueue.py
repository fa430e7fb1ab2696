"""A POSIX message queue with a message in it."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import os

from common import Absent, run, same

LIBC = ctypes.CDLL(None, use_errno=True)


def setup():
    queue = LIBC.mq_open(b"/torpor", os.O_RDWR | os.O_CREAT, 0o600, None)
    if queue < 0:
        raise Absent(f"no message queues: {os.strerror(ctypes.get_errno())}")
    if LIBC.mq_send(queue, b"left", 4, 3):
        raise Absent(f"message queues take no messages: {os.strerror(ctypes.get_errno())}")

    def verify():
        message = ctypes.create_string_buffer(1 << 16)
        size = LIBC.mq_receive(queue, message, len(message), None)
        same(message.raw[: max(size, 0)], b"left", "the message")

    return verify


run(setup)
