"""The kernel, its namespaces and its security modules."""

from __future__ import annotations

import os
from collections.abc import Iterator

from compat.capabilities import names
from compat.probes.kernel import maskable
from compat.rules.case import Case, finding, rule, version
from engines.api import Finding

_DROPPABLE_SINCE = (6, 11)
_GUARDS_SINCE = (6, 13)
_KINDS = {"network": "net", "mount": "mnt"}
# What the same kernel has on one machine and lacks on another.
_OF_MACHINE = ("/sys/devices/", "/proc/acpi", "/proc/asound", "/proc/scsi")


@rule("kernel.page-size", about="node", source="pagemaps count pages of the kernel that made the image")
def page_size(case: Case) -> Iterator[Finding]:
    """Memory is kept in pages of the kernel that made the image. Restore where pages have the same size."""
    had = case.dump_host.page_size_bytes if case.dump_host else case.needs.page_size_bytes
    if had and had != case.node.page_size_bytes:
        yield finding(
            "kernel.page-size",
            "refuse",
            f"the image has pages of {had} bytes, the kernel of {case.where()} of "
            f"{case.node.page_size_bytes}",
            "restore on a node with the same page size",
        )


def _since(case: Case, name: str, since: tuple[int, int], what: str) -> Iterator[Finding]:
    known = version(case.node.kernel)
    if len(known) >= 2 and known[:2] >= since:
        return
    release = ".".join(map(str, since))
    yield finding(
        name,
        "refuse" if len(known) >= 2 else "unknown",
        f"the image has {what}, which need kernel {release}; {case.where()} runs {case.node.kernel}",
        f"restore on a node with kernel {release} or later",
    )


@rule("kernel.droppable", about="node", source="measured: CRIU 4.2.1, 6.12 to 6.1 fails with EINVAL")
def droppable(case: Case) -> Iterator[Finding]:
    """From glibc 2.41 on random numbers have their state in a kind of mapping (MAP_DROPPABLE) that kernels
    before 6.11 lack. Restore on a newer kernel.
    """
    if case.needs.droppable_mappings:
        yield from _since(case, "kernel.droppable", _DROPPABLE_SINCE, "droppable mappings")


@rule("kernel.guard-pages", about="node", source="CRIU's VMA_AREA_GUARD; MADV_GUARD_INSTALL is of 6.13")
def guard_pages(case: Case) -> Iterator[Finding]:
    """Guard pages that an allocator put into its mappings are put there again by the kernel, from 6.13 on.
    Restore on a newer kernel.
    """
    if case.needs.guard_pages:
        yield from _since(case, "kernel.guard-pages", _GUARDS_SINCE, "guard pages within mappings")


@rule("kernel.shadow-stack", about="node", source="CRIU's VMA_AREA_SHSTK and CET state")
def shadow_stack(case: Case) -> Iterator[Finding]:
    """A shadow stack needs a processor and a kernel that have it. Restore where user_shstk is among the
    processor's flags, or start the program with GLIBC_TUNABLES=glibc.cpu.x86_shstk=off.
    """
    if case.needs.shadow_stack and "user_shstk" not in case.node.cpu_flags:
        yield finding(
            "kernel.shadow-stack",
            "refuse",
            f"a task has a shadow stack, which {case.where()} cannot make",
            "restore on a node with user_shstk, or start the program with "
            "GLIBC_TUNABLES=glibc.cpu.x86_shstk=off before the checkpoint",
        )


@rule("kernel.paths", about="node", source="measured: Can't stat mountpoint .../sysrq-trigger")
def paths(case: Case) -> Iterator[Finding]:
    """Every hidden or read-only path of /proc and /sys is a mount, and needs something to be mounted on.
    Leave the path out of maskedPaths and readonlyPaths before the checkpoint.
    """
    if case.has_kernel:
        return
    same = not case.local and case.dump_host is not None and case.dump_host.kernel == case.node.kernel
    unsure: list[str] = []
    for mount in case.needs.mounts:
        path = mount.destination
        if not path.startswith(("/proc/", "/sys/")) or path.startswith("/sys/fs/cgroup"):
            continue
        there = _has(case, path)
        if there is None:
            if not same or path.startswith(_OF_MACHINE):
                unsure.append(path)
        elif not there:
            yield finding(
                "kernel.paths",
                "refuse",
                f"the image has a mount on '{path}', which {case.where()} (kernel {case.node.kernel}) lacks",
                "leave the path out of maskedPaths and readonlyPaths before the checkpoint, or restore on a "
                "node that has it",
            )
    if unsure:
        yield finding(
            "kernel.paths",
            "unknown",
            f"the image has mounts on {', '.join(unsure[:4])}, and whether {case.where()} has such paths its "
            "profile does not say",
            "ask on that node, or restore on one that has them",
        )


def _has(case: Case, path: str) -> bool | None:
    if case.local:
        return os.path.lexists(path)
    if case.node.kernel_paths is None or not maskable(path):
        return None
    return path in case.node.kernel_paths


@rule("kernel.namespaces", about="node", source="CRIU makes each namespace anew that the container had")
def namespaces(case: Case) -> Iterator[Finding]:
    """A kind of namespace that the container had for itself (time, user, cgroup) must exist on the node.
    Restore on a kernel that has it, or take the checkpoint of a container without it.
    """
    if case.has_kernel:
        return
    own = [_KINDS.get(kind, kind) for kind, had in case.needs.namespaces.items() if had == "own"]
    if case.node.namespaces is None:
        if unusual := sorted(set(own) & {"time", "user"}):
            yield from case.untold(
                "kernel.namespaces", "namespaces", f"the image has a {unusual[0]} namespace of its own"
            )
        return
    for kind in own:
        if kind not in case.node.namespaces:
            yield finding(
                "kernel.namespaces",
                "refuse",
                f"the image has a {kind} namespace of its own, which {case.where()} cannot make",
                f"restore on a node whose kernel has {kind} namespaces and allows them",
            )


@rule("kernel.lsm", about="node", source="CRIU, lsm.c: mismatched lsm types and lsm profile specified")
def lsm(case: Case) -> Iterator[Finding]:
    """A label of a security module (AppArmor, SELinux) can only be put on tasks where that module is.
    Restore on a node with the same module, or take the checkpoint of an unconfined container.
    """
    labels = sorted({task.lsm_profile for task in case.needs.tasks if task.lsm_profile})
    if not labels or case.has_kernel:
        return
    had = case.needs.lsm or ("selinux" if labels[0].count(":") >= 3 else "apparmor")
    if case.node.lsm is None:
        yield from case.untold("kernel.lsm", "lsm", f"tasks have the {had} label '{labels[0]}'")
    elif case.node.lsm != had:
        yield finding(
            "kernel.lsm",
            "refuse",
            f"tasks have the {had} label '{labels[0]}', and {case.where()} has "
            f"{case.node.lsm or 'no such module'}",
            f"restore on a node with {had}, or take the checkpoint of an unconfined container",
        )


@rule("kernel.capabilities", about="node", source="field report: Unable to restore capabilities: -1")
def capabilities(case: Case) -> Iterator[Finding]:
    """Nobody can be given a capability that root itself has not got (a virtual machine or an outer container
    took it away). Drop it before the checkpoint, or restore on a node that has it.
    """
    if case.has_kernel or case.needs.namespaces.get("user", "host") != "host":
        return
    held = 0
    for task in case.needs.tasks:
        held |= task.cap_permitted
    if not held:
        return
    if case.node.capabilities is None:
        yield from case.untold("kernel.capabilities", "capabilities", "tasks hold capabilities")
    elif lacking := held & ~case.node.capabilities:
        yield finding(
            "kernel.capabilities",
            "refuse",
            f"tasks hold {', '.join(names(lacking))}, which root of {case.where()} has not got",
            "restore on a node that has them, or take the checkpoint of a container without them",
        )


@rule("cgroup.mode", about="node", source="measured: hybrid to v2, No mapping for ... mountpoint")
def cgroup_mounts(case: Case) -> Iterator[Finding]:
    """A container that sees its control groups sees those of one cgroup mode. Take the checkpoint of one
    without a mount on /sys/fs/cgroup, or restore on a node with the same mode.
    """
    if case.has_kernel or not any(
        mount.fstype in {"cgroup", "cgroup2"} or in_cgroup(mount.destination) for mount in case.needs.mounts
    ):
        return
    if "cgroup_mode" in case.node.unknown:
        yield from case.untold("cgroup.mode", "cgroup_mode", "the image shows control groups")
        return
    host = case.dump_host
    if host is None or "cgroup_mode" in host.unknown:
        kinds = {mount.fstype for mount in case.needs.mounts} & {"cgroup", "cgroup2"}
        had = {"cgroup2"} if case.node.cgroup_mode == "v2" else {"cgroup"}
        if kinds and kinds != had:
            yield _other_mode(case, "of another mode")
        elif not kinds:
            yield finding(
                "cgroup.mode",
                "unknown",
                "the image shows control groups, and nobody recorded of which mode",
                "restore on a node like that of the checkpoint",
            )
    elif host.cgroup_mode != case.node.cgroup_mode:
        yield _other_mode(case, f"of mode {host.cgroup_mode}")


@rule("cgroup.mount", about="node", source="measured: Unable to mount cgroup: Operation not permitted")
def mapped_cgroups(case: Case) -> Iterator[Finding]:
    """The root of a user namespace may not mount control groups of version 2 anew; torpor's own images have
    them as given from outside. Take the checkpoint with torpor, or of a container without that mount.
    """
    for mount in case.needs.mounts if case.needs.namespaces.get("user") == "own" else ():
        if mount.fstype == "cgroup2" and not mount.external and not case.has_kernel:
            yield finding(
                "cgroup.mount",
                "refuse",
                f"the image has control groups mounted on '{mount.destination}', which the root of its user "
                "namespace may not mount again",
                "take the checkpoint with torpor, or of a container without that mount",
            )


@rule("cgroup.open", about="node", source="measured: reopened in the cgroups of whoever calls the runtime")
def cgroup_files(case: Case) -> Iterator[Finding]:
    """What a task has open of its control groups is opened again before the new container's are
    mounted: it would be another's. Close it before the checkpoint.
    """
    kinds = {"cgroup", "cgroup2"} if case.needs.namespaces.get("cgroup") == "own" else {"cgroup"}
    tops = [
        f"{mount.destination}/"
        for mount in case.needs.mounts
        if mount.fstype in kinds or (mount.fstype == "cgroup2" and mount.external)
    ]
    for need in case.needs.files if tops else ():
        if any(f"{need.path}/".startswith(top) for top in tops):
            yield finding(
                "cgroup.open",
                "refuse",
                f"the image has '{need.path}' of its control groups open, which would be those of whoever "
                "restores it",
                "let the program close it before the checkpoint",
            )
            return


def _other_mode(case: Case, had: str) -> Finding:
    return finding(
        "cgroup.mode",
        "refuse",
        f"the image has control groups {had} mounted, {case.where()} has {case.node.cgroup_mode}",
        "take the checkpoint of a container without a mount on /sys/fs/cgroup, or restore on a node with the "
        "same mode",
    )


def in_cgroup(path: str) -> bool:
    """Whether a path shows control groups."""
    return path == "/sys/fs/cgroup" or path.startswith("/sys/fs/cgroup/")
