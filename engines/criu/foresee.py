"""What CRIU cannot dump or restore, found in a running container before it is touched.

Everything here only reads /proc. What it says is what CRIU itself would run into, at the dump or, worse, at
the restore, when the source has ended already. A state that comes up between this look and the freeze is
CRIU's to refuse.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines import mountinfo
from engines.criu import config, handles, losses, mounted, peers, places, tasks, tree, views
from engines.criu.outlook import Outlook
from engines.criu.repair import copy_of
from engines.criu.watches import watched_paths

_CAP_SYS_RESOURCE = 24
_MQUEUE_MAGIC = 0x19800202
# Anonymous inodes that CRIU can dump.
_GOOD_INODES = frozenset(
    {"[eventfd]", "[eventpoll]", "inotify", "[fanotify]", "[signalfd]", "[timerfd]", "[pidfd]"}
)
_FALLBACK = "start the container with torpor.dev/checkpointable, so that its programs fall back"
_INODES: Mapping[str, tuple[str, str]] = {
    "[io_uring]": ("an io_uring", _FALLBACK),
    "[userfaultfd]": ("a userfaultfd", "let the program close it before the checkpoint"),
    "bpf-map": ("a BPF map", "let the program close it before the checkpoint"),
    "[perf_event]": ("a performance counter", "end the profiler before the checkpoint"),
}
_FAMILIES = frozenset({socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET})
_FAMILY_NAMES = {38: "kernel cryptography (AF_ALG)", 40: "vsock", 44: "AF_XDP", 31: "Bluetooth"}
_PROTOCOLS = {262: "Multipath TCP", 132: "SCTP", 33: "DCCP"}
_ICMP = (1, 58)
# Nested mount namespaces work; of these there may be only one in a container.
_NAMESPACES = ("net", "uts", "ipc", "pid", "user", "time", "cgroup")
_FOR_CHILDREN = {"pid_for_children": "pid", "time_for_children": "time"}
_MEMORY_DEVICE, _PTY = 1, range(136, 144)
_TERMINALS = frozenset({4, 5, *_PTY})
_TUN = os.makedev(10, 200)
# Names of files that lie on no mount and yet can be dumped.
_UNMOUNTED = ("/memfd:", "/SYSV", "/dev/zero (deleted)", "/anon_hugepage", "/[aio]")


def look(init: int, bundle_path: Path) -> Outlook:
    """Look at a container. init: its first process, as the host numbers it. Raises nothing."""
    outlook = Outlook()
    spec: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        spec = json.loads((bundle_path / "config.json").read_bytes())
    pids = tree.of(init)
    with contextlib.suppress(OSError):
        mounted.look(outlook, init, spec)
    entries: list[dict[str, Any]] = spec.get("mounts") or []
    with contextlib.suppress(OSError):
        groups = [str(entry.get("destination")) for entry in entries if entry.get("type") == "cgroup"]
        outlook.outside = views.bound(init, groups)
    with contextlib.suppress(OSError):
        _message_queues(outlook, init, spec)
    with contextlib.suppress(OSError):
        if _link(init, "user") != _link("self", "user") and _closed(init):
            outlook.add(
                "user-namespace",
                f"process {init} ('{_name(init)}') cannot be looked at from its own user namespace, as CRIU "
                "does: it has changed its user since it was restored",
                "restore the image that it was made from again, and checkpoint nothing later",
            )
    own_network = own(spec, "network")
    table = handles.Mounts()
    with contextlib.suppress(OSError):
        table = handles.Mounts.of(init)
    linux: dict[str, Any] = spec.get("linux") or {}
    devices: list[dict[str, Any]] = linux.get("devices") or []
    named = {str(entry.get("path")) for entry in devices}
    named |= {str(entry.get("destination")) for entry in entries} | mounted.NODE_DEVICES
    opened = handles.Handles(outlook, init, table, frozenset(_all_namespaces(pids)), named)
    unix: dict[int, str] = {}
    watches: set[tuple[int, int]] = set()
    for pid in pids:
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            who = f"process {pid} ('{_name(pid)}')"
            tasks.look(outlook, pid, who)
            _status(outlook, pid, who)
            _namespaces(outlook, init, pid, who)
            _memory(outlook, init, pid, who, table.without_programs)
            _descriptors(
                outlook,
                pid,
                who,
                own_network=own_network,
                opened=opened,
                unix=unix,
                watches=watches,
            )
            places.look(outlook, pid, who)
            opened.places(pid, who)
    _outside_sockets(outlook, init, pids, unix)
    _lost_sockets(outlook, init, pids, unix)
    losses.look(outlook, init, pids, own_network=own_network)
    if watches:
        found, lost = watched_paths(init, watches)
        outlook.watched = found
        if lost:
            outlook.add(
                "watch",
                f"{lost} inotify or fanotify watches are on files whose names cannot be found or told to "
                "CRIU",
                "let the program end them before the checkpoint",
            )
    return outlook


# --- processes -----------------------------------------------------------------------------------------


# A process of its own, and not a fork: only one with a single thread may join a user namespace, and what a
# caller has loaded may start threads in its forks (gRPC does).
_REACH = """
import ctypes, os, sys
if ctypes.CDLL(None).setns(os.open(f"/proc/{sys.argv[1]}/ns/user", os.O_RDONLY), 0x10000000):
    os._exit(2)
try:
    os.open(f"/proc/{sys.argv[1]}/ns/net", os.O_RDONLY)
except PermissionError:
    os._exit(1)
os._exit(0)
"""


def _closed(pid: int) -> bool:
    """Whether a process that joins a process's user namespace is refused its other namespaces."""
    argv = [sys.executable, "-I", "-S", "-c", _REACH, str(pid)]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 1


def _name(pid: int) -> str:
    return tree.text(pid, "comm").strip()


def _field(text: str, name: str) -> list[str]:
    return text.partition(f"\n{name}:")[2].partition("\n")[0].split()


def _status(outlook: Outlook, pid: int, who: str) -> None:
    text = tree.text(pid, "status")
    tracer = _field(text, "TracerPid")[0]
    if tracer != "0":
        outlook.add(
            "traced", f"{who} is traced by process {tracer}", "end the debugger or tracer, then try again"
        )
    mask = int(_field(Path("/proc/self/status").read_text(), "CapEff")[0], 16)
    if mask >> _CAP_SYS_RESOURCE & 1 or _link(pid, "user") != _link("self", "user"):
        return
    uids, gids = _field(text, "Uid"), _field(text, "Gid")
    if set(uids[:3]) != {str(os.getuid())} or set(gids[:3]) != {str(os.getgid())}:
        outlook.add(
            "rlimit",
            f"{who} runs as user {uids[0]}, whose limits cannot be read without CAP_SYS_RESOURCE, which this "
            "node lacks",
            "give the container a user namespace, or torpor the capability",
        )


def _link(pid: int | str, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")  # noqa: PTH115


def _namespaces(outlook: Outlook, init: int, pid: int, who: str) -> None:
    for kind in _NAMESPACES:
        if _link(pid, kind) != _link(init, kind):
            _nested(outlook, who, kind)
    for name, kind in _FOR_CHILDREN.items():
        with contextlib.suppress(OSError):
            if _link(pid, name) != _link(pid, kind):
                _nested(outlook, who, kind)


def _all_namespaces(pids: Sequence[int]) -> Iterator[str]:
    for pid in pids:
        for kind in (*_NAMESPACES, "mnt"):
            with contextlib.suppress(OSError):
                yield _link(pid, kind)


def _nested(outlook: Outlook, who: str, kind: str) -> None:
    outlook.add(
        f"namespace.{kind}",
        f"{who} has its own {kind} namespace within the container, of which CRIU dumps only one",
        "end it, or run it in a container of its own",
    )


def _memory(outlook: Outlook, init: int, pid: int, who: str, without_programs: frozenset[str]) -> None:
    """without_programs: devices that lie on file systems mounted noexec only."""
    host_ipc = _link(init, "ipc") == _link("self", "ipc")
    name, has_vdso = "", False
    with Path(f"/proc/{pid}/maps").open(errors="replace") as maps:
        for line in maps:
            name = line[73:] if len(line) > 73 else ""
            has_vdso = has_vdso or name == "[vdso]\n"
            if name.startswith("anon_inode:"):
                _inode(outlook, name.strip().removeprefix("anon_inode:"), who)
            elif name.startswith("/secretmem"):
                _secret(outlook, who)
            elif host_ipc and name.startswith("/SYSV"):
                outlook.add(
                    "ipc",
                    f"{who} is attached to a System V segment of the node's own IPC namespace",
                    "give the container an IPC namespace",
                )
            elif without_programs and name.startswith("/") and _runs_on(line) in without_programs:
                outlook.add(
                    "noexec",
                    f"{who} runs what lies on a file system that was mounted noexec later ({name.strip()}), "
                    "so that no restore may map it",
                    "mount it exec again before the checkpoint",
                )
    if name and not has_vdso and not outlook.has("vdso") and _stays_without_vdso(pid):
        outlook.add(
            "vdso",
            f"{who} has unmapped the kernel's own code (vDSO), without which CRIU cannot restore it",
            "start the program so that it keeps that",
        )


def _stays_without_vdso(pid: int) -> bool:
    """Whether it is no program that another one is taking the place of (exec), which gets it last."""
    if "[vdso]" not in Path("/proc/self/maps").read_text(errors="replace"):
        return False  # no kernel of that kind
    for _ in range(20):
        time.sleep(0.005)
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        if "[vdso]" in maps or not maps:
            return False
    return True


def _runs_on(line: str) -> str:
    """The device (major:minor) of a mapping that may be run, as mountinfo has it, else ""."""
    _, rights, _, device = line.split(None, 4)[:4]
    major, _, minor = device.partition(":")
    return f"{int(major, 16)}:{int(minor, 16)}" if "x" in rights else ""


def _secret(outlook: Outlook, who: str) -> None:
    outlook.add(
        "secret-memory",
        f"{who} has secret memory (memfd_secret), which nobody else can read",
        "start the program so that it does without",
    )


def _inode(outlook: Outlook, kind: str, who: str) -> None:
    if kind in _GOOD_INODES:
        return
    what, remedy = _INODES.get(
        kind, (f"a descriptor of the kind {kind}", "let the program close it before the checkpoint")
    )
    outlook.add(f"inode.{kind.strip('[]')}", f"{who} has {what}, which CRIU cannot dump", remedy)


# --- descriptors ---------------------------------------------------------------------------------------


def _descriptors(
    outlook: Outlook,
    pid: int,
    who: str,
    *,
    own_network: bool,
    opened: handles.Handles,
    unix: dict[int, str],
    watches: set[tuple[int, int]],
) -> None:
    mounts: frozenset[str] | None = None
    for number in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
        path = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError):
            link = places.read_link(outlook, path, f"descriptor {number} of {who}")
            opened.look(pid, number, link, who)
            if link.startswith("anon_inode:"):
                kind = link.removeprefix("anon_inode:")
                _inode(outlook, kind, who)
                if kind in ("inotify", "[fanotify]"):
                    watches.update(_watches(pid, number))
                elif kind == "[timerfd]" and _info(pid, number, "it_interval") != "(0, 0)":
                    outlook.timers.append((pid, int(number)))
                elif kind == "[eventfd]" and _info(pid, number, "eventfd-semaphore") == "1":
                    outlook.add(
                        "semaphore",
                        f"{who} has an eventfd that is a semaphore (EFD_SEMAPHORE), which would come back "
                        "as a counter",
                        "let the program close it before the checkpoint",
                    )
            elif link.startswith("socket:["):
                _socket(outlook, pid, int(number), who, own_network=own_network, unix=unix)
            elif link.startswith("pipe:["):
                if int(_info(pid, number, "flags"), 8) & os.O_DIRECT:
                    outlook.add("pipe", f"{who} has a pipe in packet mode (O_DIRECT)", "use a socket pair")
            elif link.startswith("/secretmem"):
                _secret(outlook, who)
            elif link.startswith("/") and not link.startswith(_UNMOUNTED):
                if link.startswith(("/dev/pts/", "/dev/ptmx")):
                    outlook.terminals.append((pid, int(number), int(_info(pid, number, "flags"), 8)))
                mounts = _mount_ids(pid) | opened.mounts.kinds.keys() if mounts is None else mounts
                known = _is_on(mounts, path, link)
                _file(outlook, path, link, f"{who}, descriptor {number},", known=known)


def _info(pid: int, number: str, name: str) -> str:
    text = "\n" + tree.descriptor(pid, number)
    return " ".join(_field(text, name)) or "0"


def _watches(pid: int, number: str) -> set[tuple[int, int]]:
    text = Path(f"/proc/{pid}/fdinfo/{number}").read_text(errors="replace")
    found = re.findall(r"^(?:inotify|fanotify) .*?\bino:([0-9a-f]+) sdev:([0-9a-f]+)", text, re.MULTILINE)
    return {(int(inode, 16), int(device, 16)) for inode, device in found}


def _mount_ids(pid: int) -> frozenset[str]:
    return frozenset(mount.id for mount in mountinfo.mounts(pid))


def _is_on(mounts: frozenset[str], path: str, link: str) -> bool:
    """Whether a descriptor's file lies on one of these mounts. One that has become another is not judged."""
    pin = os.open(path, os.O_PATH | os.O_CLOEXEC)  # what it was and where that lies are of one moment then
    try:
        now = os.readlink(f"/proc/self/fd/{pin}")  # noqa: PTH115
        return now != link or _info(os.getpid(), str(pin), "mnt_id") in mounts
    finally:
        os.close(pin)


def _file(outlook: Outlook, path: str, link: str, who: str, *, known: bool) -> None:
    if not known:
        if _magic(path) == _MQUEUE_MAGIC:
            _queue(outlook, f"{who} is the message queue {link}")
        else:
            outlook.add(
                "outside",
                f"{who} leads to {link}, which lies on no mount of the container",
                "start the container with pipes, or with a terminal, as its standard streams",
            )
        return
    deleted = link.endswith(" (deleted)")
    if not deleted and not link.startswith("/dev/"):
        return
    status = os.stat(path)  # noqa: PTH116
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
        size = status.st_blocks * 512
        if size > config.GHOST_LIMIT_BYTES:
            outlook.add(
                "ghost",
                f"{who} is a deleted file of {size >> 20} MiB, more than the "
                f"{config.GHOST_LIMIT_BYTES >> 20} MiB that CRIU carries",
                "let the program close it before the checkpoint",
            )
    elif stat.S_ISCHR(status.st_mode):
        if status.st_rdev == _TUN:
            outlook.add("tun", f"{who} is a tunnel device", "end the tunnel before the checkpoint")
        elif (major := os.major(status.st_rdev)) not in _TERMINALS and major != _MEMORY_DEVICE:
            outlook.add(
                "device", f"{who} is the device {link}", "let the program close it before the checkpoint"
            )


def _magic(path: str) -> int:
    """The kind of file system of a path, as statfs tells."""
    import ctypes

    buffer = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None).statfs(path.encode(), buffer):
        return 0
    return ctypes.c_long.from_buffer(buffer).value


def _socket(
    outlook: Outlook, pid: int, number: int, who: str, *, own_network: bool, unix: dict[int, str]
) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        copy = copy_of(pidfd, number)
    finally:
        os.close(pidfd)
    with copy:
        family, protocol = int(copy.family), copy.proto
        if family == socket.AF_UNIX:
            unix[os.fstat(copy.fileno()).st_ino] = who
        elif family == socket.AF_NETLINK and select.select([copy], [], [], 0)[0]:
            outlook.add_passing(
                "netlink",
                f"{who} has a netlink socket with messages that it has not read, which CRIU cannot dump",
                "try again once they are read",
            )
        elif family not in _FAMILIES:
            name = _FAMILY_NAMES.get(family, f"family {family}")
            outlook.add(
                "socket", f"{who} has a socket of {name}", "let the program close it before the checkpoint"
            )
        elif family in (socket.AF_INET, socket.AF_INET6):
            if protocol in _PROTOCOLS:
                outlook.add(
                    "protocol",
                    f"{who} has a socket of {_PROTOCOLS[protocol]}",
                    "start the program so that it uses TCP (net.mptcp.enabled=0 for Multipath TCP)",
                )
            elif protocol in _ICMP and copy.type == socket.SOCK_DGRAM and own_network:
                outlook.add(
                    "ping",
                    f"{who} has an ICMP socket, which a network namespace made again does not allow",
                    "give the container a network namespace by path, or end the program",
                )


def _outside_sockets(outlook: Outlook, init: int, pids: Sequence[int], unix: Mapping[int, str]) -> None:
    if not unix:
        return
    for inode in peers.unaccepted(Path(f"/proc/{init}/ns/net")) & unix.keys():
        outlook.add_passing(
            "unaccepted",
            f"{unix[inode]} has sent data on a unix connection that nobody has accepted, which CRIU cannot "
            "dump",
            "try again once the connection is accepted",
        )
    ends = peers.of_namespace(Path(f"/proc/{init}/ns/net"))
    suspects = {peer: unix[inode] for inode, peer in ends.items() if inode in unix and peer not in unix}
    # A socket that is under way in another one is nobody's, and goes along.
    for peer, holder in peers.holders(suspects, without=pids).items():
        outlook.add(
            "unix",
            f"{suspects[peer]} has a unix socket whose other end is with process {holder}, outside the "
            "container",
            "close that connection before the checkpoint",
        )


def _lost_sockets(outlook: Outlook, init: int, pids: Sequence[int], unix: Mapping[int, str]) -> None:
    if not unix or _link(init, "net") == _link("self", "net"):
        return
    lost = peers.alone(Path(f"/proc/{init}/ns/net"), unix)
    if lost - peers.holders(lost, without=pids).keys():
        outlook.add(
            "lost-socket",
            "a unix socket whose other end is closed is under way in another one, and open nowhere, which "
            "CRIU cannot restore",
            "try again once it is received",
        )


# --- mounts and message queues -------------------------------------------------------------------------


def own(spec: Mapping[str, Any], kind: str) -> bool:
    """Whether the container has a namespace of this kind that is made for it."""
    entries: list[dict[str, Any]] = spec.get("linux", {}).get("namespaces") or []
    return any(entry.get("type") == kind and not entry.get("path") for entry in entries)


def _message_queues(outlook: Outlook, init: int, spec: Mapping[str, Any]) -> None:
    place = f"/proc/{init}/root/dev/mqueue"
    if own(spec, "ipc") and _magic(place) == _MQUEUE_MAGIC:
        for name in os.listdir(place):  # noqa: PTH208
            _queue(outlook, f"the container has the POSIX message queue /{name}")


def _queue(outlook: Outlook, message: str) -> None:
    outlook.add("mqueue", f"{message}, which CRIU does not dump", "remove the queue before the checkpoint")
