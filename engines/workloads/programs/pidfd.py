"""A descriptor of a process (pidfd) that is waited for."""

import sys

sys.path.insert(0, "/workloads")
import os
import select
import signal

from common import check, run


def setup():
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    pidfd = os.pidfd_open(child)
    poll = select.epoll()
    poll.register(pidfd, select.EPOLLIN)

    def verify():
        check(not poll.poll(0), "the process is said to have ended")
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        check(poll.poll(5), "the descriptor does not tell of the end")
        os.waitpid(child, 0)

    return verify


run(setup)
