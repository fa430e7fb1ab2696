"""A user without root: ids, groups, capabilities, files that only this user may read."""

import sys

sys.path.insert(0, "/workloads")
import os

from common import check, run, same


def status():
    with open("/proc/self/status") as file:
        return [line for line in file if line.startswith(("Uid", "Gid", "Groups", "Cap", "NoNewPrivs"))]


def setup():
    os.setgroups([2001, 2002])
    os.setresgid(1001, 1001, 1001)
    os.setresuid(1001, 1001, 1001)
    with open("/tmp/mine", "w") as file:
        file.write("secret")
    os.chmod("/tmp/mine", 0o600)
    kept = open("/tmp/mine")
    before = status()

    def verify():
        same(status(), before, "ids and capabilities")
        same(kept.read(), "secret", "an open file")
        with open("/tmp/mine") as file:
            same(file.read(), "secret", "a file opened again")
        try:
            os.setuid(0)
        except OSError:
            return
        check(False, "it may become root")

    return verify


run(setup)
