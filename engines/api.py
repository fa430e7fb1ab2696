"""The interface between torpor and a checkpoint engine.

An engine turns a container into an image directory and back. Where things are stands in the engine's
constructor (`EngineSettings`), what to do stands in a request; an engine keeps no state between calls,
because `create` and `start` run in different processes. The words are runc's and CRIU's own.

Third parties implement `CheckpointEngine`, publish a factory under the entry-point group
`torpor.engines`, and prove it with `engines.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

Capability = Literal[
    "leave-running",  # the container runs on after the dump
    "pre-dump",  # memory can be dumped beforehand while the container runs
    "tcp-established",  # established TCP connections are in the image
    "external-netns",  # restore enters the network namespace that the new spec names
    "lazy-pages",  # the container runs before its memory is there
    "clone",  # one image, many containers
    "held-restore",  # restored tasks exist but do not run until `release`
    "rootfs",  # the image itself holds what the container changed in its root file system
    "cold-start-after-failure",  # a failed restore leaves nothing that would hinder a cold start
    "phases",  # `on_phase` is called, and may veto
    "verdict",  # `verdict_path` is obeyed, whoever dies
    "gpu",
]

Severity = Literal["ok", "warn", "unknown", "refuse"]
After = Literal["running", "paused", "stopped", "unknown"]
Phase = Literal["frozen", "dumped", "restored"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at. An incompatibility is a finding, not an exception."""

    rule: str  # stable, dotted: "criu.smoke", "privileges.capabilities", "mounts.missing"
    severity: Severity
    message: str  # one sentence: what is the case, where
    remedy: str = ""  # what to do about it; empty where nothing needs doing

    def __post_init__(self) -> None:
        """Names in it come from containers: none may begin a line, or speak to a terminal."""
        object.__setattr__(self, "message", printable(self.message))
        object.__setattr__(self, "remedy", printable(self.remedy))


def printable(text: str) -> str:
    """A text with what cannot be printed written as Python escapes it."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Where things are on this node.

    runtime_path: the real OCI runtime (absolute).
    root_path: the runtime's state root (its --root) of this container's caller.
    state_path: a root-only directory of this container's own, on tmpfs, for configuration, sockets and logs
        that must not lie in the bundle; it outlives the call.
    search_path: what PATH must be for the runtime to find its helpers (criu, tar, nft).
    python_path: a directory that holds the `pycriu` package, None if it is importable as it is.
    runtime_args: global runtime options to repeat, for example ("--systemd-cgroup",).
    compress: make images smaller where the engine itself can, at the price of a longer pause.
    """

    runtime_path: Path
    root_path: Path
    state_path: Path
    search_path: str
    python_path: Path | None = None
    runtime_args: tuple[str, ...] = ()
    compress: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseInfo:
    """What is known when a phase is reached.

    pid: the container's init on the host. netns_path: its network namespace, None if it is the host's.
    lock_table: name of the nftables table that holds the traffic, None if nothing is locked.
    """

    pid: int
    netns_path: Path | None
    lock_table: str | None


OnPhase = Callable[[Phase, PhaseInfo], None]
"""Called at `frozen` (nothing runs, memory not yet copied), `dumped` (the image is complete, the source not
yet allowed to die) and `restored` (tasks exist, not yet allowed to run). Raising vetoes: the engine undoes
what it did and raises the same exception."""


Verdict = Literal["abort", "hold", "commit"]
"""What becomes of a dump that is cut short. `abort`, or no file: it is undone. `hold`: the source stays
frozen and locked until the verdict is another one, and `undo` raises. `commit`: the source ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """Dump a container.

    image_path: absent, or an empty directory; its parent exists. On failure nothing is left in it. Names
        that begin with `torpor-` are for its caller's files there, none for the engine's.
    parent_path: image directory of an earlier pre-dump, None for a full dump.
    release_network: when the source is gone, its network lock goes too, and its peers find their connections
        closed. Otherwise it stays, in a network namespace that outlives the container, for a restore that
        keeps them; until then nothing in that namespace sends or receives.
    timeout_s: deadline of the whole call, seconds.
    verdict_path: absolute; a file with a `Verdict` as its line, replaced by rename, of a dump that ends its
        source. Nothing is decided in it before; it says `commit` before on_phase returns from `dumped`. Needs
        the capability `verdict`.
    extra_args: runtime options the caller gave that have no field here, passed on as they are
        (for example "--file-locks").
    """

    container_id: str
    bundle_path: Path
    image_path: Path
    timeout_s: float
    parent_path: Path | None = None
    leave_running: bool = False
    release_network: bool = False
    on_phase: OnPhase | None = None
    verdict_path: Path | None = None
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """Make a container out of an image.

    bundle_path: bundle of the *new* container; its config.json gives namespaces, mounts and cgroup.
    pid_file_path: where the pid of the restored init is written, by rename, None for nowhere.
    console_socket_path: receives the pty master of a container that has a terminal.
    held: tasks must exist but not run until `release` (needs the capability `held-restore`).
    tcp: what becomes of connections that were established at the dump: `keep` or `close`.
    timeout_s: deadline of the whole call, seconds.
    """

    container_id: str
    bundle_path: Path
    image_path: Path
    timeout_s: float
    pid_file_path: Path | None = None
    console_socket_path: Path | None = None
    held: bool = False
    tcp: Literal["keep", "close"] = "close"
    on_phase: OnPhase | None = None
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRequest:
    """Let a held container run."""

    container_id: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpStats:
    """What a dump cost. Times in seconds, sizes in bytes; 0 where the engine does not tell.

    warnings: what did not go away with the source, in sentences for people; the image is good all the same.
    """

    frozen_s: float
    total_s: float
    image_bytes: int
    pages_bytes: int = 0
    freezing_s: float = 0.0
    memdump_s: float = 0.0
    memwrite_s: float = 0.0
    pages_scanned: int = 0
    pages_written: int = 0
    gpu_s: float = 0.0  # until the GPUs' memory was in host memory; not in frozen_s
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A restored container. pid: its init on the host; times in seconds."""

    pid: int
    total_s: float
    restore_s: float = 0.0
    forking_s: float = 0.0
    pages_restored: int = 0


# --- what an image asks of a node and of a spec --------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNeeds:
    """The privileges one task (thread) held at the dump, and will hold again.

    Ids are those inside the container's user namespace. Capability sets are bit masks, bit n = capability n.
    rlimits: name ("RLIMIT_NOFILE") to (soft, hard); 2**64-1 is unlimited.
    namespaces: kind to the engine's own id, 0 for the host's. sched_policy: "other", "batch", "idle", "fifo",
    "rr", "deadline". oom_score_adj: None where the engine does not tell.
    """

    pid: int  # in the container's pid namespace
    comm: str
    uids: tuple[int, int, int, int]  # real, effective, saved, filesystem
    gids: tuple[int, int, int, int]
    groups: tuple[int, ...]
    cap_inheritable: int
    cap_permitted: int
    cap_effective: int
    cap_bounding: int
    cap_ambient: int
    no_new_privs: bool
    seccomp_mode: Literal["disabled", "strict", "filter"]
    seccomp_filters: tuple[str, ...] = ()  # sha256 of each filter's program, outermost last
    lsm_profile: str = ""
    rlimits: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    namespaces: Mapping[str, int] = field(default_factory=dict[str, int])
    nice: int = 0
    sched_policy: str = "other"
    sched_priority: int = 0
    oom_score_adj: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MountNeed:
    """One mount point of the image. external: its source is given from outside at the restore.

    source: what is mounted; of an external one the name under which the engine asks for it. root: which part
    of it, as a path inside it; empty where the engine does not tell. readonly: the mount itself is read-only;
    it is so again after the restore, whatever the new spec says. The same goes for flags: those of "nosuid",
    "nodev" and "noexec" that it has, None where the engine does not tell.
    """

    destination: str
    fstype: str
    source: str
    external: bool
    readonly: bool = False
    root: str = ""
    flags: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNeed:
    """A file or directory that tasks hold and the image does not bring: it must be the same at restore.

    size_bytes: -1 where the engine did not record it; mode: permission bits, -1 likewise;
    build_id: hex of the ELF build id, empty if none or not told. kind: "any" where the engine does not tell.
    use: what tasks have it for: "open" means open or mapped, "socket" that a unix socket is bound in it or
    to it (then nothing at all may be there too), "deleted" that it was open and is made again for a moment,
    "link" that it keeps a file of which an open name was removed. writable: it is open for writing;
    executed: it is a task's program.
    """

    path: str  # inside the container
    size_bytes: int
    mode: int
    build_id: str = ""
    kind: Literal["file", "directory", "fifo", "socket", "any"] = "file"
    use: Literal["open", "working-directory", "watched", "socket", "deleted", "link"] = "open"
    writable: bool = False
    executed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LockNeed:
    """A lock that a task holds on a file and will take again. kind: "flock", "range" for those of fcntl, or a
    "lease", exclusive where it is one for writing.

    first, last: bytes of the file, inclusive; last None for all that follow.
    """

    path: str  # inside the container
    kind: Literal["flock", "range", "lease"]
    exclusive: bool
    first: int = 0
    last: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNeed:
    """An open device descriptor. kind: "c" or "b"; access: "r", "w" or "rw"."""

    path: str
    kind: Literal["c", "b"]
    major: int
    minor: int
    access: Literal["r", "w", "rw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivilegedNeed:
    """Something open that only one of these capabilities can make. what: in words, "a raw socket"."""

    what: str
    capabilities: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketNeed:
    """A TCP or UDP socket. address: textual; remote: empty unless connected.

    v6only: of IPv6, and leaves IPv4 to others. freebind: bound to an address that need not be there.
    interface: name of the network interface that it is bound to, "" for any.
    """

    family: Literal["inet", "inet6"]
    protocol: Literal["tcp", "udp", "other"]
    state: str  # "listen", "established", ...
    address: str
    port: int
    remote: str = ""
    remote_port: int = 0
    v6only: bool = False
    freebind: bool = False
    interface: str = ""

    @property
    def connected(self) -> bool:
        """Whether it is a TCP connection. Others CRIU makes again whatever becomes of connections."""
        return self.protocol == "tcp" and self.state not in {"listen", "closed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractNeed:
    """A unix socket bound to an abstract name of its network namespace.

    name: the bytes after the NUL that it begins with, in hex.
    """

    name: str
    kind: Literal["stream", "datagram", "seqpacket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeed:
    """A GPU that the container saw, in the order of the node it slept on.

    memory_bytes: what the container held on it, 0 if it did not use it. driver: version, "580.65.06".
    """

    uuid: str
    model: str
    memory_bytes: int
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IdMapping:
    """One line of a user namespace's uid or gid map."""

    container_id: int
    host_id: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an image asks of a node and of a spec, told by the engine that made it (`inspect`).

    namespaces: for each kind "own" (made again at restore), "external" (the new spec must give one) or
    "host" (the dumped tasks lived in the host's).
    """

    engine: str
    image_version: str  # the engine's own format version
    tasks: tuple[TaskNeeds, ...]
    namespaces: Mapping[str, Literal["own", "external", "host"]]
    # Process ids beside the tasks' that a restore takes: of zombies, and of first processes of groups and
    # sessions that are gone.
    dead_pids: tuple[int, ...] = ()
    uid_map: tuple[IdMapping, ...] = ()
    gid_map: tuple[IdMapping, ...] = ()
    mounts: tuple[MountNeed, ...] = ()
    files: tuple[FileNeed, ...] = ()
    locks: tuple[LockNeed, ...] = ()
    devices: tuple[DeviceNeed, ...] = ()
    sockets: tuple[SocketNeed, ...] = ()
    abstract: tuple[AbstractNeed, ...] = ()
    terminal: bool = False
    memory_bytes: int = 0  # resident memory in the image, shared memory and file systems in memory included
    shared_with_host: tuple[str, ...] = ()  # open descriptors that lead out of the container, in words
    privileged: tuple[PrivilegedNeed, ...] = ()
    lock_table: str = ""  # name of the network lock that the dump left
    droppable_mappings: bool = False  # MAP_DROPPABLE: needs kernel 6.11
    xsave: bool | None = None  # tasks carry an XSAVE area; None if the engine does not tell
    gpus: tuple[GpuNeed, ...] = ()
    arch: str = ""  # as in `uname -m`, "" if the engine does not tell
    page_size_bytes: int = 0  # 0 likewise
    cpu_flags: tuple[str, ...] | None = None  # of the dump's processor, where the engine wrote them down
    xstate: tuple[str, ...] = ()  # register sets in use beyond SSE: "avx", "avx512", "pkru", "amx", "mpx"
    guard_pages: bool = False  # MADV_GUARD_INSTALL: needs kernel 6.13
    shadow_stack: bool = False
    hugepages: Mapping[str, int] = field(default_factory=dict[str, int])  # pages mapped, by size in bytes
    lsm: str = ""  # the security module of the dump: "apparmor", "selinux"


@runtime_checkable
class CheckpointEngine(Protocol):
    """What an engine must do. `engines.testing` holds the contract as tests."""

    @property
    def name(self) -> str:
        """Short name, recorded in every image: "criu", "gvisor", "criu-cuda", "fake"."""
        ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Static, the same on every host. A request for anything else is refused before touching."""
        ...

    def probe(self) -> tuple[Finding, ...]:
        """What this node allows. Never raises; a smoke test, not a version comparison."""
        ...

    def inspect(self, image_path: Path, /) -> Needs:
        """What the image asks of a node and a spec. Raises ImageError."""
        ...

    def pre_dump(self, request: CheckpointRequest, /) -> DumpStats:
        """Copy memory while the container runs. Raises NotSupported, DumpFailed."""
        ...

    def checkpoint(self, request: CheckpointRequest, /) -> DumpStats:
        """Dump. On any failure the container runs (or is paused) as before and no image is left."""
        ...

    def restore(self, request: RestoreRequest, /) -> Restored:
        """Restore. On any failure nothing is left of the new container and the image is intact."""
        ...

    def release(self, request: ReleaseRequest, /) -> None:
        """Let a held container run."""
        ...

    def undo(self, container_id: str, /) -> None:
        """Undo whatever an earlier, killed call of this engine left half-done for the container.

        After a dump that died: thaw, unlock, sockets out of repair mode, no partial image. After a restore
        that died: no task, mount, lock or runtime state left. Idempotent; raises nothing if nothing is left.
        """
        ...

    def discard(self, image_path: Path, /) -> None:
        """Remove an image directory. Idempotent."""
        ...


# --- GPUs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process of a container that uses GPUs.

    pid: on the host. state: "running", "locked", "suspended" (its memory is in the host's) or "failed".
    gpus: UUID to bytes held on it, or to be held again.
    """

    pid: int
    comm: str
    state: Literal["running", "locked", "suspended", "failed"]
    gpus: Mapping[str, int]


@runtime_checkable
class GpuEngine(CheckpointEngine, Protocol):
    """What an engine with the capability `gpu` does beside: take a running container off its GPUs."""

    def gpu_processes(self, container_id: str, /) -> tuple[GpuProcess, ...]:
        """Who uses a GPU in a container. Raises EngineError."""
        ...

    def suspend(self, container_id: str, /, *, timeout_s: float) -> tuple[GpuProcess, ...]:
        """Move the GPU memory of a container into host memory; its calls of the GPU wait from then on.

        On failure the container runs as before. Raises InvalidRequest if it uses no GPU or is suspended.
        """
        ...

    def resume(
        self, container_id: str, /, *, timeout_s: float, pairs: Mapping[str, str]
    ) -> tuple[GpuProcess, ...]:
        """Move it back. pairs: UUID of an old GPU to that of the new one; the others go where they were.

        On failure it stays suspended. Raises InvalidRequest if it is not suspended or a GPU does not fit.
        """
        ...


@runtime_checkable
class Judge(Protocol):
    """What an engine may offer besides: what only it knows about an image and this node."""

    def judge(self, image_path: Path, /) -> tuple[Finding, ...]:
        """What would keep this node from restoring the image, before anything is touched. Raises ImageError.

        Worth most for an engine without `held-restore`, whose restore happens only in `start`.
        """
        ...


# --- errors --------------------------------------------------------------------------------------------


class EngineError(Exception):
    """A call of an engine failed.

    after: in what state the container is now. log_path: the engine's own log, None if there is none.
    undone: nothing is left of the call; False if something would not go away, which the message names.
    The message has the form `could not <verb> <noun> 'id': <cause>; <what to do>`.
    """

    def __init__(
        self, message: str, *, after: After = "unknown", log_path: Path | None = None, undone: bool = True
    ) -> None:
        super().__init__(message)
        self.after: After = after
        self.undone = undone
        self.log_path = log_path


class InvalidRequest(EngineError):
    """The request makes no sense; nothing was touched."""


class NotSupported(EngineError):
    """The engine lacks the capability; nothing was touched."""


class EngineUnavailable(EngineError):
    """The engine cannot work on this node; nothing was touched."""


class ImageError(EngineError):
    """Something is wrong with an image."""


class ImageNotFound(ImageError):
    """There is no such image."""


class ImageExists(ImageError):
    """An image is already there."""


class ImageCorrupt(ImageError):
    """The image is damaged or incomplete."""


class ImageIncompatible(ImageError):
    """The image cannot be restored into this container or on this node."""


class WiderPrivileges(ImageError):
    """The image holds more than the new container may have."""


class DumpFailed(EngineError):
    """The dump failed and was undone."""


class RestoreFailed(EngineError):
    """The restore failed and was undone."""


class EngineTimeout(EngineError):
    """The deadline passed; the call was killed and undone."""
