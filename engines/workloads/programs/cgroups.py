"""Processes in cgroups below the container's own one."""

import sys

sys.path.insert(0, "/workloads")
import os
import signal

from common import Absent, run, same


def groups(pid):
    with open(f"/proc/{pid}/cgroup") as file:
        return {line.split(":")[1]: line.strip().split(":")[2] for line in file}


def setup():
    place = None
    for candidate in ("/sys/fs/cgroup/freezer", "/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        try:
            os.mkdir(f"{candidate}/inner")
        except OSError:
            continue
        place = f"{candidate}/inner"
        break
    if place is None:
        raise Absent("no cgroup file system in the container that can be written to")
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    with open(f"{place}/cgroup.procs", "w") as file:
        file.write(str(child))
    mine, theirs = groups(os.getpid()), groups(child)
    tails = {name: path[len(mine[name]) :] for name, path in theirs.items()}

    def verify():
        now_mine, now_theirs = groups(os.getpid()), groups(child)
        found = {name: path[len(now_mine[name]) :] for name, path in now_theirs.items()}
        same(found, tails, "the child's place below the container's cgroup")

    return verify


run(setup)
