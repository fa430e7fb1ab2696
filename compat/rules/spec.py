"""The new specification: what it gives against what the image had."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compat.rules.case import (
    NODE_DEVICES,
    Case,
    Given,
    clean,
    finding,
    given,
    part,
    rule,
    specified_mounts,
)
from compat.rules.kernel import in_cgroup
from engines.api import Finding, Severity
from engines.places import is_bind


@rule("spec.terminal", about="spec", source="runc: restore without a console socket fails, with one works")
def terminal(case: Case) -> Iterator[Finding]:
    """A terminal comes through the console socket or not at all. Give the new container one if the old one
    had it (process.terminal; in a pod: tty).
    """
    wanted = bool(part(case.new, "process").get("terminal"))
    dumped = case.origin.dump_spec
    if case.needs.terminal and dumped is not None and not part(dumped, "process").get("terminal"):
        yield finding(
            "spec.terminal",
            "refuse",
            "the image's container had no terminal, and holds one whose other side was closed or is outside",
            "let the program close it, and take the checkpoint again",
        )
    elif wanted != case.needs.terminal:
        yield finding(
            "spec.terminal",
            "refuse",
            f"the image's container had {'a' if case.needs.terminal else 'no'} terminal, the new one "
            f"{'wants one' if wanted else 'has none'}",
            f"set process.terminal (in a pod: tty) to {str(case.needs.terminal).lower()}",
        )


@rule("spec.network", about="spec", source="measured: exit status 0, and the wrong network namespace")
def network_kind(case: Case) -> Iterator[Finding]:
    """CRIU makes the kind of network namespace that the image had, whatever the new spec says. Restore into a
    container of the same kind of network.
    """
    if case.has_kernel:
        return
    kinds: Mapping[str, Given] = {"own": "own", "external": "joined", "host": "host"}
    had = kinds[case.needs.namespaces.get("network", "own")]
    wants = given(case.new, "network")
    if had != wants:
        words = {"own": "an empty one of its own", "joined": "one that its caller made", "host": "the host's"}
        yield finding(
            "spec.network",
            "refuse",
            f"the image's network namespace was {words[had]}, the new container's is {words[wants]}",
            "restore into a container of the same kind of network",
        )


@rule(
    *("spec.ipc", "spec.uts"),
    about="spec",
    source="measured: restored, in a namespace of its own all the same",
)
def own_kinds(case: Case) -> Iterator[Finding]:
    """An IPC or UTS namespace of its own is made again, whatever the new spec says. Restore into a container
    that has one.
    """
    for kind in () if case.has_kernel else ("ipc", "uts"):
        if case.needs.namespaces.get(kind) == "own" and given(case.new, kind) == "host":
            yield finding(
                f"spec.{kind}",
                "refuse",
                f"the image has {_ARTICLES[kind]} namespace of its own, the new container is to have the "
                "host's",
                f"give the new container {_ARTICLES[kind]} namespace",
            )


_ARTICLES: Mapping[str, str] = {"ipc": "an IPC", "uts": "a UTS"}


@rule("spec.namespaces", about="here", source="measured: Requested network namespace ... does not exist")
def joined(case: Case) -> Iterator[Finding]:
    """A namespace that the new container is to join must be there. Make it first, or name another."""
    for entry in part(case.new, "linux").get("namespaces") or ():
        path = str(entry.get("path") or "")
        if path and not os.path.lexists(path):
            yield finding(
                "spec.namespaces",
                "refuse",
                f"the new container is to join the {entry.get('type')} namespace {path}, which is not there",
                "make it first, or name another",
            )


@rule(
    *("mounts.missing", "mounts.added", "mounts.kind"),
    about="spec",
    source="measured: No mapping for N mountpoint; one that only the new spec has is silently absent",
)
def mounts(case: Case) -> Iterator[Finding]:
    """Mounts are matched by destination: each that the image was given must be given again, and one that only
    the new spec has would silently be missing. Give the new container the mounts of the old one.
    """
    specified = specified_mounts(case.new, case.rootfs_path)
    # Without the root file system a link may hide that two paths are one.
    severity: Severity = "refuse" if case.rootfs_path else "unknown"
    hidden = {clean(path) for path in part(case.new, "linux").get("maskedPaths") or ()}
    image = {mount.destination: mount for mount in case.needs.mounts}
    for path, mount in image.items():
        ours = path == "/" or path in hidden or path in NODE_DEVICES or path.startswith(("/proc/", "/sys/"))
        if mount.external and not ours and not is_bind(specified.get(path, {})):
            yield finding(
                "mounts.missing",
                severity,
                f"the image has a mount on '{path}', for which the new spec names no source",
                f"mount something on '{path}' in the new container",
            )
    shows_cgroups = any(in_cgroup(path) for path in image)  # how is cgroup.mode's
    for path, entry in specified.items():
        if in_cgroup(path) and shows_cgroups:
            continue
        found = image.get(path)
        if found is None:
            yield finding(
                "mounts.added",
                severity,
                f"the new spec mounts '{entry.get('source')}' on '{path}', where the image has nothing; the "
                "restored container would not see it",
                "leave the mount out, or take the checkpoint of a container that has it",
            )
        elif is_bind(entry) and not found.external:
            yield finding(
                "mounts.kind",
                "refuse",
                f"the new spec mounts '{entry.get('source')}' on '{path}', where the image has a "
                f"{found.fstype} with content of its own",
                "leave the mount out, or take the checkpoint of a container that has it",
            )


@rule("mounts.mapped", about="spec", source="measured: restored, and files have the ids of the node")
def mapped(case: Case) -> Iterator[Finding]:
    """CRIU makes no mount whose ids are mapped (uidMappings, gidMappings): files in it would have other
    owners than the new spec says. Mount without, or start the container anew.
    """
    for path, entry in () if case.has_kernel else specified_mounts(case.new, case.rootfs_path).items():
        by_option = {"idmap", "ridmap"} & set(entry.get("options") or ())
        if by_option or entry.get("uidMappings") or entry.get("gidMappings"):
            yield finding(
                "mounts.mapped",
                "refuse",
                f"the new spec maps the ids of the mount on '{path}', which a restore does not do",
                "mount it without, or start the container anew",
            )


@rule("mounts.source", about="here", source="measured: not a directory; field report cri-o PR#6203")
def sources(case: Case) -> Iterator[Finding]:
    """What the new spec binds in must be there, and be a file where a file is, a directory where that is.
    Make it again, of the kind that it was.
    """
    for path, entry in specified_mounts(case.new, case.rootfs_path).items():
        source = Path(str(entry.get("source") or ""))
        if not is_bind(entry) or not source.is_absolute():
            continue
        place = case.rootfs_path / path.lstrip("/") if case.rootfs_path else None
        if not source.exists():
            problem = "is not there"
        elif place and place.is_dir() and not source.is_dir():
            problem = "is no directory, and a directory is there"
        elif place and place.is_file() and source.is_dir():
            problem = "is a directory, and a file is there"
        else:
            continue
        yield finding(
            "mounts.source",
            "refuse",
            f"'{source}', which the new spec mounts on '{path}', {problem}",
            "make it again, of the kind that it was",
        )


@rule("mounts.reach", about="here", source="measured: mnt-v2: Failed to open_tree: Permission denied")
def reach(case: Case) -> Iterator[Finding]:
    """CRIU opens what is to be mounted as the root of the new container's user namespace, unlike a runtime at
    a start. Let that user enter all directories above it (chmod o+x, or an access list).
    """
    if case.has_kernel or case.needs.namespaces.get("user", "host") == "host":
        return
    linux = part(case.new, "linux")
    users, groups = (_Ids(linux.get(key) or ()) for key in ("uidMappings", "gidMappings"))
    sources = {
        path: str(entry.get("source"))
        for path, entry in specified_mounts(case.new, None).items()
        if is_bind(entry)
    }
    if case.rootfs_path:
        sources["/"] = str(case.rootfs_path)
    for path, source in sources.items():
        if shut := _shut(source, users, groups):
            yield finding(
                "mounts.reach",
                "refuse",
                f"'{source}', which is mounted on '{path}', lies in '{shut}', which user {users.root} of the "
                "node, the root of the new container's user namespace, may not enter",
                f"let it (chmod o+x '{shut}'), or give the container a volume elsewhere",
            )


class _Ids:
    """A map of a user namespace. root: what its 0 is outside, None if it has none."""

    def __init__(self, entries: Sequence[Mapping[str, Any]]) -> None:
        self._spans = [(int(entry["hostID"]), int(entry["size"])) for entry in entries]
        self.root = next((int(e["hostID"]) for e in entries if e["containerID"] == 0), None)

    def __contains__(self, number: int) -> bool:
        return any(first <= number < first + size for first, size in self._spans)


def _shut(source: str, users: _Ids, groups: _Ids) -> str:
    """The first directory above a path that the root of a user namespace may not enter, "" without one."""
    for place in reversed(Path(os.path.realpath(source)).parents):
        try:
            found = place.stat()
            listed = "system.posix_acl_access" in os.listxattr(place)
        except OSError:
            return ""  # mounts.source says so
        mine, ours = found.st_uid == users.root, found.st_gid == groups.root
        bit = stat.S_IXUSR if mine else stat.S_IXGRP if ours else stat.S_IXOTH
        ruled = found.st_uid in users and found.st_gid in groups
        if not (ruled or listed or found.st_mode & bit):
            return str(place)
    return ""
