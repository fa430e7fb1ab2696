"""A parent with fifty children, grandchildren in sessions of their own, and five zombies."""

import sys

sys.path.insert(0, "/workloads")
import os
import signal

from common import check, eventually, run, same


def state(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(") ")[2].split()


def setup():
    children, pipes = [], {}
    for number in range(50):
        reader, writer = os.pipe()
        back_reader, back_writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            if number % 10 == 0:
                os.setsid()
            elif number % 10 == 1:
                os.setpgid(0, 0)
            secret = os.urandom(8)
            os.write(back_writer, secret)
            while os.read(reader, 1):
                os.write(back_writer, secret + b"%d %d %d" % (os.getpid(), os.getppid(), os.getsid(0)))
            os._exit(number)
        os.close(reader)
        os.close(back_writer)
        children.append(pid)
        pipes[pid] = (writer, back_reader, os.read(back_reader, 8))
    zombies = []
    for number in range(5):
        pid = os.fork()
        if pid == 0:
            os._exit(40 + number)
        zombies.append(pid)
    eventually(lambda: all(state(pid)[0] == "Z" for pid in zombies), "the zombies die")
    sessions = {pid: state(pid)[2:4] for pid in children}

    def verify():
        for pid, (writer, reader, secret) in pipes.items():
            same(state(pid)[2:4], sessions[pid], f"process group and session of {pid}")
            os.write(writer, b"?")
            answer = os.read(reader, 64)
            same(answer[:8], secret, f"memory of {pid}")
            same(answer[8:].split()[:2], [b"%d" % pid, b"%d" % os.getpid()], "ids")
        for number, pid in enumerate(zombies):
            same(state(pid)[0], "Z", "state of a zombie")
            same(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 40 + number, "a zombie's exit status")
        first = children[0]
        os.kill(first, signal.SIGTERM)
        same(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]), -signal.SIGTERM, "a child's end")
        check(os.fork() or os._exit(0) or True, "fork")

    return verify


run(setup)
