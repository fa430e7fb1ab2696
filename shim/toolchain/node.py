"""What of the node itself, beside the tools, stands in the way of the main job."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from engines.api import Finding
from shim.toolchain.find import Tools

CAP_SYS_RESOURCE = 24

_DANGEROUS = {
    "images-dir": "criu would read and write its images elsewhere",
    "work-dir": "criu would write its logs elsewhere",
    "log-file": "criu would write its log elsewhere, and errors could not be told",
    "action-script": "criu would run that program as root",
    "exec-cmd": "criu would run that program after a restore",
    "inherit-fd": "criu would replace descriptors of the container",
    "external": "criu would leave parts of the container out",
    "join-ns": "criu would put containers into other namespaces",
    "root": "criu would restore into another root",
    "pidfile": "criu would write the pid elsewhere",
    "leave-running": "every dump would leave its container running",
    "leave-stopped": "every dump would leave its container stopped",
    "skip-file-rwx-check": "criu would restore over files whose rights have changed",
}
"""Options of a CRIU configuration file that take effect behind torpor's back."""


def check(tools: Tools, *, root: Path = Path("/")) -> tuple[Finding, ...]:
    """Look at the node; rules `node.*`. root: where /etc, /proc and /sys are looked up. Never raises."""
    findings = [_root(), _kernel(root), _capabilities(root), _cgroups(root), _overlay(root), _tar(tools)]
    findings += _criu_configurations(root)
    findings += _criu_features(tools)
    return tuple(findings)


def _root() -> Finding:
    if os.geteuid() == 0:
        return Finding(rule="node.root", severity="ok", message="running as root")
    return Finding(
        rule="node.root",
        severity="refuse",
        message="not running as root: containers can be neither dumped nor restored",
        remedy="run as root",
    )


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


def _tar(tools: Tools) -> Finding:
    found = [shutil.which(name, path=tools.search_path) for name in ("tar", "gzip")]
    if all(found):
        saved = " and ".join(map(str, found))
        return Finding(rule="node.tar", severity="ok", message=f"criu saves tmpfs mounts with {saved}")
    lacking = "gzip" if found[0] else "tar"
    return Finding(
        rule="node.tar",
        severity="refuse",
        message=f"{lacking} was not found: criu saves every tmpfs mount, so also a container's /dev, with it",
        remedy=f"apt-get install {lacking}",
    )


def _criu_configurations(root: Path) -> list[Finding]:
    """Files that criu or runc reads on its own. criu obeys them behind torpor's back."""
    findings: list[Finding] = []
    home = os.environ.get("HOME", "/root").lstrip("/")
    for place in ("etc/criu/default.conf", "etc/criu/runc.conf", f"{home}/.criu/default.conf"):
        path = root / place
        try:
            status = path.stat()
            text = path.read_text(errors="replace")
        except OSError:
            continue
        findings.append(_judge(path, text, writable=bool(status.st_mode & 0o022 or status.st_uid != 0)))
    if os.environ.get("CRIU_CONFIG_FILE"):
        findings.append(
            Finding(
                rule="node.criu-configuration",
                severity="warn",
                message=f"CRIU_CONFIG_FILE={os.environ['CRIU_CONFIG_FILE']} changes every call of criu",
                remedy="unset CRIU_CONFIG_FILE",
            )
        )
    return findings or [
        Finding(
            rule="node.criu-configuration", severity="ok", message="no CRIU configuration of the system's own"
        )
    ]


def _judge(path: Path, text: str, *, writable: bool) -> Finding:
    rule = "node.criu-configuration"
    if writable:
        return Finding(
            rule=rule,
            severity="refuse",
            message=f"{path} can be written by others than root, and can make criu run programs as root",
            remedy=f"chown root {path} && chmod 644 {path}",
        )
    options = [line.split("#")[0].strip().removeprefix("--") for line in text.splitlines()]
    for option in options:
        name = option.replace("=", " ").split(" ")[0]
        if name in _DANGEROUS:
            return Finding(
                rule=rule,
                severity="refuse",
                message=f"{path} sets '{name}': {_DANGEROUS[name]}",
                remedy=f"remove the line from {path}",
            )
    if any(options):
        return Finding(
            rule=rule,
            severity="warn",
            message=f"{path} changes CRIU's settings for every container",
            remedy="",
        )
    return Finding(rule=rule, severity="ok", message=f"{path} sets nothing")


def _feature(tools: Tools, name: str) -> bool | None:
    """Whether criu finds a kernel feature, None if it cannot be asked."""
    if tools.criu is None or os.geteuid() != 0:
        return None
    command = [tools.criu, "check", "--feature", name]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.returncode == 0


def _criu_features(tools: Tools) -> list[Finding]:
    features: dict[str, tuple[str, Callable[[bool], str]]] = {
        "mem_dirty_track": (
            "boot a kernel with CONFIG_MEM_SOFT_DIRTY",
            lambda ok: "memory can be dumped ahead (pre-dump)" if ok else "no dirty tracking: no pre-dump",
        ),
        "uffd-noncoop": (
            "boot a kernel with CONFIG_USERFAULTFD",
            lambda ok: "memory can be restored lazily" if ok else "no userfaultfd: no lazy restore",
        ),
    }
    findings: list[Finding] = []
    for name, (remedy, describe) in features.items():
        there = _feature(tools, name)
        rule = f"node.{name.replace('_', '-')}"
        if there is None:
            message = f"the kernel feature {name} was not looked for: that needs criu and root"
            findings.append(Finding(rule=rule, severity="unknown", message=message))
        else:
            severity = "ok" if there else "warn"
            findings.append(
                Finding(rule=rule, severity=severity, message=describe(there), remedy="" if there else remedy)
            )
    return findings
