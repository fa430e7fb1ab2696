"""An image and a spec that are equal, to change one thing of: for the tests of admission."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engines.api import DeviceNeed, Finding, MountNeed, Needs, TaskNeeds
from shim import admission
from shim.images.manifest import Manifest, Program, Rootfs, Source, build_manifest
from shim.privileges import mask
from tests.support.containers import CAPABILITIES, make_spec

ALL = mask(CAPABILITIES)
OWN = {"network": 3, "pid": 3, "mount": 3, "ipc": 3, "uts": 3, "user": 0, "cgroup": 0, "time": 0}
LIMITS = {"RLIMIT_NOFILE": 1024, "RLIMIT_MEMLOCK": 65536}

TASK = TaskNeeds(
    pid=1,
    comm="app",
    uids=(0, 0, 0, 0),
    gids=(0, 0, 0, 0),
    groups=(),
    cap_inheritable=ALL,
    cap_permitted=ALL,
    cap_effective=ALL,
    cap_bounding=ALL,
    cap_ambient=ALL,
    no_new_privs=True,
    seccomp_mode="disabled",
    rlimits={"RLIMIT_NOFILE": (1024, 1024)},
    namespaces=OWN,
)

POWERLESS = dict.fromkeys(("cap_inheritable", "cap_permitted", "cap_effective", "cap_ambient"), 0)


def mount(
    destination: str, fstype: str = "proc", *, external: bool = False, readonly: bool = True
) -> MountNeed:
    """A mount of the image."""
    return MountNeed(destination=destination, fstype=fstype, source="", external=external, readonly=readonly)


def hidden(destination: str) -> MountNeed:
    """As runc hides a file."""
    return MountNeed(destination=destination, fstype="devtmpfs", source="/dev/null", external=True)


MOUNTS = (
    mount("/", "other", external=True, readonly=False),
    mount("/proc", readonly=False),
    mount("/sys", "sysfs"),
    *(hidden(path) for path in ("/proc/kcore", "/proc/keys", "/proc/timer_list")),
    mount("/sys/firmware", "tmpfs"),
    *(mount(path) for path in ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")),
)
NEEDS = Needs(
    engine="criu",
    image_version="2",
    tasks=(TASK,),
    namespaces={kind: "own" if number else "host" for kind, number in OWN.items()},
    mounts=MOUNTS,
    devices=(DeviceNeed(path="/dev/null", kind="c", major=1, minor=3, access="rw"),),
)


def spec(edit: Callable[[dict[str, Any]], object] = lambda _: None) -> dict[str, Any]:
    """A plain spec, edited."""
    document = copy.deepcopy(make_spec(["app"]))
    edit(document)
    return document


def manifest(dumped: dict[str, Any]) -> Manifest:
    """What an image of a container of this spec records."""
    return build_manifest(
        spec_data=json.dumps(dumped).encode(),
        source=Source(container_id="c"),
        engine=Program(name="criu"),
        runtime=Program(name="runc"),
        torpor_version="0",
        leave_running=True,
        rootfs=Rootfs(kind="none"),
        host=None,
    )


def check(new: dict[str, Any], needs: Needs = NEEDS, **more: Any) -> tuple[Finding, ...]:
    """Findings of the image under the spec, with a manifest that fits the spec unless one is given."""
    more.setdefault("manifest", manifest(new))
    more.setdefault("inherited_rlimits", LIMITS)
    return admission.check(new, needs, more.pop("manifest"), **more)


def with_task(**changes: Any) -> Needs:
    """An image whose second task, in all else like the first, differs by this."""
    return replace(NEEDS, tasks=(TASK, replace(TASK, pid=7, comm="other", **changes)))


def only(findings: tuple[Finding, ...], rule: str) -> Finding:
    """The only finding, which must be a refusal by this rule."""
    assert [finding.rule for finding in findings] == [rule]
    assert findings[0].severity == "refuse"
    assert findings[0].remedy
    return findings[0]


def granted(*more: str, **process: Any) -> dict[str, Any]:
    """A plain spec with more capabilities and other fields of the process."""

    def edit(document: dict[str, Any]) -> None:
        for name, kept in document["process"]["capabilities"].items():
            document["process"]["capabilities"][name] = [*kept, *more]
        document["process"].update(process)

    return spec(edit)
