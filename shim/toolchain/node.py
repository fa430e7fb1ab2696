"""What of the node itself, beside the tools and what an engine asks, stands in the way of the main job."""

from __future__ import annotations

import platform
from pathlib import Path

from engines.api import Finding

CAP_SYS_RESOURCE = 24


def check(*, root: Path = Path("/")) -> tuple[Finding, ...]:
    """Look at the node; rules `node.*`. root: where /proc and /sys are looked up. Never raises."""
    return (_kernel(root), _capabilities(root), _cgroups(root), _overlay(root))


def _kernel(root: Path) -> Finding:
    release = platform.release()
    machine = platform.machine()
    # This file is there with CONFIG_CHECKPOINT_RESTORE only; a kernel's configuration often is not.
    if not (root / "proc/sys/kernel/ns_last_pid").exists():
        return Finding(
            rule="node.kernel",
            severity="refuse",
            message=f"kernel {release} has no CONFIG_CHECKPOINT_RESTORE",
            remedy="boot a kernel that has it; Debian's own do",
        )
    return Finding(
        rule="node.kernel", severity="ok", message=f"kernel {release} on {machine} supports checkpoints"
    )


def _capabilities(root: Path) -> Finding:
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
        effective = int(next(line.split()[1] for line in lines if line.startswith("CapEff:")), 16)
    except (OSError, StopIteration, ValueError, IndexError) as error:
        return Finding(
            rule="node.capabilities", severity="unknown", message=f"capabilities are not told: {error}"
        )
    if effective >> CAP_SYS_RESOURCE & 1:
        return Finding(rule="node.capabilities", severity="ok", message="CAP_SYS_RESOURCE is there")
    return Finding(
        rule="node.capabilities",
        severity="warn",
        message="CAP_SYS_RESOURCE is missing: processes of other users than root cannot be dumped",
        remedy="use containers with a user namespace, or give this machine the capability",
    )


def _cgroups(root: Path) -> Finding:
    cgroup = root / "sys/fs/cgroup"
    if (cgroup / "cgroup.controllers").exists():
        return Finding(rule="node.cgroups", severity="ok", message="cgroup v2")
    if (cgroup / "freezer").is_dir():
        hybrid = (cgroup / "unified").is_dir()
        kind = "cgroup v1 beside v2 (hybrid)" if hybrid else "cgroup v1"
        return Finding(rule="node.cgroups", severity="ok", message=f"{kind}, with a freezer")
    return Finding(
        rule="node.cgroups",
        severity="refuse",
        message=f"no cgroups that can freeze a container are mounted in {cgroup}",
        remedy="mount cgroup v2 there",
    )


def _overlay(root: Path) -> Finding:
    try:
        known = (root / "proc/filesystems").read_text().split()
    except OSError as error:
        return Finding(rule="node.overlay", severity="unknown", message=f"file systems are not told: {error}")
    if "overlay" in known:
        return Finding(rule="node.overlay", severity="ok", message="overlay file systems are supported")
    return Finding(
        rule="node.overlay",
        severity="warn",
        message="overlay file systems are not supported yet: changed files of a container may not be found",
        remedy="modprobe overlay",
    )
