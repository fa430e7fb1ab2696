"""File locks: flock, record locks and open-file-description locks, held by two processes."""

import sys

sys.path.insert(0, "/workloads")
import errno
import fcntl
import os
import struct

from common import check, run

F_OFD_SETLK = 37


def locked_by_others(path, how):
    """Whether a process that did not inherit anything is kept out."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        descriptor = os.open(path, os.O_RDWR)
        try:
            how(descriptor)
        except OSError as error:
            os.write(writer, b"1" if error.errno in (errno.EAGAIN, errno.EACCES) else b"?")
        else:
            os.write(writer, b"0")
        os._exit(0)
    os.close(writer)
    answer = os.read(reader, 1)
    os.close(reader)
    os.waitpid(child, 0)
    return answer == b"1"


def try_flock(descriptor):
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def try_record(descriptor):
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 5)


def try_ofd(descriptor):
    fcntl.fcntl(descriptor, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))


def setup():
    held = []
    for name, take in (("flock", try_flock), ("record", try_record), ("ofd", try_ofd)):
        descriptor = os.open(f"/tmp/{name}", os.O_RDWR | os.O_CREAT, 0o600)
        os.write(descriptor, b"0123456789" * 3)
        try:
            take(descriptor)
        except OSError as error:
            # Not every kernel knows all kinds.
            if error.errno != errno.EINVAL:
                raise
        else:
            held.append((name, take))
    child = os.fork()
    if child == 0:
        import signal

        other = os.open("/tmp/child", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(other, fcntl.LOCK_EX)  # waits for whoever tries whether it is held
        signal.pause()
        os._exit(0)
    held.append(("child", try_flock))
    while not os.path.exists("/tmp/child") or not locked_by_others("/tmp/child", try_flock):
        pass

    def verify():
        for name, take in held:
            check(locked_by_others(f"/tmp/{name}", take), f"the lock on {name} is lost")
        os.kill(child, 15)
        os.waitpid(child, 0)
        check(not locked_by_others("/tmp/child", try_flock), "a dead process holds its lock")

    return verify


run(setup)
