"""A parent that waits for stopped and continued children, as a shell with job control does.

Prints `child tick N` lines from a running child, `stopped PID` / `continued PID` for every such report of
wait, and keeps a second child stopped on purpose if told `--stopped`.
"""

import os
import signal
import sys
import time


def count(name: str) -> None:
    number = 0
    while True:
        number += 1
        print(name, "tick", number, flush=True)
        time.sleep(0.02)


def main() -> None:
    if os.fork() == 0:
        count("child")
    if "--stopped" in sys.argv:
        sleeper = os.fork()
        if sleeper == 0:
            count("sleeper")
        time.sleep(0.1)
        os.kill(sleeper, signal.SIGSTOP)
        os.waitpid(sleeper, os.WUNTRACED)
    number = 0
    while True:
        number += 1
        print("tick", number, flush=True)
        try:
            pid, status = os.waitpid(-1, os.WUNTRACED | os.WNOHANG)
        except ChildProcessError:
            pid = 0
        if pid and os.WIFSTOPPED(status):
            print("stopped", pid, flush=True)
        time.sleep(0.005)


if __name__ == "__main__":
    main()
