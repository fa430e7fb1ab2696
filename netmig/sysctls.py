"""Settings of a network namespace that differ from those of a fresh one."""

from __future__ import annotations

import ctypes
import functools
import os
import stat
from collections.abc import Mapping

from netmig.ns import CLONE_NEWNET, Netns, in_thread

_ROOT = "/proc/sys"
_PAGE = 1 << 16
_BRANCHES = ("net/ipv4", "net/ipv6", "net/core", "net/unix", "net/netfilter", "net/mptcp")
# Actions, counters, secrets of one boot, and what follows the machine's memory or the link.
_NOT_IDENTITY = frozenset(
    {
        "flush",
        "stable_secret",
        "tcp_fastopen_key",
        "nf_conntrack_count",
        "nf_conntrack_buckets",
        "nf_conntrack_max",
        "mtu",
    }
)


def different(netns: Netns) -> dict[str, str]:
    """The settings of a namespace that a fresh one on this kernel would not have. 15 ms: there are 700."""
    with netns.inside():
        now = _read_all()
    if any(default(name, now) is None for name in now):
        baseline.cache_clear()  # a module was loaded since, and has brought settings of its own
    return {name: value for name, value in now.items() if value != default(name, now)}


def default(name: str, now: Mapping[str, str]) -> str | None:
    """What a setting would be if nobody had set it.

    now: the settings of the namespace; an interface's own start as the namespace's `conf/default`.
    """
    fresh = baseline()
    parts = name.split("/")
    if len(parts) == 5 and parts[2] == "conf" and parts[3] not in {"all", "default", "lo"}:
        general = "/".join((*parts[:3], "default", parts[4]))
        return now.get(general, fresh.get(general))
    if len(parts) == 5 and parts[2] == "neigh" and parts[3] != "lo":
        return fresh.get("/".join((*parts[:3], "lo", parts[4])))
    return fresh.get(name)


@functools.cache
def baseline() -> Mapping[str, str]:
    """What a fresh namespace on this kernel has."""
    found: dict[str, str] = {}

    def look() -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        found.update(_read_all())

    in_thread(look)
    return found


def _read_all() -> dict[str, str]:
    # Descriptors and plain text: with Path it takes five times as long, and this runs while a pod waits.
    values: dict[str, str] = {}
    for branch in _BRANCHES:
        for directory, _, names in os.walk(f"{_ROOT}/{branch}"):
            for name in names:
                if name not in _NOT_IDENTITY and (value := _read(f"{directory}/{name}")) is not None:
                    values[f"{directory}/{name}"[len(_ROOT) + 1 :]] = value
    return values


def _read(path: str) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None  # write-only, an action
    try:
        if not os.fstat(fd).st_mode & stat.S_IWUSR:
            return None
        return os.read(fd, _PAGE).decode(errors="surrogateescape").rstrip("\n")
    except OSError:
        return None  # some say so when they are not set
    finally:
        os.close(fd)
