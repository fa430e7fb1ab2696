"""What an image's container can reach, against what a new spec would let it reach.

Namespaces, user-namespace maps, devices, descriptors, mounts, read-only and masked paths, hooks: CRIU makes
them again as they were at the dump.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compat.rules.case import NODE_DEVICES, given, part, specified_mounts
from engines.api import DeviceNeed, Finding, IdMapping, MountNeed, Needs, TaskNeeds
from engines.places import is_bind, resolve
from shim.privileges import Grant, Offence, grouped

_CONFINING = ("network", "pid", "ipc", "uts", "mount")
_CGROUPS = frozenset({"cgroup", "cgroup2"})
_TELLING = ("cgroup", "time")  # show something of the host, and give no hold on it
# Every OCI runtime lets a container use these, whatever its spec says.
_ALWAYS: Sequence[Mapping[str, Any]] = tuple(
    {"allow": True, "type": "c", "major": major, "minor": minor, "access": "rwm"}
    for major, minor in ((1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2), (136, None))
)


def check_container(
    spec: Mapping[str, Any], needs: Needs, *, allowed_hooks: Collection[str], rootfs_path: Path | None = None
) -> Iterator[Finding]:
    """Findings for everything in which the image's container reaches further than the new spec allows.

    allowed_hooks: absolute paths of the OCI hooks that may run at a restore. rootfs_path: the new
    container's, in which the destinations of its mounts are resolved.
    """
    yield from _namespaces(spec, needs)
    yield from _nested(spec, needs)
    yield from _user_namespace(spec, needs)
    yield from _devices(spec, needs)
    yield from _shared(needs)
    yield from _privileged(spec, needs)
    yield from _mounts(spec, needs, rootfs_path)
    yield from _read_only(spec, needs, rootfs_path)
    yield from _masked(spec, needs, rootfs_path)
    yield from _hooks(spec, allowed_hooks)


def _refusal(field: str, message: str, remedy: str) -> Finding:
    return Finding(rule=f"privileges.{field}", severity="refuse", message=message, remedy=remedy)


# --- namespaces ----------------------------------------------------------------------------------------


def _namespaces(spec: Mapping[str, Any], needs: Needs) -> Iterator[Finding]:
    for kind in (*_CONFINING, *_TELLING):
        if given(spec, kind) == "host":
            continue

        def in_the_hosts(kind: str = kind) -> Iterator[Offence]:
            for task in needs.tasks:
                if task.namespaces.get(kind, 0 if needs.namespaces.get(kind) == "host" else 1) == 0:
                    yield task, f"lives in the host's {kind} namespace", "gives one apart from the host's"

        remedy = (
            f"give the new container the host's {kind} namespace, or take the checkpoint of one with its own"
        )
        for finding in grouped("privileges.namespaces", in_the_hosts(), remedy):
            if kind in _CONFINING:
                yield finding
            else:
                yield Finding(rule=finding.rule, severity="warn", message=finding.message, remedy=remedy)


def _nested(spec: Mapping[str, Any], needs: Needs) -> Iterator[Finding]:
    """Only CAP_SYS_ADMIN gets a task into another namespace than its container's."""
    if Grant(spec).may_reach("CAP_SYS_ADMIN"):
        return
    init: TaskNeeds | None = next(iter(needs.tasks), None)

    def elsewhere() -> Iterator[Offence]:
        for task in needs.tasks:
            for kind, number in sorted(task.namespaces.items()):
                if init and number and number != init.namespaces.get(kind):
                    yield (
                        task,
                        f"lives in another {kind} namespace than the container's first task",
                        "does not grant CAP_SYS_ADMIN, without which no task gets there",
                    )

    remedy = "grant CAP_SYS_ADMIN to the new container, or end that task before the checkpoint"
    yield from grouped("privileges.namespaces", elsewhere(), remedy)


def _user_namespace(spec: Mapping[str, Any], needs: Needs) -> Iterator[Finding]:
    kind = given(spec, "user")
    image = needs.namespaces.get("user", "host")
    remedy = "give the new container the user namespace and the id mappings of the old one"
    if image == "host" and kind != "host":
        yield _refusal(
            "user-namespace",
            "the image's tasks have the host's user ids, but the new spec demands a user namespace",
            remedy,
        )
    elif image != "host" and kind == "host":
        yield _refusal(
            "user-namespace",
            "the image's tasks live in a user namespace of their own, but the new spec gives none",
            remedy,
        )
    elif image != "host":
        for field, held in (("uidMappings", needs.uid_map), ("gidMappings", needs.gid_map)):
            wanted = _mappings(part(spec, "linux").get(field) or ())
            if _sorted(held) != wanted:
                yield _refusal(
                    "user-namespace",
                    f"the image's {field} are {_in_words(_sorted(held))}, the new spec's {_in_words(wanted)}",
                    remedy,
                )


def _mappings(entries: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, int]]:
    return sorted((int(e["containerID"]), int(e["hostID"]), int(e["size"])) for e in entries)


def _sorted(maps: Sequence[IdMapping]) -> list[tuple[int, int, int]]:
    return sorted((entry.container_id, entry.host_id, entry.size) for entry in maps)


def _in_words(maps: Sequence[tuple[int, int, int]]) -> str:
    return ", ".join(f"{inside}→{outside} ({size})" for inside, outside, size in maps) or "none"


# --- devices and descriptors ---------------------------------------------------------------------------


def _devices(spec: Mapping[str, Any], needs: Needs) -> Iterator[Finding]:
    rules: Sequence[Mapping[str, Any]] = part(part(spec, "linux"), "resources").get("devices") or ()
    remedy = "allow the device in the new spec, or close it before the checkpoint"
    for device in needs.devices:
        if device.major < 0:
            if not _named_by_spec(spec, device.path):
                yield _refusal(
                    "devices",
                    f"the image has the device '{device.path}' open, whose numbers it does not record, and "
                    "the new spec does not name it",
                    "name the device in the new spec, or close it before the checkpoint",
                )
        elif not _device_allowed(device, (*rules, *_ALWAYS)):
            yield _refusal(
                "devices",
                f"the image has '{device.path}' ({device.kind} {device.major}:{device.minor}) open for "
                f"'{device.access}', which the new spec's device rules do not allow",
                remedy,
            )


def _named_by_spec(spec: Mapping[str, Any], path: str) -> bool:
    nodes = {str(node.get("path")) for node in part(spec, "linux").get("devices") or ()}
    return path in nodes or path in {str(mount.get("destination")) for mount in spec.get("mounts") or ()}


def _device_allowed(device: DeviceNeed, rules: Sequence[Mapping[str, Any]]) -> bool:
    """The last rule that speaks of a device and an access decides; without any it is denied."""
    for letter in device.access:
        allowed = False
        for rule in rules:
            kind = str(rule.get("type") or "a")
            if (
                kind in ("a", device.kind)
                and _matches(rule.get("major"), device.major)
                and _matches(rule.get("minor"), device.minor)
                and letter in str(rule.get("access") or "rwm")
            ):
                allowed = bool(rule.get("allow"))
        if not allowed:
            return False
    return True


def _matches(wanted: Any, number: int) -> bool:
    return wanted is None or int(wanted) < 0 or int(wanted) == number


def _shared(needs: Needs) -> Iterator[Finding]:
    for words in needs.shared_with_host:
        yield _refusal(
            "descriptors",
            f"the image holds {words}, which leads out of the container",
            "close it before the checkpoint",
        )


def _privileged(spec: Mapping[str, Any], needs: Needs) -> Iterator[Finding]:
    grant = Grant(spec)
    for need in needs.privileged:
        if not grant.may_reach(*need.capabilities):
            yield _refusal(
                "descriptors",
                f"the image holds {need.what}, but the new spec does not grant {need.capabilities[0]}, which "
                "it takes to open one",
                f"grant {need.capabilities[0]} to the new container, or close it before the checkpoint",
            )


# --- the file system -----------------------------------------------------------------------------------


def _mounts(spec: Mapping[str, Any], needs: Needs, rootfs_path: Path | None) -> Iterator[Finding]:
    """Without CAP_SYS_ADMIN a container has the mounts that its runtime makes, and no others.

    One more could show what the spec hides: a second /proc has nothing masked, and so has one over the first.
    """
    if Grant(spec).may_reach("CAP_SYS_ADMIN"):
        return
    specified: dict[str, list[Mapping[str, Any]]] = {}
    for entry in spec.get("mounts") or ():
        specified.setdefault(resolve(rootfs_path, str(entry.get("destination"))), []).append(entry)
    linux = part(spec, "linux")
    masked = [_clean(path) for path in linux.get("maskedPaths") or ()]
    read_only = [_clean(path) for path in linux.get("readonlyPaths") or ()]
    room = Counter({path: len(entries) for path, entries in specified.items()})
    room.update(["/", *masked, *read_only])
    for mount in needs.mounts:
        path, entries = mount.destination, specified.get(mount.destination, ())
        if room[path] == 0 and _made_by_runtime(spec, mount, specified):
            room[path] = 1
        room[path] -= 1
        wrong = ""
        if room[path] < 0:
            wrong = f"the image has a {mount.fstype} on '{path}', where the new spec has none"
        elif path in masked:
            pass  # see the rule of these
        elif path in read_only:
            if not _is_itself(mount):
                wrong = f"the image has '{mount.root}' of a {mount.fstype} on '{path}', not that path itself"
        elif entries and not any(_is_kind(mount, entry) for entry in entries):
            kind = entries[-1].get("type") or "bind"
            wrong = f"the image has a {mount.fstype} on '{path}', where the new spec has a {kind}"
        elif len(entries) == 1 and (lacking := _lacking(mount, entries[0])):
            wrong = f"the image's mount on '{path}' lacks {', '.join(lacking)}, which the new spec demands"
        if wrong:
            yield _refusal(
                "mounts",
                wrong,
                "take the checkpoint of a container without that mount, mount the same in the new one, or "
                "grant it CAP_SYS_ADMIN",
            )


def _made_by_runtime(
    spec: Mapping[str, Any], mount: MountNeed, specified: Mapping[str, Sequence[Mapping[str, Any]]]
) -> bool:
    """Mounts that stand in no spec: the terminal, control groups below their top, and the device nodes of a
    container that may not make any (it has a user namespace).
    """
    path = mount.destination
    if path == "/dev/console":
        return mount.fstype == "devpts" and bool(part(spec, "process").get("terminal"))
    if mount.fstype in _CGROUPS:
        tops = [top for top, entries in specified.items() if any(e.get("type") == "cgroup" for e in entries)]
        return mount.external and any(path.startswith(f"{top}/") for top in tops)
    nodes = {str(node.get("path")) for node in part(spec, "linux").get("devices") or ()} | NODE_DEVICES
    return mount.external and path == mount.source and path in nodes


def _is_kind(mount: MountNeed, entry: Mapping[str, Any]) -> bool:
    """Whether a mount is what the spec says. Of control groups version 1 has a tmpfs that holds them."""
    kind = str(entry.get("type"))
    if kind == "cgroup":
        return mount.fstype in {*_CGROUPS, "tmpfs"}
    if is_bind(entry):
        return mount.external or mount.fstype in _CGROUPS
    return mount.fstype == kind


def _is_itself(mount: MountNeed) -> bool:
    """Whether a mount on a path of the kernel's is made of that path, or hides it."""
    of_kernel = mount.destination.startswith(("/proc/", "/sys/"))
    return not of_kernel or not mount.root or _hides(mount) or mount.destination.endswith(mount.root)


def _lacking(mount: MountNeed, entry: Mapping[str, Any]) -> list[str]:
    """What the spec takes away from a mount, and the image's mount does not."""
    options = [str(word) for word in entry.get("options") or ()]
    if mount.flags is None:
        return []
    wanted: list[str] = []
    for flag in ("nosuid", "nodev", "noexec"):
        spoken = [word for word in options if word in {flag, flag.removeprefix("no")}]
        if spoken[-1:] == [flag]:
            wanted.append(flag)
    return [flag for flag in wanted if flag not in mount.flags]


def _read_only(spec: Mapping[str, Any], needs: Needs, rootfs_path: Path | None) -> Iterator[Finding]:
    """Mounts come back with the flags they had."""
    writable = {mount.destination for mount in needs.mounts if not mount.readonly}
    mounted = {mount.destination for mount in needs.mounts}
    remedy = "make it writable in the new spec, or take the checkpoint of a container that has it read-only"
    wanted: list[str] = []
    for path, entry in specified_mounts(spec, rootfs_path).items():
        if _is_read_only(entry):
            wanted += _hierarchies(needs, path) if entry.get("type") == "cgroup" else [path]
    if part(spec, "root").get("readonly"):
        wanted.append("/")
    for path in dict.fromkeys(wanted):
        if path in writable:
            yield _refusal(
                "read-only", f"the image can write to '{path}', which the new spec has read-only", remedy
            )
    for path in map(_clean, part(spec, "linux").get("readonlyPaths") or ()):
        if path in writable or (path not in mounted and _is_there(path, mounted)):
            yield _refusal(
                "read-only", f"the image can write to '{path}', which the new spec has read-only", remedy
            )


def _hierarchies(needs: Needs, top: str) -> list[str]:
    """The control groups under a cgroup mount. Of version 1, runc makes the hierarchies read-only, and leaves
    the tmpfs that holds them writable.
    """
    return [
        mount.destination
        for mount in needs.mounts
        if mount.fstype in {"cgroup", "cgroup2"} and f"{mount.destination}/".startswith(f"{top}/")
    ]


def _masked(spec: Mapping[str, Any], needs: Needs, rootfs_path: Path | None) -> Iterator[Finding]:
    """A path is hidden by /dev/null on a file, or an empty directory that nobody can write to."""
    mounted = {mount.destination for mount in needs.mounts}
    masked = dict.fromkeys(map(_clean, part(spec, "linux").get("maskedPaths") or ()))
    hiding = {mount.destination for mount in needs.mounts if _hides(mount)}
    ours = specified_mounts(spec, rootfs_path)
    showing = {mount.destination for mount in needs.mounts if not _hides(mount)} - ours.keys()
    hidden = masked.keys() & (hiding - showing)
    for path in masked:
        covered = any(path == over or path.startswith(f"{over}/") for over in hidden)
        if not covered and (path in showing or _is_there(path, mounted)):
            yield _refusal(
                "masked-paths",
                f"the image can see '{path}', which the new spec hides",
                "take the checkpoint of a container that hides it, on a node whose kernel has it",
            )


def _hides(mount: MountNeed) -> bool:
    return (mount.external and mount.source == "/dev/null") or (mount.fstype == "tmpfs" and mount.readonly)


def _is_there(path: str, mounted: Collection[str]) -> bool:
    """Whether the restored container would have this path of the kernel's.

    Only /proc and /sys can be judged from here: they look the same on the host.
    """
    top = "/" + path.strip("/").partition("/")[0]
    return top in {"/proc", "/sys"} and top in mounted and Path(path).exists()


def _is_read_only(mount: Mapping[str, Any]) -> bool:
    options = [word for word in mount.get("options") or () if word in {"ro", "rw", "rro"}]
    return bool(options) and options[-1] != "rw"


def _clean(path: Any) -> str:
    return os.path.normpath(str(path))


# --- hooks ---------------------------------------------------------------------------------------------


def _hooks(spec: Mapping[str, Any], allowed: Collection[str]) -> Iterator[Finding]:
    for kind, entries in part(spec, "hooks").items():
        for entry in entries or ():
            path = str(entry.get("path"))
            if path not in allowed:
                yield Finding(
                    rule="admission.hooks",
                    severity="refuse",
                    message=f"the new spec has the {kind} hook '{path}', which may not run at a restore",
                    remedy="add it to allowed_hooks in the node's configuration if it may run a second time",
                )
