"""The shape of an OCI runtime specification: what is read of it is of the type that the standard says.

Checked once, where a config.json is read, so that nothing behind it has to doubt. Keys that torpor does not
read are left alone: specifications grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

import msgspec

_U32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
_I64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Size = Annotated[int, msgspec.Meta(ge=0)]
_MAX_U64 = (1 << 64) - 1


class _Part(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """What is absent is null: the same to every runtime."""


class _Mapping(_Part, frozen=True):
    container_id: _U32 = msgspec.field(name="containerID")
    host_id: _U32 = msgspec.field(name="hostID")
    size: _U32


class _User(_Part, frozen=True):
    uid: _U32 = 0
    gid: _U32 = 0
    umask: _U32 | None = None
    additional_gids: list[_U32] | None = None


class _Capabilities(_Part, frozen=True):
    bounding: list[str] | None = None
    effective: list[str] | None = None
    inheritable: list[str] | None = None
    permitted: list[str] | None = None
    ambient: list[str] | None = None


class _Rlimit(_Part, frozen=True):
    type: str
    soft: _Size = 0
    hard: _Size = 0


class _Scheduler(_Part, frozen=True):
    policy: str = ""
    nice: _I64 | None = None
    priority: _I64 | None = None


class _IoPriority(_Part, frozen=True):
    kind: str | None = msgspec.field(name="class", default=None)
    priority: _I64 | None = None


class _Process(_Part, frozen=True):
    terminal: bool | None = None
    user: _User | None = None
    args: list[str] | None = None
    env: list[str] | None = None
    cwd: str | None = None
    capabilities: _Capabilities | None = None
    rlimits: list[_Rlimit] | None = None
    no_new_privileges: bool | None = None
    apparmor_profile: str | None = None
    selinux_label: str | None = None
    oom_score_adj: _I64 | None = None
    scheduler: _Scheduler | None = None
    io_priority: _IoPriority | None = None
    exec_cpu_affinity: dict[str, str] | None = msgspec.field(name="execCPUAffinity", default=None)


class _Root(_Part, frozen=True):
    path: str | None = None
    readonly: bool | None = None


class _Mount(_Part, frozen=True):
    destination: str
    type: str | None = None
    source: str | None = None
    options: list[str] | None = None
    uid_mappings: list[_Mapping] | None = None
    gid_mappings: list[_Mapping] | None = None


class _Namespace(_Part, frozen=True):
    type: str
    path: str | None = None


class _Device(_Part, frozen=True):
    path: str
    type: str | None = None
    major: _I64 | None = None
    minor: _I64 | None = None
    file_mode: _U32 | None = None
    uid: _U32 | None = None
    gid: _U32 | None = None


class _DeviceRule(_Part, frozen=True):
    allow: bool | None = None
    type: str | None = None
    major: _I64 | None = None
    minor: _I64 | None = None
    access: str | None = None


class _Memory(_Part, frozen=True):
    limit: _I64 | None = None
    reservation: _I64 | None = None
    swap: _I64 | None = None
    swappiness: _Size | None = None


class _Cpu(_Part, frozen=True):
    shares: _Size | None = None
    quota: _I64 | None = None
    period: _Size | None = None
    burst: _Size | None = None
    realtime_runtime: _I64 | None = None
    realtime_period: _Size | None = None
    cpus: str | None = None
    mems: str | None = None


class _Pids(_Part, frozen=True):
    limit: _I64 | None = None


class _HugepageLimit(_Part, frozen=True):
    page_size: str
    limit: _Size | None = None


class _Throttle(_Part, frozen=True):
    major: _I64 | None = None
    minor: _I64 | None = None


class _BlockIO(_Part, frozen=True):
    leaf_weight: _Size | None = None
    throttle_read_bps_device: list[_Throttle] | None = None
    throttle_write_bps_device: list[_Throttle] | None = None
    throttle_read_iops_device: list[_Throttle] | None = msgspec.field(
        name="throttleReadIOPSDevice", default=None
    )
    throttle_write_iops_device: list[_Throttle] | None = msgspec.field(
        name="throttleWriteIOPSDevice", default=None
    )


class _Network(_Part, frozen=True):
    class_id: _U32 | None = msgspec.field(name="classID", default=None)


class _Resources(_Part, frozen=True):
    devices: list[_DeviceRule] | None = None
    memory: _Memory | None = None
    cpu: _Cpu | None = None
    pids: _Pids | None = None
    block_io: _BlockIO | None = msgspec.field(name="blockIO", default=None)
    hugepage_limits: list[_HugepageLimit] | None = None
    unified: dict[str, str] | None = None
    network: _Network | None = None
    rdma: dict[str, Any] | None = None


class _Syscall(_Part, frozen=True):
    names: list[str] | None = None
    action: str | None = None
    errno_ret: _U32 | None = None
    args: list[dict[str, Any]] | None = None


class _Seccomp(_Part, frozen=True):
    default_action: str | None = None
    default_errno_ret: _U32 | None = None
    architectures: list[str] | None = None
    flags: list[str] | None = None
    syscalls: list[_Syscall] | None = None


class _Personality(_Part, frozen=True):
    domain: str | None = None


class _IntelRdt(_Part, frozen=True):
    l3_cache_schema: str | None = None
    mem_bw_schema: str | None = None


class _Linux(_Part, frozen=True):
    namespaces: list[_Namespace] | None = None
    uid_mappings: list[_Mapping] | None = None
    gid_mappings: list[_Mapping] | None = None
    sysctl: dict[str, str] | None = None
    resources: _Resources | None = None
    cgroups_path: str | None = None
    devices: list[_Device] | None = None
    seccomp: _Seccomp | None = None
    rootfs_propagation: str | None = None
    masked_paths: list[str] | None = None
    readonly_paths: list[str] | None = None
    mount_label: str | None = None
    personality: _Personality | None = None
    intel_rdt: _IntelRdt | None = None
    time_offsets: dict[str, Any] | None = None


class _Hook(_Part, frozen=True):
    path: str
    args: list[str] | None = None
    env: list[str] | None = None


class _Spec(_Part, frozen=True):
    process: _Process | None = None
    root: _Root | None = None
    hostname: str | None = None
    domainname: str | None = None
    mounts: list[_Mount] | None = None
    hooks: dict[str, list[_Hook] | None] | None = None
    annotations: dict[str, str] | None = None
    linux: _Linux | None = None


def checked(document: object) -> dict[str, Any]:
    """A decoded config.json without the keys that are null, which means absent to every runtime.

    Raises ValueError with what is wrong and where, for a sentence that names the file.
    """
    if not isinstance(document, dict):
        raise ValueError("it holds no JSON object")  # noqa: TRY004  # a document's fault, like the others
    spec: dict[str, Any] = _without_nulls(cast("dict[str, Any]", document))
    try:
        msgspec.convert(spec, _Spec)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    bad = _bad_text({name: part for name, part in spec.items() if name != "annotations"}, "$")
    if bad:
        raise ValueError(f"a text that no path, name or variable can be - at `{bad}`")
    return spec


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        entries = cast("Mapping[str, Any]", value)
        return {name: _without_nulls(part) for name, part in entries.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in cast("list[Any]", value)]
    return value


def _bad_text(value: Any, where: str) -> str:
    """Where a text has a NUL or half a character (a surrogate), which no kernel and no runtime takes as it
    stands; "" if none has. A number beyond all that the standard knows counts too.
    """
    if isinstance(value, str):
        return where if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value) else ""
    if isinstance(value, int):
        return where if not -(1 << 63) <= value <= _MAX_U64 else ""
    if isinstance(value, dict):
        entries = cast("Mapping[str, Any]", value)
        return next(filter(None, (_bad_text(part, f"{where}.{name}") for name, part in entries.items())), "")
    if isinstance(value, list):
        parts = cast("list[Any]", value)
        return next(filter(None, (_bad_text(part, f"{where}[{n}]") for n, part in enumerate(parts))), "")
    return ""
