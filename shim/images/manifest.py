"""manifest.json: what an image is, where it came from, and the digest of every file in it.

Arguments and environment of the container are not in it; they stand in spec.dump only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from compat.profile import SCHEMA as PROFILE_SCHEMA
from compat.profile import Profile
from engines.api import IdMapping, ImageCorrupt
from shim.images import spec as oci
from shim.images.documents import decode, encode
from shim.log import now
from shim.pod import identify

SCHEMA = 1

Use = Literal["clone", "move"]
Whiteouts = Literal["deleted.files", "oci"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A tool that had a part in the image. version: its own words, "" if unknown."""

    name: str
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The container that was dumped. For people and for matching names; never a proof of who may restore."""

    container_id: str
    container_name: str = ""
    pod_name: str = ""
    pod_namespace: str = ""
    pod_uid: str = ""
    image_name: str = ""  # container image
    image_ref: str = ""
    runtime_caller: str = ""  # "containerd", "cri-o", "podman", ""


@dataclass(frozen=True, kw_only=True)
class Rlimit:
    """A resource limit of the specification."""

    type: str
    soft: int
    hard: int


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device node that the specification creates."""

    path: str
    type: str
    major: int
    minor: int


@dataclass(frozen=True, kw_only=True)
class Security:
    """What the specification of the dumped container granted. seccomp_digest: "" if there was no profile."""

    uid: int
    gid: int
    additional_gids: tuple[int, ...]
    capabilities: Mapping[str, tuple[str, ...]]
    no_new_privileges: bool
    seccomp_digest: str
    rlimits: tuple[Rlimit, ...]
    apparmor_profile: str
    selinux_label: str
    uid_map: tuple[IdMapping, ...]
    gid_map: tuple[IdMapping, ...]
    devices: tuple[Device, ...]


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A mount of the specification, on the side of the dump."""

    destination: str
    type: str
    source: str
    options: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Rootfs:
    """How the root file system was kept.

    kind: "overlay" (only what the container changed), "directory" (a full copy), "none" (not kept).
    whiteouts: how removed files are told: a list of names, or `.wh.` entries in the archive.
    skipped: sockets and device nodes that were left out, by name.
    """

    kind: Literal["overlay", "directory", "none"]
    lower_paths: tuple[str, ...] = ()
    whiteouts: Whiteouts = "deleted.files"
    skipped: tuple[str, ...] = ()
    readonly: bool = False


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Where an imported image came from. manifest_digest: "" if the archive carried no manifest."""

    archive: Literal["containerd", "cri-o", "podman", "unknown"]
    at: str
    manifest_digest: str = ""


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """Content of one file."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The whole document. timings: phase to seconds. files: by name relative to the image directory."""

    schema: int = SCHEMA
    engine: Program
    runtime: Program
    torpor_version: str
    created: str  # RFC 3339
    source: Source
    use: Use | None = None
    leave_running: bool
    keep_tcp: bool | None = None  # its connections wait; None: not recorded
    spec_digest: str
    security: Security
    hostname: str
    terminal: bool
    rootfs: Rootfs
    host: Profile | None  # None: imported, not recorded
    mounts: tuple[Mount, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    imported: Imported | None = None
    files: Mapping[str, FileDigest] = field(default_factory=dict[str, FileDigest])

    @property
    def effective_use(self) -> Use:
        """`use`, or what its absence means: an image taken to stop its source is for one restore only."""
        return self.use or ("clone" if self.leave_running else "move")

    def to_bytes(self) -> bytes:
        """What manifest.json holds."""
        return encode(self)


def parse_manifest(data: bytes, *, what: str = "manifest.json") -> Manifest:
    """Read manifest.json. Raises ImageCorrupt."""
    found = decode(data, Manifest, schema=SCHEMA, what=what)
    if found.host and not 0 < found.host.schema <= PROFILE_SCHEMA:
        raise ImageCorrupt(
            f"could not read {what}: the schema of its node's profile is {found.host.schema} and this torpor "
            f"knows {PROFILE_SCHEMA}; use the torpor that wrote it"
        )
    return found


def digest_of(data: bytes) -> str:
    """The digest of an image, from the bytes of its manifest."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def source_of(spec: oci.Spec, *, container_id: str) -> Source:
    """Who the container is, from the annotations that its caller always writes. Raises AdmissionRefused."""
    pod = identify(spec.annotations or {})
    return Source(
        container_id=container_id,
        container_name=pod.container_name,
        pod_name=pod.name,
        pod_namespace=pod.namespace,
        pod_uid=pod.uid,
        image_name=pod.image_name,
        image_ref=pod.image_ref,
        runtime_caller=pod.caller,
    )


def seccomp_digest(section: Mapping[str, Any] | None) -> str:
    """Digest of a specification's seccomp section, "" if it has none."""
    if not section:
        return ""
    return digest_of(json.dumps(section, sort_keys=True, separators=(",", ":")).encode())


def build_manifest(
    *,
    spec_data: bytes,
    source: Source,
    engine: Program,
    runtime: Program,
    torpor_version: str,
    leave_running: bool,
    rootfs: Rootfs,
    host: Profile | None,
    use: Use | None = None,
    keep_tcp: bool | None = None,
    timings: Mapping[str, float] | None = None,
    created: str = "",
    imported: Imported | None = None,
) -> Manifest:
    """A manifest without file digests (`seal` adds them).

    spec_data: the bytes of the dumped container's config.json. timings: phase to seconds. created: RFC 3339,
    now if empty. Raises ImageCorrupt if the specification cannot be read.
    """
    spec = oci.parse(spec_data)
    return Manifest(
        engine=engine,
        runtime=runtime,
        torpor_version=torpor_version,
        created=created or now(),
        source=source,
        use=use,
        leave_running=leave_running,
        keep_tcp=keep_tcp,
        spec_digest=digest_of(spec_data),
        security=_security(spec),
        hostname=spec.hostname,
        terminal=spec.process.terminal,
        rootfs=replace(rootfs, readonly=spec.root.readonly),
        host=host,
        mounts=tuple(
            Mount(destination=m.destination, type=m.type, source=m.source, options=tuple(m.options or ()))
            for m in spec.mounts or ()
        ),
        timings=dict(timings or {}),
        imported=imported,
    )


def _security(spec: oci.Spec) -> Security:
    process, linux = spec.process, spec.linux
    granted = process.capabilities or oci.Capabilities()
    sets = {
        "bounding": granted.bounding,
        "effective": granted.effective,
        "inheritable": granted.inheritable,
        "permitted": granted.permitted,
        "ambient": granted.ambient,
    }
    return Security(
        uid=process.user.uid,
        gid=process.user.gid,
        additional_gids=tuple(sorted(process.user.additional_gids or ())),
        capabilities={name: tuple(sorted(values or ())) for name, values in sets.items()},
        no_new_privileges=process.no_new_privileges,
        seccomp_digest=seccomp_digest(linux.seccomp),
        rlimits=tuple(Rlimit(type=r.type, soft=r.soft, hard=r.hard) for r in process.rlimits or ()),
        apparmor_profile=process.apparmor_profile,
        selinux_label=process.selinux_label,
        uid_map=_mappings(linux.uid_mappings),
        gid_map=_mappings(linux.gid_mappings),
        devices=tuple(
            Device(path=d.path, type=d.type, major=d.major, minor=d.minor) for d in linux.devices or ()
        ),
    )


def _mappings(lines: list[oci.IdMapping] | None) -> tuple[IdMapping, ...]:
    return tuple(
        IdMapping(container_id=line.container_id, host_id=line.host_id, size=line.size)
        for line in lines or ()
    )
