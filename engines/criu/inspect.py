"""What a CRIU image asks of a node and of a spec, read from the image itself.

Page files are never opened: the cost depends on the number of tasks, mappings and files, not on memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from engines.api import IdMapping, ImageCorrupt, MountNeed, Needs, TaskNeeds
from engines.criu import descriptors, locks, processor, shared
from engines.criu.images import ImageReader, Message, text
from engines.criu.images import load_all as load_all
from engines.criu.wire import table_of_run

ENGINE = "criu"
_NAMESPACES: Mapping[str, str] = {
    "network": "net_ns_id",
    "pid": "pid_ns_id",
    "mount": "mnt_ns_id",
    "ipc": "ipc_ns_id",
    "uts": "uts_ns_id",
    "user": "user_ns_id",
    "cgroup": "cgroup_ns_id",
    "time": "time_ns_id",
}
_RLIMITS = (
    *("RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_DATA", "RLIMIT_STACK", "RLIMIT_CORE", "RLIMIT_RSS"),
    *("RLIMIT_NPROC", "RLIMIT_NOFILE", "RLIMIT_MEMLOCK", "RLIMIT_AS", "RLIMIT_LOCKS", "RLIMIT_SIGPENDING"),
    *("RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_RTTIME"),
)
_SECCOMP_MODES: tuple[Literal["disabled", "strict", "filter"], ...] = ("disabled", "strict", "filter")
_FSTYPES: Mapping[int, str] = {
    1: "proc",
    2: "sysfs",
    3: "devtmpfs",
    5: "tmpfs",
    6: "devpts",
    9: "securityfs",
    11: "debugfs",
    12: "cgroup",
    14: "mqueue",
    15: "fuse",
    17: "overlay",
    18: "autofs",
    19: "tracefs",
    23: "cgroup2",
}
_POLICIES = ("other", "fifo", "rr", "batch", "policy 4", "idle", "deadline")
_RESET_ON_FORK = 0x40000000
_TASK_DEAD, _TASK_ZOMBIE = 2, 6
_MS_RDONLY = 1
_MOUNT_FLAGS = (("nosuid", 2), ("nodev", 4), ("noexec", 8))
_AT_PAGESZ = 6
_LSMS: Mapping[int, str] = {1: "selinux", 2: "apparmor"}


def inspect(image_path: Path, python_path: Path | None) -> Needs:
    """What the image asks of a node and of a spec.

    image_path: the directory CRIU wrote. python_path: a directory that holds `pycriu`, None if it is
    importable as it is. Raises ImageNotFound, ImageCorrupt, EngineUnavailable (no pycriu).
    """
    reader = ImageReader(image_path, python_path)
    inventory = reader.one("inventory.img", "INVENTORY")
    if not inventory.HasField("root_ids"):
        raise _corrupt(reader, "inventory.img does not tell the host's namespaces from the container's")
    processes = reader.read("pstree.img", "PSTREE")
    if not processes:
        raise _corrupt(reader, "pstree.img names no task")
    host = {kind: int(getattr(inventory.root_ids, name)) for kind, name in _NAMESPACES.items()}
    programs = _seccomp_programs(reader)
    init: Mapping[str, int] = {}
    tasks: list[TaskNeeds] = []
    xsave: bool | None = None
    memory_bytes, page_bytes, arch = 0, 0, ""
    mappings = processor.Mappings()
    state: set[str] = set()
    homes: set[int] = set()
    executed: set[int] = set()
    tables: dict[int, int] = {}
    dead: set[int] = set()
    for process in processes:
        core = reader.one(f"core-{process.pid}.img", "CORE")
        if int(core.tc.task_state) in (_TASK_DEAD, _TASK_ZOMBIE):
            dead.add(int(process.pid))
            continue  # runs nothing, holds nothing
        xsave = _xsave(core) if xsave is None else xsave
        ids = _ids(reader, process.pid, core)
        tables[int(process.pid)] = int(ids.files_id)
        homes |= _home(reader, process.pid)
        numbers = {kind: int(getattr(ids, name)) for kind, name in _NAMESPACES.items()}
        init = init or numbers
        namespaces = {kind: 0 if number == host[kind] else number for kind, number in numbers.items()}
        rlimits = _rlimits(core)
        for tid in list(process.threads) or [process.pid]:
            thread = core if tid == process.pid else reader.one(f"core-{tid}.img", "CORE")
            state.update(processor.state([thread]))
            tasks.append(
                _task(
                    reader,
                    tid,
                    core,
                    thread,
                    programs=programs,
                    rlimits=rlimits,
                    namespaces=namespaces,
                )
            )
        arch = arch or processor.machine(core)
        size, page_bytes, program = _memory(reader, process.pid, mappings)
        executed.add(program)
        memory_bytes += size
    if not tasks:
        raise _corrupt(reader, "it holds no live task")
    return _needs(
        reader,
        inventory,
        tuple(tasks),
        init=init,
        host=host,
        xsave=xsave,
        memory_bytes=memory_bytes,
        page_bytes=page_bytes,
        mappings=mappings,
        state=tuple(sorted(state)),
        arch=arch,
        homes=homes,
        executed=executed,
        tables=tables,
        dead_pids=tuple(sorted(dead | _leaders(processes) - {task.pid for task in tasks})),
    )


def _needs(
    reader: ImageReader,
    inventory: Message,
    tasks: tuple[TaskNeeds, ...],
    *,
    init: Mapping[str, int],
    host: Mapping[str, int],
    xsave: bool | None,
    memory_bytes: int,
    page_bytes: int,
    mappings: processor.Mappings,
    state: tuple[str, ...],
    arch: str,
    homes: set[int],
    executed: set[int],
    tables: Mapping[int, int],
    dead_pids: tuple[int, ...],
) -> Needs:
    entries = {
        number: reader.read(name, "MNTS")
        for number in sorted({task.namespaces["mount"] or host["mount"] for task in tasks})
        if reader.exists(name := f"mountpoints-{number}.img")
    }
    mounts = tuple(_mount(entry) for entry in entries.get(init["mount"], ()))
    mounted = [entry for table in entries.values() for entry in table]
    opened = descriptors.read(reader, mounted, homes, executed)
    uid_map, gid_map = _id_maps(reader, init["user"])
    run_id = str(inventory.dump_criu_run_id)
    return Needs(
        engine=ENGINE,
        image_version=str(inventory.img_version),
        tasks=tasks,
        namespaces=_namespaces(reader, init, host),
        dead_pids=dead_pids,
        uid_map=uid_map,
        gid_map=gid_map,
        mounts=mounts,
        files=opened.files,
        locks=locks.read(reader, tables),
        devices=opened.devices,
        sockets=opened.sockets,
        abstract=opened.abstract,
        terminal=opened.terminal
        or any(m.destination == "/dev/console" and m.fstype == "devpts" for m in mounts),
        memory_bytes=memory_bytes + shared.size(reader, mounted, page_bytes),
        privileged=opened.privileged,
        shared_with_host=(*opened.shared, *_host_descriptors(opened, host)),
        lock_table=table_of_run(run_id) if run_id else "",
        droppable_mappings=mappings.droppable,
        xsave=xsave,
        arch=arch,
        page_size_bytes=page_bytes,
        cpu_flags=processor.written_flags(reader),
        xstate=state,
        guard_pages=mappings.guards,
        shadow_stack=mappings.shadow_stack,
        hugepages=mappings.huge,
        lsm=_LSMS.get(int(inventory.lsmtype), ""),
    )


# --- tasks ---------------------------------------------------------------------------------------------


def _task(
    reader: ImageReader,
    tid: int,
    core: Message,
    thread: Message,
    *,
    programs: list[tuple[str, int | None]],
    rlimits: Mapping[str, tuple[int, int]],
    namespaces: Mapping[str, int],
) -> TaskNeeds:
    own = thread.thread_core
    # Images of old CRIUs have a file of their own for the credentials.
    creds = own.creds if own.HasField("creds") else reader.one(f"creds-{tid}.img", "CREDS")
    mode = int(own.seccomp_mode) if own.HasField("seccomp_mode") else int(core.tc.old_seccomp_mode)
    if own.HasField("seccomp_filter"):
        innermost: int | None = int(own.seccomp_filter)
    else:
        innermost = int(core.tc.old_seccomp_filter) if core.tc.HasField("old_seccomp_filter") else None
    if mode >= len(_SECCOMP_MODES):
        raise _corrupt(reader, f"task {tid} has the unknown seccomp mode {mode}")
    return TaskNeeds(
        pid=tid,
        comm=text(own.comm or core.tc.comm),
        uids=(int(creds.uid), int(creds.euid), int(creds.suid), int(creds.fsuid)),
        gids=(int(creds.gid), int(creds.egid), int(creds.sgid), int(creds.fsgid)),
        groups=tuple(int(group) for group in creds.groups),
        cap_inheritable=_mask(creds.cap_inh),
        cap_permitted=_mask(creds.cap_prm),
        cap_effective=_mask(creds.cap_eff),
        cap_bounding=_mask(creds.cap_bnd),
        cap_ambient=_mask(creds.cap_amb),
        no_new_privs=bool(creds.no_new_privs),
        seccomp_mode=_SECCOMP_MODES[mode],
        seccomp_filters=_chain(reader, programs, innermost) if mode == 2 else (),
        lsm_profile=text(creds.lsm_profile),
        rlimits=rlimits,
        namespaces=namespaces,
        nice=int(own.sched_nice),
        sched_policy=_policy(int(own.sched_policy)),
        sched_priority=int(own.sched_prio),
        oom_score_adj=int(core.tc.oom_score_adj) if core.tc.HasField("oom_score_adj") else None,
    )


def _leaders(processes: Sequence[Message]) -> set[int]:
    """First processes of the groups and sessions that there are. CRIU makes those that are gone for a while,
    except of what the first task itself was born into.
    """
    born_into = {0, int(processes[0].pgid), int(processes[0].sid)}
    return {int(number) for process in processes for number in (process.pgid, process.sid)} - born_into


def _policy(number: int) -> str:
    number &= ~_RESET_ON_FORK
    return _POLICIES[number] if number < len(_POLICIES) else f"policy {number}"


def _mask(words: Iterable[int]) -> int:
    return sum(int(word) << (32 * index) for index, word in enumerate(words))


def _rlimits(core: Message) -> dict[str, tuple[int, int]]:
    pairs = core.tc.rlimits.rlimits
    return {name: (int(pair.cur), int(pair.max)) for name, pair in zip(_RLIMITS, pairs, strict=False)}


def _seccomp_programs(reader: ImageReader) -> list[tuple[str, int | None]]:
    """Digest of every filter's program, and the index of the filter that was there before it."""
    if not reader.exists("seccomp.img"):
        return []
    entry = reader.one("seccomp.img", "SECCOMP")
    return [
        (hashlib.sha256(item.filter).hexdigest(), int(item.prev) if item.HasField("prev") else None)
        for item in entry.seccomp_filters
    ]


def _chain(
    reader: ImageReader, programs: list[tuple[str, int | None]], innermost: int | None
) -> tuple[str, ...]:
    chain: list[str] = []
    number = innermost
    while number is not None:
        if number >= len(programs) or len(chain) > len(programs):
            raise _corrupt(reader, "seccomp.img lacks a filter that a task has")
        digest, number = programs[number]
        chain.append(digest)
    return tuple(chain)


def _xsave(core: Message) -> bool | None:
    if not core.HasField("thread_info"):
        return None
    return bool(core.thread_info.fpregs.HasField("xsave"))


# --- memory --------------------------------------------------------------------------------------------


def _memory(reader: ImageReader, pid: int, mappings: processor.Mappings) -> tuple[int, int, int]:
    """Bytes that one process has in the image or in its parents, the size of a page, and the number of the
    file that is its program.
    """
    mm = reader.one(f"mm-{pid}.img", "MM")
    mappings.add(mm)
    pages = shared.pages(reader, f"pagemap-{pid}.img")
    words = [int(word) for word in mm.mm_saved_auxv]
    page_bytes = dict(zip(words[::2], words[1::2], strict=False)).get(_AT_PAGESZ, 4096)
    return pages * page_bytes, page_bytes, int(mm.exe_file_id)


# --- namespaces and mounts -----------------------------------------------------------------------------


def _ids(reader: ImageReader, pid: int, core: Message) -> Message:
    return core.ids if core.HasField("ids") else reader.one(f"ids-{pid}.img", "IDS")


def _home(reader: ImageReader, pid: int) -> set[int]:
    """The number of the file that is a process's working directory."""
    name = f"fs-{pid}.img"
    return {int(reader.one(name, "FS").cwd_id)} if reader.exists(name) else set()


def _namespaces(
    reader: ImageReader, init: Mapping[str, int], host: Mapping[str, int]
) -> dict[str, Literal["own", "external", "host"]]:
    """The inventory records the namespaces of the CRIU that made the dump: those are the host's."""
    kinds: dict[str, Literal["own", "external", "host"]] = {}
    for kind, number in init.items():
        if number == host[kind]:
            kinds[kind] = "host"
        elif kind == "network" and _external_network(reader, number):
            kinds[kind] = "external"
        else:
            kinds[kind] = "own"
    return kinds


def _external_network(reader: ImageReader, number: int) -> bool:
    """Whether the new spec must name a network namespace. Without a file an empty one is made."""
    name = f"netns-{number}.img"
    return reader.exists(name) and bool(reader.one(name, "NETNS").ext_key)


def _host_descriptors(opened: descriptors.Opened, host: Mapping[str, int]) -> Iterable[str]:
    kinds = {number: kind for kind, number in host.items()}
    for number in opened.namespaces:
        if number in kinds:
            yield f"an open descriptor of the host's {kinds[number]} namespace"


def _id_maps(reader: ImageReader, number: int) -> tuple[tuple[IdMapping, ...], tuple[IdMapping, ...]]:
    name = f"userns-{number}.img"
    if not reader.exists(name):
        return (), ()
    entry = reader.one(name, "USERNS")
    return _extents(entry.uid_map), _extents(entry.gid_map)


def _extents(extents: Iterable[Message]) -> tuple[IdMapping, ...]:
    return tuple(
        IdMapping(container_id=int(extent.first), host_id=int(extent.lower_first), size=int(extent.count))
        for extent in extents
    )


def _mount(entry: Message) -> MountNeed:
    destination = "/" + text(entry.mountpoint).removeprefix(".").lstrip("/")
    flags = int(entry.flags)
    return MountNeed(
        destination=destination,
        fstype=_FSTYPES.get(int(entry.fstype), text(entry.fsname) or "other"),
        source=text(entry.ext_key) or text(entry.source),
        # The root is given by the new bundle too, though CRIU does not mark it.
        external=destination == "/" or bool(entry.ext_mount) or bool(entry.ext_key),
        readonly=bool(flags & _MS_RDONLY),
        root=text(entry.root),
        flags=tuple(name for name, bit in _MOUNT_FLAGS if flags & bit),
    )


def _corrupt(reader: ImageReader, cause: str) -> ImageCorrupt:
    return ImageCorrupt(
        f"could not read image '{reader.path}': {cause}; take the checkpoint again, or copy it again"
    )
