"""An image, a node and a specification that fit, to change one thing of: for the tests of the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compat import verdict
from compat.gpus import Gpu
from compat.profile import Profile
from compat.rules.case import Case, Origin
from engines.api import Finding, GpuNeed, MountNeed, Needs, TaskNeeds

ROOMY = Profile(
    arch="x86_64",
    kernel="6.12.41",
    cpu_flags=("aes", "avx", "avx2", "erms", "popcnt", "xsave"),
    page_size_bytes=4096,
    cgroup_mode="v2",
    boot_id="b",
    node="n1",
    xsave_bytes=832,
    tools={"criu": "4.2.1", "runc": "1.3.6", "runsc": "20240729.0"},
    criu_works=True,
    lsm="",
    capabilities=(1 << 41) - 1,
    namespaces=("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"),
    kernel_paths=("/proc/kcore", "/proc/sys"),
    gpu_driver="",
    gpus=(),
    memory_bytes=8 << 30,
    memory_available_bytes=4 << 30,
    hugepages={"2097152": 4},
    pid_max=1 << 22,
    rootfs_free_bytes=1 << 30,
)
H100 = Gpu(uuid="GPU-1", model="H100", minor=0, memory_bytes=80 << 30)
HAVE_GPUS = replace(ROOMY, gpu_driver="580.65.06", gpus=(H100,))
TASK = TaskNeeds(
    pid=1,
    comm="app",
    uids=(0, 0, 0, 0),
    gids=(0, 0, 0, 0),
    groups=(),
    cap_inheritable=0,
    cap_permitted=0,
    cap_effective=0,
    cap_bounding=0,
    cap_ambient=0,
    no_new_privs=False,
    seccomp_mode="disabled",
)
PLAIN = Needs(
    engine="criu",
    image_version="2",
    tasks=(TASK,),
    namespaces={"network": "own", "pid": "own"},
    xsave=True,
    arch="x86_64",
    page_size_bytes=4096,
    memory_bytes=1 << 20,
)
SPEC: dict[str, Any] = {
    "process": {"args": ["app"], "env": ["A=1"], "cwd": "/", "user": {"uid": 0}},
    "root": {"path": "rootfs"},
    "mounts": [],
    "linux": {"namespaces": [{"type": kind} for kind in ("network", "pid", "mount")]},
}
GPU = GpuNeed(uuid="GPU-1", model="H100", memory_bytes=1 << 30, driver="580.65.06")


def image(**more: Any) -> Needs:
    return replace(PLAIN, **more)


def task(**more: Any) -> Needs:
    return image(tasks=(replace(TASK, **more),))


def node(**more: Any) -> Profile:
    return replace(ROOMY, **more)


def new(**sections: Any) -> dict[str, Any]:
    merged = dict(SPEC)
    for name, value in sections.items():
        merged[name] = {**SPEC.get(name, {}), **value} if isinstance(value, Mapping) else value
    return merged


@dataclass(frozen=True)
class At:
    """A case. spec: None where only the node is asked about."""

    needs: Needs = PLAIN
    on: Profile = ROOMY
    spec: Mapping[str, Any] | None = None
    dumped_on: Profile | None = ROOMY
    origin: Origin = field(default_factory=Origin)
    local: bool = False
    image_ref: str = ""
    rootfs_path: Path | None = None

    def found(self) -> tuple[Finding, ...]:
        return verdict.run(
            Case(
                needs=self.needs,
                spec=self.spec,
                node=self.on,
                dump_host=self.dumped_on,
                rootfs_path=self.rootfs_path,
                local=self.local,
                origin=self.origin,
                new_image_ref=self.image_ref,
            )
        )


def edited(**sections: Any) -> At:
    """The spec of the dump is SPEC, the new one differs."""
    return At(spec=new(**sections), origin=Origin(dump_spec=SPEC))


def has(path: str, fstype: str = "proc", *, external: bool = False) -> Needs:
    return image(mounts=(MountNeed(destination=path, fstype=fstype, source="", external=external),))


def bind(path: str, *options: str) -> list[dict[str, Any]]:
    return [{"destination": path, "type": "bind", "source": "/nowhere", "options": ["bind", *options]}]


def named(findings: tuple[Finding, ...], rule: str) -> list[str]:
    """Severities of the findings of one rule."""
    return [finding.severity for finding in findings if finding.rule == rule]
