"""Words of the new specification that the runtime does not take: it reads all, even what no restore uses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compat.rules.case import Case, finding, given, part, rule
from engines.api import Finding
from engines.mountinfo import parse

_KINDS = frozenset({"network", "mount", "pid", "ipc", "uts", "user", "cgroup", "time"})
_PROPAGATIONS = frozenset(
    f"{deep}{word}" for deep in ("", "r") for word in ("shared", "slave", "private", "unbindable")
)
_IO_CLASSES = frozenset({"IOPRIO_CLASS_RT", "IOPRIO_CLASS_BE", "IOPRIO_CLASS_IDLE"})
_MAX_IO_PRIORITY = 7
_MAX_CPU = 1023  # in a mask of the kernel's default size
_CPUS = re.compile(r"\s*(\d+)(?:-(\d+))?\s*")
_DEVICES = frozenset({"c", "b", "u", "p"})
_OF_IPC = frozenset(
    f"kernel.{name}"
    for name in ("msgmax", "msgmnb", "msgmni", "sem", "shmall", "shmmax", "shmmni", "shm_rmid_forced")
)
_SYSCTLS = Path("/proc/sys")
_PER_INTERFACE = re.compile(r"net/\w+/(conf|neigh)/")
_NUMBERS = re.compile(r"-?\d+(\s+-?\d+)*")
_NUMBER = re.compile(r"[-+]?(0[xX])?[0-9a-fA-F,-]+")  # decimal, hex, a mask, a list of ports
_MOUNTS = Path("/proc/self/mountinfo")


@rule("spec.words", about="here", source="measured with runc 1.3.6; its validator, specconv and sysctl code")
def words(case: Case) -> Iterator[Finding]:
    """The runtime reads all of the new spec, even what a restore does not use: a relative working
    directory, no arguments, a namespace twice or of an unknown kind, an unknown personality, propagation,
    I/O priority, list of processors or kind of device, cache or bandwidth of processors (intelRdt) on a
    node without, time offsets without a time namespace, sysctls that belong to no namespace of the
    container. Correct the specification.
    """
    if case.has_kernel:
        return
    for causes in (_of_process, _of_namespaces, _of_linux, _sysctls):
        for cause in causes(case):
            yield finding(
                "spec.words",
                "refuse",
                f"the new spec has {cause}, which the runtime refuses",
                "correct the specification",
            )


def _of_process(case: Case) -> Iterator[str]:
    process = part(case.new, "process")
    if not process:
        return
    cwd = str(process.get("cwd") or "/")
    if not cwd.startswith("/"):
        yield f"the relative working directory '{cwd}'"
    if not process.get("args"):
        yield "no arguments (process.args)"
    if io := part(process, "ioPriority"):
        kind, priority = io.get("class") or "", io.get("priority") or 0
        if kind not in _IO_CLASSES or not 0 <= priority <= _MAX_IO_PRIORITY:
            yield f"the I/O priority {priority} of class '{kind}'"
    for when, text in part(process, "execCPUAffinity").items():
        if not _is_cpus(str(text)):
            yield f"the {when} processors '{text}' (execCPUAffinity)"


def _is_cpus(text: str) -> bool:
    """Whether a text is a list of processors that a mask has room for."""
    for item in filter(None, text.split(",")):
        found = _CPUS.fullmatch(item)
        if found is None or not int(found[1]) <= int(found[2] or found[1]) <= _MAX_CPU:
            return False
    return True


def _of_namespaces(case: Case) -> Iterator[str]:
    entries: Sequence[Mapping[str, Any]] = part(case.new, "linux").get("namespaces") or ()
    kinds = [str(entry["type"]) for entry in entries]
    for kind in dict.fromkeys(kinds):
        if kind not in _KINDS:
            yield f"a namespace of the kind '{kind}'"
        elif kinds.count(kind) > 1:
            yield f"two namespaces of the kind '{kind}'"
    if part(part(case.new, "linux"), "timeOffsets") and "time" not in kinds:
        yield "time offsets and no time namespace"


def _of_linux(case: Case) -> Iterator[str]:
    linux = part(case.new, "linux")
    personality = part(linux, "personality")
    if personality and personality.get("domain") not in {"LINUX", "LINUX32"}:
        yield f"the personality '{personality.get('domain')}'"
    propagation = linux.get("rootfsPropagation")
    if propagation and propagation not in _PROPAGATIONS:
        yield f"the propagation '{propagation}' (rootfsPropagation)"
    devices: Sequence[Mapping[str, Any]] = linux.get("devices") or ()
    for device in devices:
        if device.get("type") not in _DEVICES:
            yield f"a device of the kind '{device.get('type')}'"
    resources: Mapping[str, Any] = part(linux, "resources")
    rules: Sequence[Mapping[str, Any]] = resources.get("devices") or ()
    for entry in rules:
        if entry.get("type") not in {None, "", "a", "b", "c"}:
            yield f"a rule for devices of the kind '{entry.get('type')}'"
    rdt = part(linux, "intelRdt")
    for key, kind in (("l3CacheSchema", "L3"), ("memBwSchema", "MB")):
        if rdt.get(key) and not _allocates(kind):
            yield f"{key} (intelRdt), of which this node allocates nothing"


def _allocates(kind: str) -> bool:
    """Whether the node hands out a resource of its processors; true where nobody tells."""
    try:
        points = [mount.point for mount in parse(_MOUNTS.read_bytes()) if mount.kind == "resctrl"]
    except OSError:
        return True
    return any(Path(point, "info", kind).is_dir() for point in points)


def _sysctls(case: Case) -> Iterator[str]:
    """As runc looks at them; those of a network namespace of its own torpor sets, and the kernel judges."""
    sysctls: Mapping[str, str] = part(case.new, "linux").get("sysctl") or {}
    for written, value in sysctls.items():
        name = _dotted(written)
        if name in _OF_IPC or name.startswith("fs.mqueue."):
            if given(case.new, "ipc") == "host":
                yield f"the sysctl {written}, and the host's IPC namespace"
        elif name.startswith("net."):
            network = given(case.new, "network")
            if network == "host":
                yield f"the sysctl {written}, and the host's network"
            elif network == "own" and (cause := _untaken(written, value)):
                yield f"the sysctl {written} {cause}"
        elif name == "kernel.hostname" or (name == "kernel.domainname" and given(case.new, "uts") == "host"):
            yield f"the sysctl {written}"
        elif name != "kernel.domainname" and not name.startswith("user."):
            yield f"the sysctl {written}, which belongs to no namespace"


def _dotted(name: str) -> str:
    """A name with dots between its parts: where a slash comes first, dots are part of an interface's name."""
    first = re.search("[./]", name)
    return name.translate({46: "/", 47: "."}) if first and first[0] == "/" else name


def _untaken(name: str, value: str) -> str:
    """Why a new network namespace would not take a setting, in words; "" if it may."""
    path = name.replace(".", "/")
    file = _SYSCTLS / path
    try:
        if ".." in file.parts or _PER_INTERFACE.match(path) or not (_SYSCTLS / "net").is_dir():
            return ""
        text = file.read_text(errors="replace").strip()
    except FileNotFoundError:
        return "that is not there"
    except OSError:  # one that is only written to, or a directory
        return ""
    if _NUMBERS.fullmatch(text) and not all(map(_NUMBER.fullmatch, value.split())):
        return f"with '{value}' in place of numbers"
    return ""
