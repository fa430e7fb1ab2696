"""What CRIU dumps and restores without a word, and what is not there afterwards, as far as /proc shows it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from engines import mountinfo
from engines.criu import tree
from engines.criu.outlook import Outlook
from engines.criu.repair import copy_of

_KCMP_FILES, _KCMP_FS = 2, 3
_OF_THREADS = ("net", "uts", "ipc")
# Devices that the kernel itself puts into each new network namespace.
_USUAL_DEVICES = frozenset(
    "lo tunl0 gre0 gretap0 erspan0 ip_vti0 ip6_vti0 sit0 ip6tnl0 ip6gre0".split()  # noqa: SIM905
)
_LISTENS = "00010000"
_SIOCUNIXFILE = 0x89E0
_ADDRESS = re.compile(r"\|-- (\S+)\n\s+/32 host LOCAL")
_V4, _V6 = frozenset({"127.0.0.1"}), "0" * 31 + "1"


def look(outlook: Outlook, init: int, pids: Sequence[int], *, own_network: bool) -> None:
    """Note what would be lost so that the container breaks. own_network: the namespace is made for it."""
    if own_network:
        with contextlib.suppress(OSError):
            _devices(outlook, init)
    for pid in pids:
        with contextlib.suppress(OSError):
            _threads(outlook, pid)
    with contextlib.suppress(OSError):
        _renamed(outlook, init, pids)


def _devices(outlook: Outlook, init: int) -> None:
    lines = Path(f"/proc/{init}/net/dev").read_text(errors="replace").splitlines()[2:]
    others = sorted({line.partition(":")[0].strip() for line in lines} - _USUAL_DEVICES)
    if others:
        outlook.add(
            "devices",
            f"the container's own network namespace has the interface {others[0]}, which no restore makes "
            "again",
            "give the container a network namespace by path, or remove the interface",
        )


def _threads(outlook: Outlook, pid: int) -> None:
    """Each thread must have what its process has: CRIU dumps that alone."""
    others = [thread for thread in tree.threads(pid) if thread != pid]
    if not others:
        return
    who = f"process {pid} ('{tree.text(pid, 'comm').strip()}')"
    compares = tree.same(pid, pid, _KCMP_FS)  # else each thread would have to be read whole
    ours = {kind: _link(f"/proc/{pid}/ns/{kind}") for kind in _OF_THREADS}
    for thread in others:
        place = f"/proc/{pid}/task/{thread}"
        with contextlib.suppress(OSError):  # it may have ended
            what = [f"{kind} namespace" for kind, link in ours.items() if _link(f"{place}/ns/{kind}") != link]
            if compares and not tree.same(pid, thread, _KCMP_FS) and _home(f"/proc/{pid}") != _home(place):
                what.append("working directory or root")
            if compares and not tree.same(pid, thread, _KCMP_FILES) and _open(f"/proc/{pid}") != _open(place):
                what.append("table of descriptors")
            if what:
                outlook.add(
                    "thread",
                    f"{who} has a thread with a {what[0]} of its own, which would not come back",
                    "let a process of its own do that",
                )
                return


def _link(path: str) -> str:
    return os.readlink(path)  # noqa: PTH115


def _home(place: str) -> tuple[str, str]:
    return _link(f"{place}/cwd"), _link(f"{place}/root")


def _open(place: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in os.listdir(f"{place}/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            found[name] = _link(f"{place}/fd/{name}")
    return found


def _renamed(outlook: Outlook, init: int, pids: Sequence[int]) -> None:
    """A unix socket that listens is bound again to the name that it was bound to first."""
    suspects: set[str] = set()
    for line in Path(f"/proc/{init}/net/unix").read_text(errors="replace").splitlines()[1:]:
        words = line.split(None, 7)
        # A name may hold anything, even what looks like another line: the socket itself is asked later.
        listens = len(words) == 8 and words[3] == _LISTENS and words[7].startswith("/")
        if listens and not os.path.lexists(f"/proc/{init}/root{words[7]}"):
            suspects.add(f"socket:[{words[6]}]")
    for pid in pids if suspects else ():
        for name, link in _open(f"/proc/{pid}").items():
            if link in suspects and (path := _left_name(pid, int(name))):
                outlook.add(
                    "renamed",
                    f"process {pid} listens on a unix socket that was bound to {path} and renamed later, "
                    "which would be bound to the old name",
                    "let the program bind it to the name that it is to have",
                )
                return


def _left_name(pid: int, number: int) -> str:
    """The name that a unix socket was bound to, if its file has another name now; else ""."""
    pidfd = os.pidfd_open(pid)
    try:
        copy = copy_of(pidfd, number)
    finally:
        os.close(pidfd)
    with copy, contextlib.suppress(OSError):
        path = str(copy.getsockname())
        if not path.startswith("/") or os.path.lexists(f"/proc/{pid}/root{path}"):
            return ""
        descriptor = fcntl.ioctl(copy, _SIOCUNIXFILE)
        try:
            return path if os.fstat(descriptor).st_nlink else ""
        finally:
            os.close(descriptor)
    return ""


# --- what only loses comfort ---------------------------------------------------------------------------

_MAX_LOOKED_AT = 1000
_USUAL = (("personality", "00000000"), ("timerslack_ns", "50000"))
_WORDS = {
    "personality": "a personality",
    "timerslack_ns": "a timer slack",
    "coredump_filter": "a core dump filter",
}
_OPTIONS: dict[tuple[int, int], tuple[str, int]] = {
    (socket.IPPROTO_TCP, 18): ("TCP_USER_TIMEOUT", 0),
    (socket.IPPROTO_TCP, 9): ("TCP_DEFER_ACCEPT", 0),
    (socket.IPPROTO_TCP, 23): ("TCP_FASTOPEN", 0),
    (socket.IPPROTO_IP, 19): ("IP_TRANSPARENT", 0),
    (socket.IPPROTO_IP, 13): ("IP_RECVTOS", 0),
    (socket.SOL_SOCKET, 29): ("SO_TIMESTAMP", 0),
    (socket.SOL_SOCKET, 35): ("SO_TIMESTAMPNS", 0),
    (socket.IPPROTO_UDP, 103): ("UDP_SEGMENT", 0),
    (socket.IPPROTO_UDP, 104): ("UDP_GRO", 0),
}


def attributes(pids: Sequence[int]) -> Iterator[str]:
    """What processes have set for themselves and no restore sets again, in words."""
    usual = dict(_USUAL)
    with contextlib.suppress(OSError):
        usual["coredump_filter"] = tree.text(os.getpid(), "coredump_filter").strip()
    for pid in pids:
        for name, value in usual.items():
            with contextlib.suppress(OSError):
                if tree.text(pid, name).strip() not in {value, ""}:
                    yield f"{_WORDS[name]} (process {pid})"


def options(pids: Sequence[int]) -> Iterator[str]:
    """Names of socket options that are set and that no restore sets again."""
    seen: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found = {
                link: name for name, link in _open(f"/proc/{pid}").items() if link.startswith("socket:[")
            }
            for link in found.keys() - seen:
                seen.add(link)
                yield from _set(pid, int(found[link]))


def _set(pid: int, number: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            copy = copy_of(pidfd, number)
        finally:
            os.close(pidfd)
        with copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                return
            for (level, option), (name, usual) in _OPTIONS.items():
                with contextlib.suppress(OSError):
                    if copy.getsockopt(level, option) != usual:
                        yield name


def addresses(init: int) -> list[str]:
    """Addresses of an own network namespace beside those of loopback. Raises OSError."""
    found = set(_ADDRESS.findall(Path(f"/proc/{init}/net/fib_trie").read_text())) - _V4
    with contextlib.suppress(OSError):  # no IPv6
        for line in Path(f"/proc/{init}/net/if_inet6").read_text().splitlines():
            if (number := line.split()[0]) != _V6:
                found.add(":".join(number[n : n + 4] for n in range(0, 32, 4)))
    return sorted(found)


def on_tmpfs(init: int, given: Sequence[str]) -> str:
    """A file on a tmpfs of the container with attributes (access lists, capabilities) that its archive does
    not keep, "" if none is seen among the first.

    given: places of what is bound in from elsewhere. Raises OSError.
    """
    left = _MAX_LOOKED_AT
    for mount in mountinfo.mounts(init):
        if mount.kind != "tmpfs" or mount.point in given:
            continue
        waiting = [mount.point]
        device = os.stat(f"/proc/{init}/root{mount.point}").st_dev  # noqa: PTH116
        while waiting and left > 0:
            folder = waiting.pop()
            with contextlib.suppress(OSError), os.scandir(f"/proc/{init}/root{folder}") as listing:
                for entry in listing:
                    left -= 1
                    path = f"{folder.rstrip('/')}/{entry.name}"
                    if set(os.listxattr(entry.path, follow_symlinks=False)) - {"security.selinux"}:
                        return path
                    inside = entry.is_dir(follow_symlinks=False)
                    if inside and entry.stat(follow_symlinks=False).st_dev == device:
                        waiting.append(path)
                    if left <= 0:
                        break
    return ""
