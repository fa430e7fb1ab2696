"""A child in namespaces of its own within the container: nested.py KIND..."""

import sys

sys.path.insert(0, "/workloads")
import ctypes
import os
import signal
import time

from common import Absent, check, run, same

LIBC = ctypes.CDLL(None, use_errno=True)
FLAGS = {"mnt": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000, "pid": 0x20000000}
FLAGS |= {"net": 0x40000000, "time": 0x80, "cgroup": 0x2000000}


def link(pid, kind):
    return os.readlink(f"/proc/{pid}/ns/{kind}")


def main(kinds):
    """Run a workload whose child unshared some namespaces."""

    def setup():
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            flags = 0
            for kind in kinds:
                flags |= FLAGS[kind]
            if LIBC.unshare(flags):
                os.write(writer, os.strerror(ctypes.get_errno()).encode())
                os._exit(1)
            if {"pid", "time"} & set(kinds) and os.fork() == 0:
                os.write(writer, b".")
                while True:
                    time.sleep(1)
            elif not {"pid", "time"} & set(kinds):
                os.write(writer, b".")
            while True:
                signal.pause()
        answer = os.read(reader, 100)
        if answer != b".":
            raise Absent(f"no {' and '.join(kinds)} namespace within a container: {answer.decode()}")
        for kind in kinds:
            if not os.path.lexists(f"/proc/self/ns/{kind}"):
                raise Absent(f"this kernel has no {kind} namespaces")

        def verify():
            for kind in kinds:
                if kind not in ("pid", "time"):
                    check(link(child, kind) != link("self", kind), f"the {kind} namespace is gone")
            os.kill(child, signal.SIGKILL)
            same(os.waitpid(child, 0)[0], child, "the child")

        return verify

    run(setup)


if __name__ == "__main__":
    main(sys.argv[1:])
