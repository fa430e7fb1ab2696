"""What a gVisor image asks of a node and a spec.

runsc's image is a dump of the sandbox's kernel, which only runsc reads. So the needs come from the record:
the processes as `runsc ps` showed them, each with the most that its container's specification gave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from engines.api import IdMapping, ImageCorrupt, MountNeed, Needs, TaskNeeds
from engines.gvisor.image import RECORD, Record
from engines.gvisor.runsc import Task

_CAPABILITIES = (
    "chown dac_override dac_read_search fowner fsetid kill setgid setuid setpcap linux_immutable "
    "net_bind_service net_broadcast net_admin net_raw ipc_lock ipc_owner sys_module sys_rawio sys_chroot "
    "sys_ptrace sys_pacct sys_admin sys_boot sys_nice sys_resource sys_time sys_tty_config mknod lease "
    "audit_write audit_control setfcap mac_override mac_admin syslog wake_alarm block_suspend audit_read "
    "perfmon bpf checkpoint_restore"
)
_BITS: Mapping[str, int] = {f"CAP_{name.upper()}": 1 << n for n, name in enumerate(_CAPABILITIES.split())}
_KINDS = ("network", "pid", "mount", "ipc", "uts", "user", "cgroup", "time")


def needs_of(head: Mapping[str, str], record: Record) -> Needs:
    """The needs of an image. head: runsc's header. Raises ImageCorrupt if the specification is none."""
    del head
    try:
        return _needs(record)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ImageCorrupt(f"the specification in its {RECORD} cannot be read ({error!r})") from error


def pod_needs(head: Mapping[str, str], record: Record) -> dict[str, Needs]:
    """The needs of each container of a pod's image by its name; empty if it is no pod's. Raises ImageCorrupt
    if a specification is none.
    """
    return {
        name: needs_of(head, replace(record, spec=part.spec, mounts=part.mounts, tasks=part.tasks))
        for name, part in record.pod.items()
    }


def _needs(record: Record) -> Needs:
    process: Mapping[str, Any] = record.spec.get("process") or {}
    linux: Mapping[str, Any] = record.spec.get("linux") or {}
    return Needs(
        engine="gvisor",
        image_version=record.runsc,
        tasks=tuple(_task(task, process, str(record.spec.get("seccomp") or "")) for task in record.tasks),
        namespaces=dict(_namespaces(linux)),
        uid_map=_mappings(linux.get("uidMappings")),
        gid_map=_mappings(linux.get("gidMappings")),
        mounts=tuple(_mounts(record, linux)),
        files=record.files,
        terminal=bool(process.get("terminal")),
        memory_bytes=record.memory_bytes,
    )


def _task(task: Task, process: Mapping[str, Any], seccomp: str) -> TaskNeeds:
    user: Mapping[str, Any] = process.get("user") or {}
    sets: Mapping[str, Any] = process.get("capabilities") or {}
    uid, gid = task.uid, int(user.get("gid") or 0)
    return TaskNeeds(
        pid=task.pid,
        comm=task.name,
        uids=(uid, uid, uid, uid),
        gids=(gid, gid, gid, gid),
        groups=tuple(map(int, user.get("additionalGids") or ())),
        cap_inheritable=_mask(sets.get("inheritable")),
        cap_permitted=_mask(sets.get("permitted")),
        cap_effective=_mask(sets.get("effective")),
        cap_bounding=_mask(sets.get("bounding")),
        cap_ambient=_mask(sets.get("ambient")),
        no_new_privs=bool(process.get("noNewPrivileges")),
        # runsc applies a specification's filter to all processes, or to none if it is so set up.
        seccomp_mode="filter" if seccomp else "disabled",
        seccomp_filters=(seccomp,) if seccomp else (),
        lsm_profile=str(process.get("selinuxLabel") or process.get("apparmorProfile") or ""),
        rlimits={
            str(entry["type"]): (int(entry["soft"]), int(entry["hard"]))
            for entry in process.get("rlimits") or ()
        },
    )


def _mask(names: Iterable[str] | None) -> int:
    bits = 0
    for name in names or ():
        bits |= _BITS.get(str(name).upper(), 0)
    return bits


def _namespaces(
    linux: Mapping[str, Any],
) -> Iterator[tuple[str, Literal["own", "external", "host"]]]:
    given = {str(entry.get("type")): entry.get("path") for entry in linux.get("namespaces") or ()}
    for kind in _KINDS:
        if kind not in given:
            yield kind, "host"
        else:
            yield kind, "external" if given[kind] else "own"


def _mappings(entries: Iterable[Mapping[str, Any]] | None) -> tuple[IdMapping, ...]:
    return tuple(
        IdMapping(
            container_id=int(entry["containerID"]), host_id=int(entry["hostID"]), size=int(entry["size"])
        )
        for entry in entries or ()
    )


def _mounts(record: Record, linux: Mapping[str, Any]) -> Iterator[MountNeed]:
    """The specification's mounts, and what it hides or makes read-only, as runc's containers have it."""
    root: Mapping[str, Any] = record.spec.get("root") or {}
    read_only = bool(root.get("readonly"))
    yield MountNeed(destination="/", fstype="overlay", source="", external=True, readonly=read_only)
    for path, entry in record.mounts.items():
        options = [str(word) for word in entry.get("options") or ()]
        yield MountNeed(
            destination=path,
            fstype=str(entry.get("type") or ""),
            source=str(entry.get("source") or ""),
            external=entry.get("type") == "bind" or "bind" in options or "rbind" in options,
            readonly="ro" in options and "rw" not in options,
        )
    for key, fstype in (("maskedPaths", "tmpfs"), ("readonlyPaths", "proc")):
        for path in linux.get(key) or ():
            yield MountNeed(destination=str(path), fstype=fstype, source="", external=False, readonly=True)
