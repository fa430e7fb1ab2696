"""What the tasks of an image hold, against what a new spec would have given them.

A restored task keeps what it held at the dump; the new spec is not applied to it. "Wider" means: more than
a process that starts from the new spec could hold or make itself.

- User and groups: a task may have another user than the spec's only if the spec's own process could become
  it, that is, if it holds CAP_SETUID (groups: CAP_SETGID). So a root process that dropped to uid 1000 passes
  under a root spec, and a root process is refused under a spec with a user of its own, even though a
  set-user-id program might have got it there.
- Capabilities: the bounding set is what no process of a container may ever exceed. Under no_new_privs no
  program can add anything to the permitted set, so then that one is the limit.
- Scheduling: a nice value below zero and a real-time policy need CAP_SYS_NICE, or a resource limit that
  allows them, or must stand in the spec; an OOM score below the spec's needs CAP_SYS_RESOURCE.
- Resource limits: a process may move its soft limit up to the hard one, so the hard ones are compared.
  Without an entry in the spec a cold start inherits the runtime caller's limits: those are then the measure.
  Two of them (tasks, pending signals) follow the memory of a node where nobody sets them, and may differ.
  CAP_SYS_RESOURCE may raise any limit, and is then no restriction.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compat.capabilities import NAMES
from compat.rules.case import part
from engines.api import Finding, Needs, TaskNeeds
from shim.checkpointable import without_io_uring
from shim.images.manifest import seccomp_digest

UNLIMITED = 2**64 - 1
_BITS: Mapping[str, int] = {name: 1 << number for number, name in enumerate(NAMES)}

_ORDINARY = frozenset({"other", "batch", "idle"})
_MAX_TASKS = 1 << 22  # the kernel's PID_MAX_LIMIT: no machine of any size gives more by itself

Offence = tuple[TaskNeeds, str, str]
"""A task, what it holds, what the new spec allows, both in words."""


class Grant:
    """What an OCI spec grants to the processes of its container."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        process = part(spec, "process")
        user = part(process, "user")
        sets = part(process, "capabilities")
        self.uid = int(user.get("uid") or 0)
        self.gid = int(user.get("gid") or 0)
        self.groups = frozenset({self.gid, *map(int, user.get("additionalGids") or ())})
        self.bounding = mask(sets.get("bounding") or ())
        self.permitted = mask(sets.get("permitted") or ())
        self.inheritable = mask(sets.get("inheritable") or ())
        self.no_new_privs = bool(process.get("noNewPrivileges"))
        self.apparmor = str(process.get("apparmorProfile") or "")
        self.selinux = str(process.get("selinuxLabel") or "")
        self.rlimits: Mapping[str, int] = {
            str(entry.get("type")): int(entry.get("hard") or 0) for entry in process.get("rlimits") or ()
        }
        self.scheduler = part(process, "scheduler")
        score: int | None = process.get("oomScoreAdj")
        self.oom_score_adj = min(0, _own_oom_score_adj()) if score is None else int(score)
        executable = self.bounding | self.inheritable
        # What the first process holds: running a program gives root all of its bounding set.
        self.held = self.permitted if self.no_new_privs or self.uid else self.permitted | executable
        # What any later one may gain, by programs with file capabilities too.
        self.reachable = self.permitted if self.no_new_privs else self.permitted | executable

    def may(self, capability: str) -> bool:
        """Whether the spec's own process holds this capability."""
        return bool(self.held & _BITS[capability])

    def may_reach(self, *capabilities: str) -> bool:
        """Whether some process of the container may come to hold one of these capabilities."""
        return bool(self.reachable & mask(capabilities))


def mask(names: Iterable[str]) -> int:
    """Capability names as a bit mask; names that no kernel knows yet count for nothing."""
    bits = 0
    for name in names:
        bits |= _BITS.get(str(name).upper(), 0)
    return bits


def names(bits: int) -> str:
    """A capability bit mask in words."""
    known = [name for name, bit in _BITS.items() if bits & bit]
    rest = [f"capability {number}" for number in range(len(NAMES), 64) if bits >> number & 1]
    return ", ".join(known + rest) or "none"


def check_tasks(
    spec: Mapping[str, Any],
    needs: Needs,
    *,
    recorded_seccomp: str | None,
    inherited: Mapping[str, int] | None,
) -> Iterator[Finding]:
    """Findings for every field in which some task of the image holds more than the new spec grants.

    recorded_seccomp: `seccomp_digest` of the dump's spec, None if nobody recorded it. inherited: hard
    limits that a cold start would inherit, None to ask this process.
    """
    grant = Grant(spec)
    limits = inherited_rlimits() if inherited is None else inherited
    rules: Sequence[tuple[str, Callable[[TaskNeeds], Iterator[Offence]], str]] = (
        ("user", lambda task: _user(task, grant), "give the new container the user of the old one"),
        ("groups", lambda task: _groups(task, grant), "give the new container the groups of the old one"),
        (
            "capabilities",
            lambda task: _capabilities(task, grant),
            "grant these capabilities to the new container, or take the checkpoint of one without them",
        ),
        (
            "no-new-privs",
            lambda task: _no_new_privs(task, grant),
            "allow privilege escalation in the new container, or take the checkpoint of one that forbids it",
        ),
        ("lsm", lambda task: _lsm(task, grant), "give the new container the profile of the old one"),
        (
            "rlimits",
            lambda task: _rlimits(task, grant, limits),
            "raise the limit in the new spec or of the runtime caller's service",
        ),
        (
            "scheduling",
            lambda task: _scheduling(task, grant, limits),
            "grant CAP_SYS_NICE to the new container, or take the checkpoint of one with ordinary priorities",
        ),
    )
    for field, rule, remedy in rules:
        yield from grouped(f"privileges.{field}", (hit for task in needs.tasks for hit in rule(task)), remedy)
    yield from _oom_scores(needs, grant)
    yield from _seccomp(spec, needs, recorded_seccomp)


def grouped(rule: str, offences: Iterable[Offence], remedy: str) -> Iterator[Finding]:
    """One finding for each thing held, however many tasks hold it; it names the first."""
    holders: dict[tuple[str, str], list[TaskNeeds]] = {}
    for task, held, allowed in offences:
        holders.setdefault((held, allowed), []).append(task)
    for (held, allowed), tasks in holders.items():
        more = f" like {len(tasks) - 1} others" if len(tasks) > 1 else ""
        yield Finding(
            rule=rule,
            severity="refuse",
            message=f"task {tasks[0].pid} ({tasks[0].comm}){more} {held}, but the new spec {allowed}",
            remedy=remedy,
        )


# --- one function for each field -----------------------------------------------------------------------


def _user(task: TaskNeeds, grant: Grant) -> Iterator[Offence]:
    others = sorted({uid for uid in task.uids if uid != grant.uid})
    if others and not grant.may("CAP_SETUID"):
        yield (
            task,
            f"runs as uid {', '.join(map(str, others))}",
            f"runs as uid {grant.uid} without CAP_SETUID",
        )


def _groups(task: TaskNeeds, grant: Grant) -> Iterator[Offence]:
    if grant.may("CAP_SETGID"):
        return
    others = sorted({*task.gids, *task.groups} - grant.groups)
    if others:
        yield (
            task,
            f"is in group {', '.join(map(str, others))}",
            f"gives group {', '.join(map(str, sorted(grant.groups)))} without CAP_SETGID",
        )


def _capabilities(task: TaskNeeds, grant: Grant) -> Iterator[Offence]:
    sets = (
        ("bounding", task.cap_bounding, grant.bounding),
        ("permitted", task.cap_permitted, grant.reachable),
        ("effective", task.cap_effective, grant.reachable),
        # A task may make inheritable what it has in its permitted set, and ambient what it has in both.
        ("inheritable", task.cap_inheritable, grant.reachable | grant.inheritable),
        ("ambient", task.cap_ambient, grant.reachable),
    )
    excess: dict[int, list[str]] = {}
    for name, held, allowed in sets:
        if held & ~allowed:
            excess.setdefault(held & ~allowed, []).append(name)
    for wider, where in excess.items():
        yield task, f"has {names(wider)} ({', '.join(where)})", "does not grant that"


def _no_new_privs(task: TaskNeeds, grant: Grant) -> Iterator[Offence]:
    if grant.no_new_privs and not task.no_new_privs:
        yield task, "may gain privileges by running programs (no_new_privs is off)", "demands no_new_privs"


def _lsm(task: TaskNeeds, grant: Grant) -> Iterator[Offence]:
    wanted = grant.selinux or grant.apparmor
    if wanted in {"", "unconfined"}:
        return
    held = task.lsm_profile.partition(" (")[0]  # AppArmor adds its mode: "name (enforce)"
    if held != wanted:
        yield (
            task,
            f"runs under the security profile '{held}'" if held else "runs under no security profile",
            f"demands '{wanted}'",
        )


def _rlimits(task: TaskNeeds, grant: Grant, inherited: Mapping[str, int]) -> Iterator[Offence]:
    if grant.may("CAP_SYS_RESOURCE"):
        return
    for name, (soft, hard) in sorted(task.rlimits.items()):
        allowed = grant.rlimits.get(name, inherited.get(name))
        if allowed is not None and max(soft, hard) > allowed:
            if name not in grant.rlimits and allowed == _of_memory(name) and max(soft, hard) <= _MAX_TASKS:
                continue
            words = f"allows {_limit(allowed)}"
            if name not in grant.rlimits:
                words = f"leaves the runtime caller's limit of {_limit(allowed)}"
            yield task, f"has {name} {_limit(max(soft, hard))}", words


def _of_memory(name: str) -> int | None:
    """The kernel's own value of a limit that follows the machine's memory; None for all other limits.

    A container that inherits it has another one on each kind of node, which nobody gave it. (fork_init and
    its neighbours in the kernel: half of threads-max.)
    """
    if name not in {"RLIMIT_NPROC", "RLIMIT_SIGPENDING"}:
        return None
    return int(Path("/proc/sys/kernel/threads-max").read_text()) // 2


def _limit(value: int) -> str:
    return "unlimited" if value >= UNLIMITED else str(value)


def inherited_rlimits() -> dict[str, int]:
    """Hard limits of this process, which the runtime and a cold-started container inherit."""
    limits: dict[str, int] = {}
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            hard = resource.getrlimit(getattr(resource, name))[1]
            limits[name] = UNLIMITED if hard == resource.RLIM_INFINITY else hard
    return limits


def _scheduling(task: TaskNeeds, grant: Grant, inherited: Mapping[str, int]) -> Iterator[Offence]:
    """A cold start inherits the runtime caller's nice value."""
    if grant.may_reach("CAP_SYS_NICE"):
        return
    limits = {**inherited, **grant.rlimits}
    own = grant.scheduler.get("nice")
    floor = min(0, os.getpriority(os.PRIO_PROCESS, 0) if own is None else int(own))
    floor = min(floor, 20 - min(limits.get("RLIMIT_NICE", 0), 40))
    if task.nice < floor:
        yield task, f"has the nice value {task.nice}", f"allows none below {floor}"
    if task.sched_policy in _ORDINARY:
        return
    highest = 0 if task.sched_policy == "deadline" else limits.get("RLIMIT_RTPRIO", 0)
    if str(grant.scheduler.get("policy") or "").removeprefix("SCHED_").lower() == task.sched_policy:
        highest = max(highest, int(grant.scheduler.get("priority") or 0))
        if task.sched_policy == "deadline":
            return
    if not 0 < task.sched_priority <= highest:
        yield (
            task,
            f"runs under the real-time policy {task.sched_policy} with priority {task.sched_priority}",
            f"allows a real-time priority of {highest}" if highest else "allows no real-time policy",
        )


def _oom_scores(needs: Needs, grant: Grant) -> Iterator[Finding]:
    """For a pod of the class Burstable the kubelet computes 2 to 999 from the node's memory, so the same pod
    has another score on another node. Among those, a lower one is only told.
    """
    if grant.may_reach("CAP_SYS_RESOURCE"):
        return
    wanted = grant.oom_score_adj

    def lower(*, told: bool) -> Iterator[Offence]:
        for task in needs.tasks:
            score = task.oom_score_adj
            if score is not None and score < wanted and (score > 0 and wanted < 1000) == told:
                yield task, f"has the OOM score adjustment {score}", f"gives {wanted}"

    remedy = "give the new container the OOM score of the old one (in a pod: the same requests and limits)"
    yield from grouped("privileges.oom-score", lower(told=False), remedy)
    for finding in grouped("privileges.oom-score", lower(told=True), remedy):
        yield replace(finding, severity="warn")


def _own_oom_score_adj() -> int:
    """What a cold start inherits where the spec says nothing."""
    return int(Path("/proc/self/oom_score_adj").read_text("ascii"))


def _profile_digest(spec: Mapping[str, Any]) -> str:
    return seccomp_digest(part(part(spec, "linux"), "seccomp"))


def _seccomp(spec: Mapping[str, Any], needs: Needs, recorded: str | None) -> Iterator[Finding]:
    """The filter of a task is a program, which cannot be compared with a profile. So the profile of the
    dump's spec must be the new one, and every task must have the same outermost filter. That the filter was
    made of that profile is only the manifest's word.
    """
    wanted = _profile_digest(spec)
    if not wanted:
        return
    remedy = "give the new container the seccomp profile of the old one"
    # The rule against io_uring only takes away, so an image made with it fits a spec without.
    if recorded not in {wanted, _profile_digest(without_io_uring(spec))}:
        held = "another one" if recorded else "none" if recorded == "" else "one that nobody recorded"
        yield Finding(
            rule="privileges.seccomp",
            severity="refuse",
            message=f"the new spec demands a seccomp profile, but the container was dumped with {held}",
            remedy=remedy,
        )
        return
    first = next((task.seccomp_filters[-1] for task in needs.tasks if task.seccomp_filters), "")

    def unfiltered() -> Iterator[Offence]:
        for task in needs.tasks:
            if task.seccomp_mode == "disabled":
                yield task, "has no seccomp filter", "demands one"
            elif task.seccomp_mode == "filter" and task.seccomp_filters[-1:] != (first,):
                yield task, "has another seccomp filter than the first task", "demands the same for all"

    yield from grouped("privileges.seccomp", unfiltered(), remedy)
