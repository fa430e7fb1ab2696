"""A container that migrates: says where it runs, and starts the program that its arguments name beside that.

Every 2 ms it appends `GROUP TIME_NS` to /shared/beats, GROUP being its cgroup, which tells the nodes of a lab
apart, and TIME_NS of the clock that all nodes share (CRIU gives the others an offset).
"""

import os
import subprocess
import sys
import time


def main() -> None:
    if sys.argv[1:]:
        subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    n = 0
    while True:
        # In this order: frozen in between, it must not say at its new place that it ran at the old one.
        now_ns = time.time_ns()
        with open("/proc/self/cgroup") as file:
            group = file.readline().strip().rpartition(":")[2]
        beats = os.open("/shared/beats", os.O_WRONLY | os.O_APPEND)
        os.write(beats, f"{group} {now_ns}\n".encode())
        os.close(beats)
        n += 1
        if n % 100 == 1:
            print(f"tick {n}", flush=True)
        time.sleep(0.002)


if __name__ == "__main__":
    main()
