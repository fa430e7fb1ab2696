"""No privilege by restore, field by field: what is wider is refused, what is equal or narrower passes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.api import (
    DeviceNeed,
    Finding,
    IdMapping,
    ImageIncompatible,
    MountNeed,
    Needs,
    PrivilegedNeed,
    TaskNeeds,
    WiderPrivileges,
)
from shim import admission
from shim.checkpointable import without_io_uring
from shim.errors import AdmissionRefused
from shim.images.manifest import Manifest, Program, Rootfs, Source, build_manifest, seccomp_digest
from shim.privileges import mask, names
from tests.support.containers import CAPABILITIES, make_spec

ALL = mask(CAPABILITIES)
NET_ADMIN = mask(["CAP_NET_ADMIN"])
OWN = {"network": 3, "pid": 3, "mount": 3, "ipc": 3, "uts": 3, "user": 0, "cgroup": 0, "time": 0}
LIMITS = {"RLIMIT_NOFILE": 1024, "RLIMIT_MEMLOCK": 65536}
PROFILE = {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW"}]}

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


def mount(
    destination: str, fstype: str = "proc", *, external: bool = False, readonly: bool = True
) -> MountNeed:
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
    document = copy.deepcopy(make_spec(["app"]))
    edit(document)
    return document


def manifest(dumped: dict[str, Any]) -> Manifest:
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
    more.setdefault("manifest", manifest(new))
    return admission.check(new, needs, more.pop("manifest"), inherited_rlimits=LIMITS, **more)


def with_task(**changes: Any) -> Needs:
    return replace(NEEDS, tasks=(TASK, replace(TASK, pid=7, comm="other", **changes)))


def only(findings: tuple[Finding, ...], rule: str) -> Finding:
    assert [finding.rule for finding in findings] == [rule]
    assert findings[0].severity == "refuse"
    assert findings[0].remedy
    return findings[0]


def test_equal_passes():
    assert check(spec()) == ()


# --- user and groups -----------------------------------------------------------------------------------


def as_user(uid: int) -> Callable[[dict[str, Any]], object]:
    """A spec as Kubernetes writes it for a user of its own: only the bounding set is left."""

    def edit(document: dict[str, Any]) -> None:
        document["process"]["user"] = {"uid": uid, "gid": uid, "additionalGids": [50]}
        document["process"]["capabilities"] = {"bounding": CAPABILITIES}

    return edit


POWERLESS = dict.fromkeys(("cap_inheritable", "cap_permitted", "cap_effective", "cap_ambient"), 0)


def user_needs(uid: int, *, gids: int | None = None, groups: tuple[int, ...] = ()) -> Needs:
    gid = uid if gids is None else gids
    task = replace(TASK, uids=(uid,) * 4, gids=(gid,) * 4, groups=groups, **POWERLESS)
    return replace(NEEDS, tasks=(task,))


def test_root_task_under_a_spec_with_a_user():
    found = only(check(spec(as_user(1000)), user_needs(0, gids=1000)), "privileges.user")
    assert found.message == "task 1 (app) runs as uid 0, but the new spec runs as uid 1000 without CAP_SETUID"


def test_one_of_the_four_ids_is_enough():
    task = replace(TASK, uids=(1000, 1000, 0, 1000), gids=(1000,) * 4, **POWERLESS)
    only(check(spec(as_user(1000)), replace(NEEDS, tasks=(task,))), "privileges.user")


def test_dropped_user_passes_where_the_spec_could_drop_too():
    assert check(spec(), with_task(uids=(33,) * 4, gids=(33,) * 4, groups=(33, 44))) == ()


def test_dropped_user_is_refused_where_the_spec_could_not():
    def edit(document: dict[str, Any]) -> None:
        for kept in document["process"]["capabilities"]:
            document["process"]["capabilities"][kept] = ["CAP_SETGID"]

    task = replace(TASK, uids=(33,) * 4, cap_bounding=0, **POWERLESS)
    only(check(spec(edit), replace(NEEDS, tasks=(task,))), "privileges.user")


def test_groups():
    assert check(spec(as_user(1000)), user_needs(1000, groups=(50,))) == ()
    found = only(check(spec(as_user(1000)), user_needs(1000, groups=(50, 27))), "privileges.groups")
    assert "is in group 27" in found.message
    only(check(spec(as_user(1000)), user_needs(1000, gids=0)), "privileges.groups")


# --- capabilities --------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["bounding", "permitted", "effective", "inheritable", "ambient"])
def test_each_capability_set(field: str):
    found = only(check(spec(), with_task(**{f"cap_{field}": ALL | NET_ADMIN})), "privileges.capabilities")
    assert f"task 7 (other) has CAP_NET_ADMIN ({field}), but" in found.message


def test_narrower_capabilities_pass():
    assert check(spec(), with_task(cap_bounding=0, **POWERLESS)) == ()


def test_file_capabilities_reach_the_bounding_set_unless_forbidden():
    raw = mask(["CAP_NET_RAW"])
    task = replace(user_needs(1000).tasks[0], cap_permitted=raw, cap_effective=raw)
    needs = replace(NEEDS, tasks=(task,))
    only_bounding = spec(as_user(1000))
    assert {finding.rule for finding in check(only_bounding, needs)} == {"privileges.capabilities"}
    only_bounding["process"]["noNewPrivileges"] = False
    assert check(only_bounding, needs) == ()


def test_spec_without_capabilities_grants_none():
    def edit(document: dict[str, Any]) -> None:
        del document["process"]["capabilities"]

    assert {finding.rule for finding in check(spec(edit))} == {"privileges.capabilities"}


def test_unknown_capability_bits_have_a_name():
    assert names(1 << 60) == "capability 60"
    assert names(0) == "none"
    assert mask(["CAP_OF_THE_FUTURE", "cap_chown"]) == 1


def test_many_tasks_are_one_finding():
    wide = tuple(replace(TASK, pid=pid, cap_ambient=ALL | NET_ADMIN) for pid in range(1, 100))
    found = only(check(spec(), replace(NEEDS, tasks=wide)), "privileges.capabilities")
    assert "task 1 (app) like 98 others" in found.message


# --- no_new_privs, seccomp, LSM ------------------------------------------------------------------------


def test_no_new_privs():
    only(check(spec(), with_task(no_new_privs=False)), "privileges.no-new-privs")
    relaxed = spec(lambda document: document["process"].update(noNewPrivileges=False))
    assert check(relaxed, with_task(no_new_privs=False)) == ()
    assert check(relaxed) == ()


def filtered(document: dict[str, Any]) -> None:
    document["linux"]["seccomp"] = copy.deepcopy(PROFILE)


FILTERED = replace(NEEDS, tasks=(replace(TASK, seccomp_mode="filter", seccomp_filters=("own", "runtime")),))


def test_seccomp_equal_profile():
    assert check(spec(filtered), FILTERED) == ()
    more = replace(TASK, pid=7, seccomp_mode="filter", seccomp_filters=("runtime",))
    strict = replace(TASK, pid=8, seccomp_mode="strict")
    assert check(spec(filtered), replace(FILTERED, tasks=(*FILTERED.tasks, more, strict))) == ()


def test_seccomp_missing_other_or_unrecorded():
    for recorded, words in ((spec(), "dumped with none"), (None, "one that nobody recorded")):
        kept = manifest(recorded) if recorded else None
        found = only(check(spec(filtered), FILTERED, manifest=kept), "privileges.seccomp")
        assert words in found.message
    other = spec(filtered)
    other["linux"]["seccomp"]["syscalls"][0]["names"].append("ptrace")
    assert (
        "another one"
        in only(check(spec(filtered), FILTERED, manifest=manifest(other)), "privileges.seccomp").message
    )


def test_seccomp_task_without_or_with_a_foreign_filter():
    bare = replace(TASK, pid=7, comm="shell")
    found = only(
        check(spec(filtered), replace(FILTERED, tasks=(*FILTERED.tasks, bare))), "privileges.seccomp"
    )
    assert "task 7 (shell) has no seccomp filter" in found.message
    foreign = replace(bare, seccomp_mode="filter", seccomp_filters=("something else",))
    only(check(spec(filtered), replace(FILTERED, tasks=(*FILTERED.tasks, foreign))), "privileges.seccomp")


def test_seccomp_narrower_passes():
    assert check(spec(), FILTERED, manifest=manifest(spec(filtered))) == ()
    stricter = without_io_uring(spec(filtered))
    assert check(spec(filtered), FILTERED, manifest=manifest(stricter)) == ()
    only(check(stricter, FILTERED, manifest=manifest(spec(filtered))), "privileges.seccomp")


def test_seccomp_digest_does_not_depend_on_the_order_of_keys():
    other = spec(filtered)
    other["linux"]["seccomp"] = dict(reversed(PROFILE.items()))
    digest = seccomp_digest(PROFILE)
    assert digest.startswith("sha256:")
    assert (
        digest == manifest(other).security.seccomp_digest == manifest(spec(filtered)).security.seccomp_digest
    )
    assert check(other, FILTERED, manifest=manifest(spec(filtered))) == ()


def test_an_empty_seccomp_section_is_none():
    empty = spec(lambda document: document["linux"].update(seccomp={}))
    assert seccomp_digest({}) == seccomp_digest(None) == manifest(empty).security.seccomp_digest == ""
    assert check(empty) == ()


@pytest.mark.parametrize(
    ("field", "wanted", "held", "passes"),
    [
        ("apparmorProfile", "cri-containerd.apparmor.d", "cri-containerd.apparmor.d (enforce)", True),
        ("apparmorProfile", "cri-containerd.apparmor.d", "", False),
        ("apparmorProfile", "cri-containerd.apparmor.d", "unconfined", False),
        ("apparmorProfile", "unconfined", "", True),
        ("apparmorProfile", "", "anything", True),
        (
            "selinuxLabel",
            "system_u:system_r:container_t:s0:c1,c2",
            "system_u:system_r:container_t:s0:c1,c2",
            True,
        ),
        ("selinuxLabel", "system_u:system_r:container_t:s0:c1,c2", "system_u:system_r:spc_t:s0", False),
    ],
)
def test_lsm(field: str, wanted: str, held: str, passes: bool):
    found = check(
        spec(lambda document: document["process"].update({field: wanted})),
        replace(NEEDS, tasks=(replace(TASK, lsm_profile=held),)),
    )
    assert not found if passes else only(found, "privileges.lsm")


# --- resource limits -----------------------------------------------------------------------------------


def limited(name: str, hard: int) -> Callable[[dict[str, Any]], object]:
    entry = {"type": name, "soft": hard // 2, "hard": hard}
    return lambda document: document["process"].update(rlimits=[entry])


def test_rlimits_of_the_spec():
    needs = with_task(rlimits={"RLIMIT_NOFILE": (4096, 4096)})
    assert check(spec(limited("RLIMIT_NOFILE", 4096)), needs) == ()
    found = only(check(spec(limited("RLIMIT_NOFILE", 4095)), needs), "privileges.rlimits")
    assert "has RLIMIT_NOFILE 4096, but the new spec allows 4095" in found.message


def test_rlimits_that_a_cold_start_would_inherit():
    found = only(check(spec(), with_task(rlimits={"RLIMIT_MEMLOCK": (0, 2**64 - 1)})), "privileges.rlimits")
    assert (
        "has RLIMIT_MEMLOCK unlimited, but the new spec leaves the runtime caller's limit of 65536"
        in found.message
    )
    assert check(spec(), with_task(rlimits={"RLIMIT_OF_THE_FUTURE": (1, 1)})) == ()


def test_rlimits_do_not_bind_who_may_raise_them():
    def edit(document: dict[str, Any]) -> None:
        for kept in document["process"]["capabilities"].values():
            if "CAP_SYS_RESOURCE" not in kept:
                kept.append("CAP_SYS_RESOURCE")

    assert check(spec(edit), with_task(rlimits={"RLIMIT_NOFILE": (9999, 9999)})) == ()


# --- scheduling, OOM scores, descriptors ---------------------------------------------------------------


def granted(*more: str, **process: Any) -> dict[str, Any]:
    def edit(document: dict[str, Any]) -> None:
        for name, kept in document["process"]["capabilities"].items():
            document["process"]["capabilities"][name] = [*kept, *more]
        document["process"].update(process)

    return spec(edit)


def needs_with(**changes: Any) -> Needs:
    """An image whose second task, in all else like the first, differs by this."""
    return replace(NEEDS, tasks=(TASK, replace(TASK, pid=7, comm="other", **changes)))


def test_nice_values():
    found = only(check(spec(), needs_with(nice=-15)), "privileges.scheduling")
    assert "task 7 (other) has the nice value -15, but the new spec allows none below 0" in found.message
    assert check(spec(), needs_with(nice=5)) == ()
    assert check(spec(limited("RLIMIT_NICE", 35)), needs_with(nice=-15)) == ()
    only(check(spec(limited("RLIMIT_NICE", 34)), needs_with(nice=-15)), "privileges.scheduling")
    assert check(granted(scheduler={"policy": "SCHED_OTHER", "nice": -15}), needs_with(nice=-15)) == ()


@pytest.mark.parametrize("policy", ["fifo", "rr", "deadline", "policy 7"])
def test_policies_before_all_others(policy: str):
    needs = needs_with(sched_policy=policy, sched_priority=0 if policy == "deadline" else 10)
    only(check(spec(), needs), "privileges.scheduling")
    entry = {"policy": f"SCHED_{policy.upper()}", "priority": 10}
    assert check(granted(scheduler=entry), needs) == ()
    found = check(spec(limited("RLIMIT_RTPRIO", 10)), needs)
    assert not found if policy != "deadline" else only(found, "privileges.scheduling")
    only(check(spec(limited("RLIMIT_RTPRIO", 9)), needs), "privileges.scheduling")


@pytest.mark.parametrize("policy", ["other", "batch", "idle"])
def test_policies_after_all_others(policy: str):
    assert check(spec(), needs_with(sched_policy=policy)) == ()


def test_scheduling_does_not_bind_who_may_change_it():
    new = granted("CAP_SYS_NICE")
    needs = needs_with(nice=-20, sched_policy="fifo", sched_priority=99)
    assert check(new, needs) == ()


def test_oom_scores():
    assert check(granted(oomScoreAdj=-10), needs_with(oom_score_adj=-10)) == ()
    assert check(granted(oomScoreAdj=-10), needs_with(oom_score_adj=0)) == ()
    for wanted, held in ((0, -1), (1000, 999), (900, 0), (-10, -998)):
        found = only(
            check(granted(oomScoreAdj=wanted), needs_with(oom_score_adj=held)), "privileges.oom-score"
        )
        assert f"has the OOM score adjustment {held}, but the new spec gives {wanted}" in found.message
    assert check(spec(), needs_with(oom_score_adj=None)) == ()
    assert check(spec(), needs_with(oom_score_adj=0)) == ()
    only(check(spec(), needs_with(oom_score_adj=-1000)), "privileges.oom-score")
    assert check(granted("CAP_SYS_RESOURCE", oomScoreAdj=0), needs_with(oom_score_adj=-998)) == ()


def test_oom_scores_that_the_nodes_memory_makes():
    (found,) = check(granted(oomScoreAdj=900), needs_with(oom_score_adj=850))
    assert (found.rule, found.severity) == ("privileges.oom-score", "warn")


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


# --- the answer ----------------------------------------------------------------------------------------


def test_refusals_are_all_named():
    findings = check(spec(), with_task(no_new_privs=False, cap_ambient=ALL | NET_ADMIN))
    with pytest.raises(WiderPrivileges) as caught:
        admission.refuse(findings, what="ns/warm")
    message = str(caught.value)
    assert message.startswith("could not admit image 'ns/warm': task 7 (other)")
    assert "[privileges.no-new-privs]" in message
    assert "[privileges.capabilities]" in message
    assert "\n" not in message


def test_kinds_of_refusal():
    def one(rule: str, severity: Any = "refuse") -> Finding:
        return Finding(rule=rule, severity=severity, message="m", remedy="r")

    admission.refuse([one("privileges.user", "warn"), one("mounts.added", "unknown")], what="w")
    with pytest.raises(AdmissionRefused):
        admission.refuse([one("admission.hooks"), one("mounts.missing")], what="w")
    with pytest.raises(ImageIncompatible):
        admission.refuse([one("mounts.missing")], what="w")
