"""Processes and threads in a state that CRIU does not dump, or dumps and cannot make again."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from engines.criu import cgroups, tree
from engines.criu.outlook import Outlook

_DEADLINE = 6
_KCMP_VM = 1


def look(outlook: Outlook, pid: int, who: str) -> None:
    """Note what stands against a dump of a process and its threads. Raises OSError if it is gone."""
    state, parent = _state(pid, pid)
    threads = tree.threads(pid)
    if state == "Z" and len(threads) > 1:
        outlook.add(
            "ended-leader",
            f"{who} has ended its main thread, and others run on",
            "let the main thread live as long as the others",
        )
    if 0 <= _space_limit(pid) < _space(pid):
        outlook.add(
            "address-space",
            f"{who} has more memory mapped than its limit of address space (RLIMIT_AS) allows, so that CRIU "
            "cannot work in it",
            "raise the limit before the checkpoint (prlimit --as)",
        )
    groups = [] if state == "Z" else _groups(pid, pid)
    for thread in threads:
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(thread) == _DEADLINE:
                outlook.add(
                    "deadline",
                    f"{who} is scheduled by deadline (SCHED_DEADLINE), which CRIU cannot set again",
                    "give it another scheduling policy before the checkpoint",
                )
            if thread == pid:
                continue
            if groups and _groups(pid, thread) != groups:
                outlook.add(
                    "thread-groups",
                    f"{who} has a thread in control groups of its own (cgroup v1), which would not come back",
                    "put the whole process there",
                )
            if _state(pid, thread)[0] == "D":
                _waiting(outlook, thread, who)
    if state == "D":
        _waiting(outlook, pid, who)
    elif not outlook.has("shared-memory") and _shares_memory(pid, parent):
        outlook.add(
            "shared-memory",
            f"{who} shares its memory with process {parent} and is no thread of it (CLONE_VM)",
            "end it before the checkpoint",
        )


def _state(pid: int, thread: int) -> tuple[str, int]:
    text = Path(f"/proc/{pid}/task/{thread}/stat").read_text(errors="replace")
    words = text.rpartition(")")[2].split()
    return words[0], int(words[1])


def _space_limit(pid: int) -> int:
    """Bytes that a process may map, -1 without a limit."""
    words = tree.text(pid, "limits").partition("Max address space")[2].split(None, 1)
    return int(words[0]) if words and words[0].isdecimal() else -1


def _space(pid: int) -> int:
    return int(tree.text(pid, "statm").split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _groups(pid: int, thread: int) -> list[str]:
    """Those of version 1: of version 2 CRIU keeps a thread's own."""
    lines = Path(f"/proc/{pid}/task/{thread}/cgroup").read_text(errors="replace").splitlines()
    return [line for line in lines if not line.startswith("0::")]


def _shares_memory(pid: int, parent: int) -> bool:
    """Whether it is so for longer than a vforked child takes to run its program."""
    for _ in range(20):
        if not tree.same(pid, parent, _KCMP_VM) or cgroups.in_vfork(parent):
            return False
        time.sleep(0.005)
    return True


def _waiting(outlook: Outlook, thread: int, who: str) -> None:
    if cgroups.in_vfork(thread):
        outlook.add_passing(
            "vfork",
            f"{who} waits for a vforked child to run its program, and cannot be stopped before",
            "try again once it has",
        )
