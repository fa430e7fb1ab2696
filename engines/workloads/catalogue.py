"""The list of workloads: what runs in a container to see whether its state survives a checkpoint.

Each is a program of `engines/workloads/programs`, run by Python without site packages inside the container.
It says `ready`; on SIGUSR1 it looks at its state and says `ok` or `bad: WHY`; what the machine cannot give is
`absent: WHY`. A workload of a real service has its Debian packages in `packages`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

PROGRAMS = Path(__file__).resolve().parent / "programs"

Wish = Literal[
    "user-namespace",  # ids of the container are others on the node
    "terminal",  # process.terminal
    "cgroup-mount",  # a cgroup file system that may be written to
    "seccomp-filter",  # mkdir answers with error 118
    "no-io-uring",  # io_uring answers ENOSYS
    "host-ipc",  # the node's IPC namespace
    "outside-socket",  # /outside/server.sock echoes
    "outside-file",  # standard error is a file of the node
    "volume",  # /volume is a directory of the node
    "all-capabilities",
    "tun-device",
    "unmasked-network",  # /proc/sys may be written to, loopback is up
]
"""What the container must have beside the ordinary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One workload.

    summary: what it holds, a few words. args: of its program. packages: Debian packages that its root file
    system is made of; empty: the machine's own Python. heavy: takes long, or much memory. ready_s: how long
    it may take to become ready, seconds.
    """

    name: str
    summary: str
    program: str
    args: tuple[str, ...] = ()
    wishes: frozenset[Wish] = field(default_factory=frozenset[Wish])
    packages: tuple[str, ...] = ()
    heavy: bool = False
    ready_s: float = 30.0


# One root file system for all the light services, so that Python comes with it only once.
_LIGHT = ("redis-server", "nginx-light", "nodejs", "python3", "python3-numpy")


def _of(
    name: str,
    summary: str,
    *wishes: Wish,
    program: str = "",
    args: tuple[str, ...] = (),
    packages: tuple[str, ...] = (),
    heavy: bool = False,
    ready_s: float = 30.0,
) -> Workload:
    return Workload(
        name=name,
        summary=summary,
        program=program or name.replace("-", "_"),
        args=args,
        wishes=frozenset(wishes),
        packages=packages,
        heavy=heavy,
        ready_s=ready_s,
    )


WORKLOADS: tuple[Workload, ...] = (
    _of("counter", "a counter and a mebibyte of memory"),
    _of("threads", "20 threads: thread-locals, locks, conditions (futexes)"),
    _of("family", "50 children, sessions, process groups, zombies"),
    _of("pipes", "pipes, FIFOs and socket pairs with unread bytes"),
    _of("packet-pipe", "a pipe in packet mode"),
    _of("unix-sockets", "stream, dgram, seqpacket; a descriptor under way"),
    _of("tcp", "listeners v4 and v6, connections inside, unread bytes"),
    _of("udp", "bound and connected sockets"),
    _of("raw-sockets", "raw and netlink sockets"),
    _of("timers", "timerfd (2 ms too), interval timers, alarm, monotonic clock"),
    _of("posix-timers", "timer_create with signals"),
    _of("signals", "pending, blocked and queued signals, handlers"),
    _of("descriptors", "eventfd, epoll, inotify, signalfd, memfd"),
    _of("pidfd", "a descriptor of a process"),
    _of("event-semaphore", "an eventfd that is a semaphore"),
    _of("posix-ipc", "POSIX shared memory and named semaphores"),
    _of("sysv-ipc", "System V shared memory, semaphores, messages"),
    _of("mqueue", "a POSIX message queue"),
    _of("mappings", "private, shared, file-backed, a hole in memory, protections"),
    _of("sparse-files", "files with holes, written and mapped"),
    _of("files", "deleted, appended, hard-linked files; positions"),
    _of("volume", "files on a volume of the node", "volume", args=("kept",)),
    _of("volume-deleted", "a deleted file of a volume", "volume", program="volume", args=("deleted",)),
    _of("locks", "flock, record and open-file-description locks"),
    _of("lease", "a lease on a file"),
    _of("ptys", "pseudo terminals and a session on one"),
    _of("terminal", "the container's own terminal", "terminal"),
    _of("limits", "resource limits, nice value, umask, prctl"),
    _of("affinity", "threads bound to processors, a scheduling policy"),
    _of("cgroups", "a child in a cgroup below", "cgroup-mount", "all-capabilities"),
    _of("mounts", "tmpfs and binds made inside", "all-capabilities", args=("plain",)),
    _of(
        "mounts-overlay", "an overlay mounted inside", "all-capabilities", program="mounts", args=("overlay",)
    ),
    _of(
        "namespace-mnt", "a child's own mount namespace", "all-capabilities", program="nested", args=("mnt",)
    ),
    _of(
        "namespace-net",
        "a child's own network namespace",
        "all-capabilities",
        program="nested",
        args=("net",),
    ),
    _of("namespace-uts", "a child's own UTS namespace", "all-capabilities", program="nested", args=("uts",)),
    _of("namespace-ipc", "a child's own IPC namespace", "all-capabilities", program="nested", args=("ipc",)),
    _of("namespace-pid", "a child's own PID namespace", "all-capabilities", program="nested", args=("pid",)),
    _of(
        "namespace-user", "a child's own user namespace", "all-capabilities", program="nested", args=("user",)
    ),
    _of(
        "namespace-time", "a child's own time namespace", "all-capabilities", program="nested", args=("time",)
    ),
    _of(
        "namespace-cgroup",
        "a child's own cgroup namespace",
        "all-capabilities",
        program="nested",
        args=("cgroup",),
    ),
    _of("user", "a user without root", program="nonroot"),
    _of("user-namespace", "a user without root in a user namespace", "user-namespace", program="nonroot"),
    _of("seccomp", "a seccomp filter", "seccomp-filter"),
    _of("sqlite", "SQLite in mid-transaction"),
    _of("gigabyte", "1 GiB of memory with a checksum", heavy=True, ready_s=60),
    _of("huge-ghost", "a deleted open file of 300 MiB", heavy=True),
    _of("numpy-threads", "Python with NumPy threads", packages=_LIGHT),
    _of("redis", "Redis: open transaction, subscription", packages=_LIGHT),
    _of("nginx", "nginx: kept-alive connection, half a download", packages=_LIGHT),
    _of("node", "Node.js, io_uring denied", "no-io-uring", packages=_LIGHT),
    _of(
        "postgresql",
        "PostgreSQL: open transaction, waiting lock (in a user namespace)",
        "user-namespace",
        packages=("postgresql", "dash", "python3"),
        heavy=True,
        ready_s=120,
    ),
    _of(
        "java",
        "a Java virtual machine",
        packages=("default-jre-headless", "libecj-java", "python3"),
        heavy=True,
        ready_s=120,
    ),
    _of("io-uring", "an io_uring"),
    _of(
        "io-uring-denied",
        "an io_uring user that falls back",
        "no-io-uring",
        program="io_uring",
        args=("denied",),
    ),
    _of("userfaultfd", "a userfaultfd", "all-capabilities"),
    _of("secret-memory", "memfd_secret"),
    _of("perf-event", "a performance counter", "all-capabilities"),
    _of("vsock", "a socket to the hypervisor"),
    _of("mptcp", "Multipath TCP"),
    _of("ping", "an unprivileged ICMP socket", "unmasked-network"),
    _of("tun", "a tunnel device", "all-capabilities", "tun-device"),
    _of("outside-socket", "a unix socket to a server on the node", "outside-socket"),
    _of("outside-file", "an open file of the node", "outside-file"),
    _of("inotify-file", "inotify on single files"),
    _of("host-ipc", "System V segments of the node", "host-ipc", program="host_segment"),
    _of("stopped", "a child in SIGSTOP"),
    _of("traced", "a child under a debugger", "all-capabilities"),
)


def find(name: str) -> Workload | None:
    """The workload of this name, None if there is none."""
    return next((workload for workload in WORKLOADS if workload.name == name), None)
