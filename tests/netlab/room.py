"""A room for the lab: mount, network and pid namespaces of its own, with /run as a fresh tmpfs.

Whatever the lab makes lives in there, and ends with it: also when the lab is killed. Only cgroups are the
machine's; those that a killed lab left are removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from tests.support.containers import SEARCH_PATH, cgroup_hierarchies
from tests.support.rootfs import rootfs

VARIABLE = "TORPOR_NETLAB"  # set inside: the word that the lab's cgroups and ids carry
_PREFIX = "netlab-"
_ROOTS = ("busybox", "redis")

# The shell is pid 1 and reaps what is left to it. CRIU tries a connection over loopback when it first runs.
_INIT = 'mount -t tmpfs -o mode=755 netlab /run && mkdir /run/netns && ip link set lo up && "$@"; exit $?'


def words(argv: Sequence[str | Path]) -> list[str]:
    """The command line that runs a program in a new room; it dies when its parent dies.

    What its pods are made of is built here: from inside, nothing reaches Debian's archive.
    """
    for name in _ROOTS:
        rootfs(name)
    spaces = ("--mount", "--propagation", "private", "--net", "--pid", "--mount-proc")
    room = ["unshare", *spaces, "--fork", "--kill-child", "sh", "-c", _INIT, "netlab"]
    return ["setpriv", "--pdeathsig", "KILL", *room, *(str(word) for word in argv)]


def environment() -> dict[str, str]:
    """The environment for `words`: with a word for a new lab, which tells which process it belongs to."""
    return {**os.environ, "PATH": SEARCH_PATH, VARIABLE: f"{_PREFIX}{os.getpid()}"}


def tag() -> str:
    """The lab's word. Raises LookupError outside a room, where a lab would change the machine's network."""
    if VARIABLE not in os.environ:
        raise LookupError(
            "this runs in a room of the network lab only; start it with tests.netlab.room.words"
        )
    return os.environ[VARIABLE]


def sweep() -> None:
    """Remove the cgroups of labs whose process is gone."""
    tags = {top.name for hierarchy in cgroup_hierarchies() for top in hierarchy.glob(f"{_PREFIX}*/")}
    for old in tags:
        if not Path("/proc", old.removeprefix(_PREFIX)).exists():
            remove_cgroups(old)


def remove_cgroups(tag: str) -> None:
    """Remove the cgroups of one lab. They must be empty: others fail, and stay."""
    for hierarchy in cgroup_hierarchies():
        for directory, _, _ in os.walk(hierarchy / tag, topdown=False):
            with contextlib.suppress(OSError):
                Path(directory).rmdir()
