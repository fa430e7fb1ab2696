"""The parts of an OCI runtime specification (config.json) that an image records."""

from __future__ import annotations

import msgspec

from engines.api import ImageCorrupt


class _Spec(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """Unknown keys are ignored: specifications grow."""


class User(_Spec, frozen=True):
    uid: int = 0
    gid: int = 0
    umask: int | None = None
    additional_gids: list[int] | None = None


class Capabilities(_Spec, frozen=True):
    bounding: list[str] | None = None
    effective: list[str] | None = None
    inheritable: list[str] | None = None
    permitted: list[str] | None = None
    ambient: list[str] | None = None


class Rlimit(_Spec, frozen=True):
    type: str
    soft: int
    hard: int


class Process(_Spec, frozen=True):
    terminal: bool = False
    user: User = User()
    args: list[str] | None = None
    env: list[str] | None = None
    cwd: str = "/"
    capabilities: Capabilities | None = None
    rlimits: list[Rlimit] | None = None
    no_new_privileges: bool = False
    apparmor_profile: str = ""
    selinux_label: str = ""


class Root(_Spec, frozen=True):
    path: str = "rootfs"
    readonly: bool = False


class Mount(_Spec, frozen=True):
    destination: str
    type: str = ""
    source: str = ""
    options: list[str] | None = None


class IdMapping(_Spec, frozen=True):
    container_id: int = msgspec.field(name="containerID")
    host_id: int = msgspec.field(name="hostID")
    size: int


class Device(_Spec, frozen=True):
    path: str
    type: str
    major: int = 0
    minor: int = 0


class Namespace(_Spec, frozen=True):
    type: str
    path: str = ""


class Linux(_Spec, frozen=True):
    uid_mappings: list[IdMapping] | None = None
    gid_mappings: list[IdMapping] | None = None
    devices: list[Device] | None = None
    namespaces: list[Namespace] | None = None
    seccomp: dict[str, object] | None = None
    cgroups_path: str = ""


class Spec(_Spec, frozen=True):
    process: Process = Process()
    root: Root = Root()
    hostname: str = ""
    mounts: list[Mount] | None = None
    annotations: dict[str, str] | None = None
    linux: Linux = Linux()


def parse(data: bytes, *, what: str = "the container's config.json") -> Spec:
    """Read a specification. Raises ImageCorrupt."""
    try:
        return msgspec.json.decode(data, type=Spec)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ImageCorrupt(f"could not read {what}: {error}; checkpoint the container again") from error
