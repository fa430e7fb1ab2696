"""No privilege by restore, field by field: what a task of the image may hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.api import Finding, ImageIncompatible, Needs, WiderPrivileges
from shim import admission
from shim.checkpointable import without_io_uring
from shim.errors import AdmissionRefused
from shim.images.manifest import seccomp_digest
from shim.privileges import mask, names
from tests.support.admission import (
    ALL,
    NEEDS,
    POWERLESS,
    TASK,
    check,
    granted,
    manifest,
    only,
    spec,
    with_task,
)
from tests.support.containers import CAPABILITIES

NET_ADMIN = mask(["CAP_NET_ADMIN"])
PROFILE = {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW"}]}


def test_equal_passes():
    assert check(spec()) == ()


# --- user and groups -----------------------------------------------------------------------------------


def as_user(uid: int) -> Callable[[dict[str, Any]], object]:
    """A spec as Kubernetes writes it for a user of its own: only the bounding set is left."""

    def edit(document: dict[str, Any]) -> None:
        document["process"]["user"] = {"uid": uid, "gid": uid, "additionalGids": [50]}
        document["process"]["capabilities"] = {"bounding": CAPABILITIES}

    return edit


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


@pytest.mark.parametrize("name", ["RLIMIT_NPROC", "RLIMIT_SIGPENDING"])
def test_limits_that_follow_a_nodes_memory_may_be_those_of_a_larger_node(name: str):
    default = int(Path("/proc/sys/kernel/threads-max").read_text()) // 2

    def of(hard: int, here: int, document: dict[str, Any] | None = None) -> tuple[Finding, ...]:
        needs = with_task(rlimits={name: (hard, hard)})
        return check(document or spec(), needs, inherited_rlimits={name: here})

    assert of(4 * default, default) == ()
    only(of(2**64 - 1, default), "privileges.rlimits")  # somebody lifted it
    only(of(4 * default, default - 1), "privileges.rlimits")  # somebody set it here
    only(of(default + 1, default, spec(limited(name, default))), "privileges.rlimits")


def test_rlimits_do_not_bind_who_may_raise_them():
    def edit(document: dict[str, Any]) -> None:
        for kept in document["process"]["capabilities"].values():
            if "CAP_SYS_RESOURCE" not in kept:
                kept.append("CAP_SYS_RESOURCE")

    assert check(spec(edit), with_task(rlimits={"RLIMIT_NOFILE": (9999, 9999)})) == ()


# --- scheduling, OOM scores ----------------------------------------------------------------------------


def test_nice_values():
    found = only(check(spec(), with_task(nice=-15)), "privileges.scheduling")
    assert "task 7 (other) has the nice value -15, but the new spec allows none below 0" in found.message
    assert check(spec(), with_task(nice=5)) == ()
    assert check(spec(limited("RLIMIT_NICE", 35)), with_task(nice=-15)) == ()
    only(check(spec(limited("RLIMIT_NICE", 34)), with_task(nice=-15)), "privileges.scheduling")
    assert check(granted(scheduler={"policy": "SCHED_OTHER", "nice": -15}), with_task(nice=-15)) == ()


@pytest.mark.parametrize("policy", ["fifo", "rr", "deadline", "policy 7"])
def test_policies_before_all_others(policy: str):
    needs = with_task(sched_policy=policy, sched_priority=0 if policy == "deadline" else 10)
    only(check(spec(), needs), "privileges.scheduling")
    entry = {"policy": f"SCHED_{policy.upper()}", "priority": 10}
    assert check(granted(scheduler=entry), needs) == ()
    found = check(spec(limited("RLIMIT_RTPRIO", 10)), needs)
    assert not found if policy != "deadline" else only(found, "privileges.scheduling")
    only(check(spec(limited("RLIMIT_RTPRIO", 9)), needs), "privileges.scheduling")


@pytest.mark.parametrize("policy", ["other", "batch", "idle"])
def test_policies_after_all_others(policy: str):
    assert check(spec(), with_task(sched_policy=policy)) == ()


def test_scheduling_does_not_bind_who_may_change_it():
    new = granted("CAP_SYS_NICE")
    needs = with_task(nice=-20, sched_policy="fifo", sched_priority=99)
    assert check(new, needs) == ()


def test_oom_scores():
    assert check(granted(oomScoreAdj=-10), with_task(oom_score_adj=-10)) == ()
    assert check(granted(oomScoreAdj=-10), with_task(oom_score_adj=0)) == ()
    for wanted, held in ((0, -1), (1000, 999), (900, 0), (-10, -998)):
        found = only(
            check(granted(oomScoreAdj=wanted), with_task(oom_score_adj=held)), "privileges.oom-score"
        )
        assert f"has the OOM score adjustment {held}, but the new spec gives {wanted}" in found.message
    assert check(spec(), with_task(oom_score_adj=None)) == ()
    assert check(spec(), with_task(oom_score_adj=0)) == ()
    only(check(spec(), with_task(oom_score_adj=-1000)), "privileges.oom-score")
    assert check(granted("CAP_SYS_RESOURCE", oomScoreAdj=0), with_task(oom_score_adj=-998)) == ()


def test_oom_scores_that_the_nodes_memory_makes():
    (found,) = check(granted(oomScoreAdj=900), with_task(oom_score_adj=850))
    assert (found.rule, found.severity) == ("privileges.oom-score", "warn")


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
