"""Differences between the dumped container's specification and the new one.

A restored process is what it was at the dump. Some of the new spec is about the container around it and is
applied; some is about a program that is not started again and is ignored; some would be a lie.
Values of environment variables are never told: they hold secrets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compat.capabilities import mask, names
from compat.rules.case import Case, clean, finding, given, part, rule
from engines.api import Finding

_N_NAMED = 6
# What Kubernetes and runtimes put into the environment of each pod anew: nobody's edit.
_CALLERS = re.compile(r"HOSTNAME|.*_SERVICE_(HOST|PORT(_\w+)?)|.*_PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?")


def _sections(case: Case, name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return part(case.origin.dump_spec or {}, name), part(case.new, name)


def _differs(a: Any, b: Any) -> bool:
    return bool(a or b) and json.dumps(a, sort_keys=True) != json.dumps(b, sort_keys=True)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _N_NAMED} more" if len(names) > _N_NAMED else ""
    return ", ".join(names[:_N_NAMED]) + more


@rule("spec.edit.ignored", about="spec", source="CRIU and runsc restore memory: nothing is executed again")
def ignored(case: Case) -> Iterator[Finding]:
    """Arguments, environment, working directory, image command, umask and limits of the process (rlimits,
    OOM score, nice value and scheduling policy) are those of the dump, and so are device nodes, the
    propagation of the root's mounts, cgroup and time namespaces, and host name, domain name and sysctls of
    namespaces that the image holds: a change is ignored. CRIU keeps no personality and no I/O priority: a
    restored process has the usual ones, whatever both specifications say. Start the container anew to have
    it.
    """
    if case.origin.dump_spec is None:
        return
    old, new = _sections(case, "process")
    changed = [
        words
        for key, words in (
            ("args", "the arguments"),
            ("cwd", "the working directory"),
            ("rlimits", "resource limits of the process"),
            ("oomScoreAdj", "the OOM score"),
            ("scheduler", "the priority"),
        )
        if _differs(old.get(key), new.get(key))
    ]
    lost = list(_lost(case))
    if lost:
        yield finding(
            "spec.edit.ignored",
            "warn",
            f"the specification sets {' and '.join(lost)}, of which CRIU keeps none: a restored process has "
            "the usual",
            "start the container without torpor.dev/restore-from to have it",
        )
    changed += _ignored_of_linux(case)
    if _differs(*_host_names(case)) and given(case.new, "uts") == "own":
        changed.append("the host name")
    sysctls = [name for name in _changed_sysctls(case) if not _is_applied(case, name)]
    if sysctls:
        changed.append(f"sysctls ({_some(sysctls)})")
    names = _changed_names(old.get("env") or (), new.get("env") or ())
    if names:
        changed.append(f"the environment ({_some(names)})")
    if changed:
        yield finding(
            "spec.edit.ignored",
            "warn",
            f"the new spec changes {'; '.join(changed)}: a restored container keeps what it had",
            "start the container without torpor.dev/restore-from to have the change",
        )


def _lost(case: Case) -> Iterator[str]:
    """What the old or the new container was to have, and no restored one has."""
    if case.has_kernel:
        return
    if any(process.get("ioPriority") for process in _sections(case, "process")):
        yield "an I/O priority"
    if any(part(linux, "personality").get("domain") == "LINUX32" for linux in _sections(case, "linux")):
        yield "a personality"


def _ignored_of_linux(case: Case) -> Iterator[str]:
    """What is made once, when a container starts."""
    dumped, new_spec = case.origin.dump_spec or {}, case.new
    old, new = _sections(case, "linux")
    umasks = [part(process, "user").get("umask") for process in _sections(case, "process")]
    for before, after, words in (
        (*umasks, "the umask"),
        (old.get("rootfsPropagation"), new.get("rootfsPropagation"), "the propagation of the root's mounts"),
        (dumped.get("domainname"), new_spec.get("domainname"), "the domain name"),
    ):
        if _differs(before, after):
            yield words
    nodes = [{str(node["path"]) for node in section.get("devices") or ()} for section in (old, new)]
    if added := sorted(nodes[1] - nodes[0]):
        yield f"device nodes ({_some(added)})"
    for kind in ("cgroup", "time"):
        if given(dumped, kind) != given(new_spec, kind):
            yield f"the {kind} namespace"


def _host_names(case: Case) -> tuple[Any, Any]:
    return (case.origin.dump_spec or {}).get("hostname"), case.new.get("hostname")


def _changed_sysctls(case: Case) -> list[str]:
    old, new = (part(section, "sysctl") for section in _sections(case, "linux"))
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def _is_applied(case: Case, sysctl: str) -> bool:
    """A network namespace of the container's own is made anew and set up as the new spec says."""
    of_network = sysctl.replace(".", "/").startswith("net/")
    return of_network and not case.has_kernel and given(case.new, "network") == "own"


def _changed_names(old: Sequence[str], new: Sequence[str]) -> list[str]:
    before, after = _by_name(old), _by_name(new)
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return sorted(name for name in names if not _CALLERS.fullmatch(name))


def _by_name(environment: Sequence[str]) -> dict[str, str]:
    return {name: value for name, _, value in (str(entry).partition("=") for entry in environment)}


@rule("spec.edit.image", about="spec", source="the image's digest, as the caller names it")
def image(case: Case) -> Iterator[Finding]:
    """Another container image under the same processes: files that they have open must be the same there, and
    its command is not run. Restore over the image of the dump.
    """
    old, new = case.origin.image_ref, case.new_image_ref
    if old and new and _digest(old) != _digest(new):
        yield finding(
            "spec.edit.image",
            "warn" if case.local else "unknown",
            f"the dumped container had the image {old}, the new one has {new}: the old program goes on, over "
            "the new image's files",
            "restore over the container image of the dump",
        )


def _digest(reference: str) -> str:
    return reference.rpartition("@")[2]


@rule("spec.edit.identity", about="spec", source="credentials are restored with the task (CRIU, cr-restore)")
def identity(case: Case) -> Iterator[Finding]:
    """The user, its groups, no_new_privs and labels of security modules stay what they were at the dump; a
    spec that names others is refused, since nothing would be as it says. Keep them, or start anew.
    """
    if case.origin.dump_spec is None:
        return
    old, new = _sections(case, "process")
    before, after = part(old, "user"), part(new, "user")
    changed = [
        f"{words} (from {_word(before.get(key))} to {_word(after.get(key))})"
        for key, words in (("uid", "the user"), ("gid", "the group"), ("additionalGids", "additional groups"))
        if _differs(before.get(key), after.get(key))
    ]
    changed += [
        f"{words} (from {_word(old.get(key))} to {_word(new.get(key))})"
        for key, words in (
            ("apparmorProfile", "the AppArmor profile"),
            ("selinuxLabel", "the SELinux label"),
        )
        if _differs(old.get(key), new.get(key))
    ]
    if new.get("noNewPrivileges") and not old.get("noNewPrivileges"):
        changed.append("no_new_privs (from unset to set)")
    if changed:
        yield finding(
            "spec.edit.identity",
            "refuse",
            f"the new spec changes {'; '.join(changed)}, and a restored process keeps the old",
            "give the new container the same, or start it anew",
        )


def _word(value: Any) -> str:
    return json.dumps(value) if value else "none"


@rule("spec.edit.capabilities", about="spec", source="capget at the dump, capset at the restore")
def capabilities(case: Case) -> Iterator[Finding]:
    """A capability that the new spec no longer grants and a process has is held all the same: refused. One
    that it adds is not there: ignored. Keep the capabilities, or start anew.
    """
    if case.origin.dump_spec is None:
        return
    before, after = _sections(case, "process")
    old, new = _granted(before), _granted(after)
    held = 0
    for task in case.needs.tasks:
        held |= task.cap_permitted | task.cap_bounding | task.cap_inheritable
    if dropped := names(held & mask(old - new)):
        yield finding(
            "spec.edit.capabilities",
            "refuse",
            f"the new spec drops {_some(dropped)}, which processes hold",
            "grant them, or start the container anew",
        )
    if added := sorted(new - old):
        yield finding(
            "spec.edit.capabilities",
            "warn",
            f"the new spec adds {_some(added)}, which a restored process does not get",
            "start the container anew to have them",
        )


_CAPABILITY_SETS = ("bounding", "effective", "inheritable", "permitted", "ambient")


def _granted(process: Mapping[str, Any]) -> set[str]:
    sets: Mapping[str, Sequence[str]] = process.get("capabilities") or {}
    return {name for kind in _CAPABILITY_SETS for name in sets.get(kind) or ()}


@rule("spec.edit.seccomp", about="spec", source="filters are programs that the image carries")
def seccomp(case: Case) -> Iterator[Finding]:
    """The processes keep the system call filter that they had. Another one is refused, none is ignored.
    Start anew to have it.
    """
    if case.origin.dump_spec is None:
        return
    old, new = _sections(case, "linux")
    if _differs(old.get("seccomp"), new.get("seccomp")):
        yield finding(
            "spec.edit.seccomp",
            "refuse" if new.get("seccomp") else "warn",
            f"the new spec has {'another' if new.get('seccomp') else 'no'} seccomp profile, and a restored "
            "process keeps its old filter",
            "give the new container the same profile, or start it anew",
        )


@rule("spec.edit.mounts", about="spec", source="mount flags are the image's, sources the new spec's")
def mounts(case: Case) -> Iterator[Finding]:
    """What is mounted may come from elsewhere; where, of which kind and with which options is as it was.
    (That a mount is missing or added is mounts.missing, mounts.added.) Give the new container the same
    mounts.
    """
    if case.origin.dump_spec is None:
        return
    old, new = _by_destination(case.origin.dump_spec), _by_destination(case.new)
    for path in sorted(old.keys() & new.keys()):
        was, now = ("ro" in (entry.get("options") or ()) for entry in (old[path], new[path]))
        if was != now:
            yield finding(
                "spec.edit.mounts",
                "refuse" if now else "warn",
                f"the mount on '{path}' was {'read-only' if was else 'writable'} and is so again, whatever "
                "the new spec says",
                f"make it {'read-only' if was else 'writable'}, or start the container anew",
            )
        options = [_other_options(entry) for entry in (old[path], new[path])]
        if options[0] != options[1] and not case.has_kernel:
            yield finding(
                "spec.edit.mounts",
                "warn",
                f"the new spec changes options of the mount on '{path}' "
                f"({_some(sorted(options[0] ^ options[1]))}): it keeps those that it had",
                "start the container anew to have the change",
            )
    readonly = [bool(root.get("readonly")) for root in _sections(case, "root")]
    if readonly[0] != readonly[1]:
        yield finding(
            "spec.edit.mounts",
            "refuse" if readonly[1] or case.has_kernel else "warn",
            f"the root file system was {'read-only' if readonly[0] else 'writable'} and is so again, "
            "whatever the new spec says",
            f"set root.readonly to {str(readonly[0]).lower()}, or start the container anew",
        )


def _other_options(entry: Mapping[str, Any]) -> set[str]:
    """Options of a mount beside its being writable: size, mode, owner, propagation and flags."""
    return {str(word) for word in entry.get("options") or ()} - {"ro", "rw", "bind", "rbind"}


def _by_destination(spec: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    entries: Sequence[Mapping[str, Any]] = spec.get("mounts") or ()
    return {clean(entry.get("destination")): entry for entry in entries}


@rule("spec.edit.applied", about="spec", source="cgroups, host name and annotations are made by the runtime")
def applied(case: Case) -> Iterator[Finding]:
    """Labels and annotations, cgroup limits, the cgroup's path, probes, the host name of a pod (its UTS
    namespace, given by path) and `net.*` sysctls of a network namespace of its own are the new container's: a
    change is applied. Nothing needs to be done.
    """
    if case.origin.dump_spec is None:
        return
    old, new = _sections(case, "linux")
    changed = [
        words
        for before, after, words in (
            (old.get("resources"), new.get("resources"), "cgroup limits"),
            (old.get("cgroupsPath"), new.get("cgroupsPath"), "the cgroup's path"),
            (case.origin.dump_spec.get("annotations"), case.new.get("annotations"), "annotations"),
        )
        if _differs(before, after)
    ]
    if _differs(*_host_names(case)) and given(case.new, "uts") != "own":
        changed.append("the host name")
    sysctls = [name for name in _changed_sysctls(case) if _is_applied(case, name)]
    if sysctls:
        changed.append(f"sysctls ({_some(sysctls)})")
    if changed:
        message = f"the new spec changes {', '.join(changed)}, which is applied"
        yield finding("spec.edit.applied", "ok", message, "")
