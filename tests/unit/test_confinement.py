"""No privilege by restore, field by field: what the image's container may reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.api import DeviceNeed, IdMapping, MountNeed, Needs, PrivilegedNeed
from shim.privileges import mask
from tests.support.admission import (
    MOUNTS,
    NEEDS,
    OWN,
    POWERLESS,
    TASK,
    check,
    granted,
    hidden,
    mount,
    only,
    spec,
    with_task,
)
from tests.support.containers import CAPABILITIES

# --- namespaces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["network", "pid", "ipc", "uts", "mount"])
def test_hosts_namespace(kind: str):
    needs = with_task(namespaces={**OWN, kind: 0})
    found = only(check(spec(), needs), "privileges.namespaces")
    assert f"task 7 (other) lives in the host's {kind} namespace" in found.message

    def without(document: dict[str, Any]) -> None:
        kept = [entry for entry in document["linux"]["namespaces"] if entry["type"] != kind]
        document["linux"]["namespaces"] = kept

    assert check(spec(without), needs) == ()


def test_path_to_the_hosts_namespace_is_the_hosts():
    def joined(path: str) -> Callable[[dict[str, Any]], object]:
        def edit(document: dict[str, Any]) -> None:
            for entry in document["linux"]["namespaces"]:
                if entry["type"] == "uts":
                    entry["path"] = path

        return edit

    needs = with_task(namespaces={**OWN, "uts": 0})
    assert check(spec(joined("/proc/self/ns/uts")), needs) == ()
    only(check(spec(joined("/proc/does-not-exist/ns/uts")), needs), "privileges.namespaces")


def test_cgroup_namespace_only_warns():
    found = check(spec(lambda document: document["linux"]["namespaces"].append({"type": "cgroup"})))
    assert [(finding.rule, finding.severity) for finding in found] == [("privileges.namespaces", "warn")]


def test_nested_namespace():
    needs = with_task(namespaces={**OWN, "mount": 9})
    assert "another mount namespace" in only(check(spec(), needs), "privileges.namespaces").message

    def admin(document: dict[str, Any]) -> None:
        kept = document["process"]["capabilities"]
        document["process"]["capabilities"] = {name: [*CAPABILITIES, "CAP_SYS_ADMIN"] for name in kept}

    assert check(spec(admin), needs) == ()


def mapped(host_id: int) -> Callable[[dict[str, Any]], object]:
    def edit(document: dict[str, Any]) -> None:
        document["linux"]["namespaces"].append({"type": "user"})
        for field in ("uidMappings", "gidMappings"):
            document["linux"][field] = [{"containerID": 0, "hostID": host_id, "size": 65536}]

    return edit


MAP = (IdMapping(container_id=0, host_id=100000, size=65536),)
MAPPED = replace(
    NEEDS,
    tasks=(replace(TASK, namespaces={**OWN, "user": 3}),),
    namespaces={**NEEDS.namespaces, "user": "own"},
    uid_map=MAP,
    gid_map=MAP,
)


def test_user_namespace():
    assert check(spec(mapped(100000)), MAPPED) == ()
    found = check(spec(mapped(200000)), MAPPED)
    assert {finding.rule for finding in found} == {"privileges.user-namespace"}
    assert "uidMappings are 0→100000 (65536), the new spec's 0→200000 (65536)" in found[0].message
    assert "the host's user ids" in only(check(spec(mapped(100000))), "privileges.user-namespace").message
    assert "the new spec gives none" in only(check(spec(), MAPPED), "privileges.user-namespace").message


# --- devices, descriptors, mounts, hooks ---------------------------------------------------------------


def device(major: int, minor: int, access: Any = "rw", path: str = "/dev/x", kind: Any = "c") -> Needs:
    found = DeviceNeed(path=path, kind=kind, major=major, minor=minor, access=access)
    return replace(NEEDS, devices=(found,))


def ruled(*rules: dict[str, Any]) -> dict[str, Any]:
    return spec(lambda document: document["linux"].update(resources={"devices": list(rules)}))


DENY = {"allow": False, "access": "rwm"}
FUSE = {"allow": True, "type": "c", "major": 10, "minor": 229, "access": "rw"}


def test_devices():
    found = only(check(ruled(DENY), device(10, 229)), "privileges.devices")
    assert "'/dev/x' (c 10:229) open for 'rw'" in found.message
    assert check(ruled(DENY, FUSE), device(10, 229)) == ()
    assert check(ruled(DENY, {**FUSE, "access": "r"}), device(10, 229, "r")) == ()
    only(check(ruled(DENY, {**FUSE, "access": "r"}), device(10, 229)), "privileges.devices")
    only(check(ruled(FUSE, DENY), device(10, 229)), "privileges.devices")
    only(check(ruled(DENY, FUSE), device(10, 229, kind="b")), "privileges.devices")
    assert check(ruled({"allow": True, "access": "rwm"}), device(8, 0, kind="b")) == ()
    assert check(ruled(DENY, {**FUSE, "minor": -1}), device(10, 1)) == ()
    assert check(spec(), device(1, 9)) == ()
    only(check(spec(), device(1, 1)), "privileges.devices")


def test_device_with_unknown_numbers():
    only(check(spec(), device(-1, -1, path="/data/node")), "privileges.devices")
    named = spec(lambda document: document["linux"].update(devices=[{"path": "/data/node", "type": "c"}]))
    assert check(named, device(-1, -1, path="/data/node")) == ()


def test_descriptors_that_lead_out():
    needs = replace(NEEDS, shared_with_host=("an open descriptor of the host's network namespace",))
    only(check(spec(), needs), "privileges.descriptors")


def changed_mounts(path: str, *, readonly: bool | None) -> Needs:
    kept = tuple(need for need in MOUNTS if need.destination != path)
    external = not path.startswith("/proc/")
    more = () if readonly is None else (mount(path, external=external, readonly=readonly),)
    return replace(NEEDS, mounts=(*kept, *more))


@pytest.mark.parametrize(
    ("wanted", "grants"),
    [
        (("CAP_NET_RAW",), "CAP_NET_RAW"),
        (("CAP_SYS_ADMIN",), "CAP_SYS_ADMIN"),
        (("CAP_BPF", "CAP_SYS_ADMIN"), "CAP_BPF"),
        (("CAP_BPF", "CAP_SYS_ADMIN"), "CAP_SYS_ADMIN"),
    ],
)
def test_descriptors_that_outlive_a_capability(wanted: tuple[str, ...], grants: str):
    needs = replace(NEEDS, privileged=(PrivilegedNeed(what="a strange socket", capabilities=wanted),))

    def bare(document: dict[str, Any]) -> None:
        sets = document["process"]["capabilities"]
        for name, kept in sets.items():
            sets[name] = [one for one in kept if one not in wanted]

    task = replace(TASK, **dict.fromkeys(("cap_bounding", *POWERLESS), mask([])))
    needs = replace(needs, tasks=(task,))
    found = only(check(spec(bare), needs), "privileges.descriptors")
    assert f"holds a strange socket, but the new spec does not grant {wanted[0]}" in found.message
    assert check(granted(grants), needs) == ()


def test_read_only():
    ro = {"destination": "/etc/secret/", "type": "bind", "source": "/s", "options": ["bind", "ro"]}
    new = spec(lambda document: document["mounts"].append(ro))
    assert check(new, changed_mounts("/etc/secret", readonly=True)) == ()
    only(check(new, changed_mounts("/etc/secret", readonly=False)), "privileges.read-only")
    only(check(spec(lambda document: document["root"].update(readonly=True))), "privileges.read-only")
    only(check(spec(), changed_mounts("/proc/sys", readonly=False)), "privileges.read-only")
    only(check(spec(), changed_mounts("/proc/sys", readonly=None)), "privileges.read-only")


def test_read_only_behind_a_link(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("/run")
    ro = {"destination": "/var/run/secrets", "type": "bind", "source": "/s", "options": ["bind", "ro"]}
    new = spec(lambda document: document["mounts"].append(ro))
    needs = changed_mounts("/run/secrets", readonly=False)
    only(check(new, needs, rootfs_path=tmp_path), "privileges.read-only")


def test_read_only_control_groups():
    """Under version 1 the tmpfs above the hierarchies is writable in every container."""
    ro = {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]}
    new = spec(lambda document: document["mounts"].append(ro))

    def with_groups(*groups: MountNeed) -> Needs:
        return replace(NEEDS, mounts=(*MOUNTS, *groups))

    top = mount("/sys/fs/cgroup", "tmpfs", readonly=False)
    pids = "/sys/fs/cgroup/pids"
    assert check(new, with_groups(top, mount(pids, "cgroup", external=True))) == ()
    assert check(new, with_groups(mount("/sys/fs/cgroup", "cgroup2"))) == ()
    writable = mount(pids, "cgroup", external=True, readonly=False)
    only(check(new, with_groups(top, writable)), "privileges.read-only")
    only(check(new, with_groups(mount("/sys/fs/cgroup", "cgroup2", readonly=False))), "privileges.read-only")


def with_mount(*more: MountNeed) -> Needs:
    return replace(NEEDS, mounts=(*MOUNTS, *more))


def entry_for(destination: str, kind: str, *options: str) -> Callable[[dict[str, Any]], object]:
    entry = {"destination": destination, "type": kind, "source": "/s", "options": list(options)}
    return lambda document: document["mounts"].append(entry)


@pytest.mark.parametrize(
    "extra",
    [
        mount("/mnt/p", readonly=False),
        mount("/proc", readonly=False),  # over the first one
        mount("/", "tmpfs", readonly=False),
        mount("/proc/bus"),  # over the read-only one
        mount("/data", "tmpfs"),
        mount("/data", "other", external=True),
        mount("/sys/fs/cgroup/memory", "cgroup", external=True),
        mount("/dev/console", "devpts"),
        mount("/dev/null", "devtmpfs"),
        replace(mount("/dev/kmsg", "devtmpfs", external=True), source="/dev/kmsg"),
    ],
    ids=lambda extra: f"{extra.fstype}{extra.destination}",
)
def test_mounts_that_only_the_image_has(extra: MountNeed):
    only(check(spec(), with_mount(extra)), "privileges.mounts")
    admin = granted("CAP_SYS_ADMIN")
    assert "privileges.mounts" not in {finding.rule for finding in check(admin, with_mount(extra))}


def test_mounts_of_another_kind():
    tmpfs = entry_for("/data", "tmpfs")
    assert check(spec(tmpfs), with_mount(mount("/data", "tmpfs", readonly=False))) == ()
    found = only(check(spec(tmpfs), with_mount(mount("/data", readonly=False))), "privileges.mounts")
    assert "has a proc on '/data', where the new spec has a tmpfs" in found.message
    bind = entry_for("/data", "bind", "rbind", "rw")
    assert check(spec(bind), with_mount(mount("/data", "other", external=True, readonly=False))) == ()
    only(check(spec(bind), with_mount(mount("/data", readonly=False))), "privileges.mounts")


def test_mounts_on_top_of_each_other_that_the_spec_has_too():
    def twice(document: dict[str, Any]) -> None:
        entry_for("/data", "bind", "rbind")(document)
        entry_for("/data", "tmpfs", "nosuid")(document)

    lower, upper = mount("/data", "other", external=True), mount("/data", "tmpfs")
    assert check(spec(twice), with_mount(upper, lower)) == ()
    only(check(spec(twice), with_mount(upper, lower, lower)), "privileges.mounts")


def test_mounts_behind_a_link(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("/run")
    new = spec(entry_for("/var/run/secrets", "bind", "rbind"))
    assert check(new, with_mount(mount("/run/secrets", external=True)), rootfs_path=tmp_path) == ()


def test_mounts_that_a_runtime_makes_unasked():
    """Control groups below their top, a terminal, and the nodes of a container that may not make any."""
    new = spec(entry_for("/sys/fs/cgroup", "cgroup", "ro"))
    top = mount("/sys/fs/cgroup", "tmpfs", readonly=False)
    assert check(new, with_mount(top, mount("/sys/fs/cgroup/memory", "cgroup", external=True))) == ()
    only(check(new, with_mount(top, mount("/sys/fs/cgroup/more", "cgroup"))), "privileges.mounts")
    terminal = spec(lambda document: document["process"].update(terminal=True))
    assert check(terminal, with_mount(mount("/dev/console", "devpts"))) == ()
    only(check(terminal, with_mount(mount("/dev/console"))), "privileges.mounts")
    null = replace(mount("/dev/null", "devtmpfs", external=True, readonly=False), source="/dev/null")
    assert check(spec(), with_mount(null)) == ()
    only(check(spec(), with_mount(replace(null, source="/dev/mem"))), "privileges.mounts")


def test_mounts_without_the_flags_of_the_spec():
    new = spec(entry_for("/data", "tmpfs", "nosuid", "nodev", "noexec", "exec"))
    data = mount("/data", "tmpfs", readonly=False)
    assert check(new, with_mount(replace(data, flags=("nosuid", "nodev")))) == ()
    found = only(check(new, with_mount(replace(data, flags=("nodev",)))), "privileges.mounts")
    assert "mount on '/data' lacks nosuid" in found.message
    assert check(new, with_mount(data)) == (), "an engine that does not tell"


def test_a_read_only_path_shows_itself():
    kept = tuple(need for need in MOUNTS if need.destination != "/proc/bus")
    for root, shown in (("/bus", True), ("/kcore", False), ("/", False), ("", True)):
        needs = replace(NEEDS, mounts=(*kept, replace(mount("/proc/bus"), root=root)))
        assert not check(spec(), needs) if shown else only(check(spec(), needs), "privileges.mounts")


def test_masks_must_hide():
    """Whatever lies on a masked path, only /dev/null and an empty directory hide it."""
    bind = replace(mount("/proc/kcore", "other", external=True, readonly=False), source="/proc/kcore")
    for need in (
        bind,
        replace(bind, fstype="tmpfs"),
        mount("/proc/kcore", "tmpfs", readonly=False),
        mount("/proc/kcore", "proc"),
    ):
        kept = tuple(other for other in MOUNTS if other.destination != "/proc/kcore")
        only(check(spec(), replace(NEEDS, mounts=(*kept, need))), "privileges.masked-paths")
    twice = spec(lambda document: document["linux"]["maskedPaths"].append("/proc/kcore"))
    only(check(twice, with_mount(bind)), "privileges.masked-paths")


def test_masked_paths():
    seen = spec(lambda document: document["linux"]["maskedPaths"].append("/proc/version"))
    only(check(seen), "privileges.masked-paths")
    assert check(seen, replace(NEEDS, mounts=(*MOUNTS, hidden("/proc/version")))) == ()
    nowhere = spec(lambda document: document["linux"]["maskedPaths"].append("/proc/of-another-kernel"))
    assert check(nowhere) == ()
    beneath = spec(lambda document: document["linux"]["maskedPaths"].append("/sys/firmware/memmap"))
    assert check(beneath) == ()
    without_sys = replace(
        NEEDS, mounts=tuple(need for need in MOUNTS if not need.destination.startswith("/sys"))
    )
    assert check(spec(), without_sys) == ()


def test_hooks():
    hooked = spec(
        lambda document: document.update(hooks={"prestart": [{"path": "/opt/hook", "args": ["x"]}]})
    )
    assert "prestart hook '/opt/hook'" in only(check(hooked), "admission.hooks").message
    assert check(hooked, allowed_hooks=("/opt/hook",)) == ()
    assert check(hooked, allowed_hooks=("/opt/hook2", "/opt")) != ()
