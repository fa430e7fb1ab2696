"""Makes a container's cold start fit for a later checkpoint: no io_uring.

CRIU cannot dump an io_uring, and libraries that find one use it unasked (libuv, hence Node.js and PyTorch's
store). All of them fall back to epoll when the kernel says that there is no such system call, so a seccomp
rule says that. It only ever takes away: what was killed before stays killed.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Mapping, Sequence
from typing import Any

IO_URING = ("io_uring_setup", "io_uring_enter", "io_uring_register")
ENOSYS = 38

# Actions that answer a call more harshly than with an error.
_HARSHER = frozenset({"SCMP_ACT_KILL", "SCMP_ACT_KILL_THREAD", "SCMP_ACT_KILL_PROCESS", "SCMP_ACT_TRAP"})
# A filter without a list of architectures kills every program of another one, such as 32-bit programs.
_ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "x86_64": ("SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"),
    "aarch64": ("SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"),
    "s390x": ("SCMP_ARCH_S390X", "SCMP_ARCH_S390"),
}


def without_io_uring(spec: Mapping[str, Any], *, machine: str | None = None) -> dict[str, Any]:
    """A copy of an OCI spec whose seccomp section answers io_uring's three calls with ENOSYS.

    machine: hardware name as in `uname -m`, None for this node's. Applying it twice changes nothing.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(spec))
    linux: dict[str, Any] = changed.setdefault("linux", {})
    section: dict[str, Any] | None = linux.get("seccomp")
    if not section:
        section = {"defaultAction": "SCMP_ACT_ALLOW"}
        architectures = _ARCHITECTURES.get(machine or platform.machine())
        if architectures:
            section["architectures"] = list(architectures)
        linux["seccomp"] = section
    rules: list[dict[str, Any]] = list(section.get("syscalls") or ())
    names = tuple(name for name in IO_URING if not _is_harsher(section, rules, name))
    kept = [rule for rule in (_without(rule, names) for rule in rules) if rule["names"]]
    if names and not _denies_already(section):
        kept.append({"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS})
    section["syscalls"] = kept
    return changed


def _is_harsher(section: Mapping[str, Any], rules: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Whether the profile kills a task that makes this call, so that an error would be a favour."""
    actions = [str(rule.get("action")) for rule in rules if name in _names(rule)]
    return any(action in _HARSHER for action in actions or (str(section.get("defaultAction")),))


def _denies_already(section: Mapping[str, Any]) -> bool:
    """Whether the profile's default is the very same answer: libseccomp refuses a rule that repeats it."""
    return section.get("defaultAction") == "SCMP_ACT_ERRNO" and section.get("defaultErrnoRet") == ENOSYS


def _without(rule: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A rule less some names: two rules for one call would contradict each other.

    Rules that hold only for certain arguments go too: libseccomp merges them with an unconditional one.
    """
    return {**rule, "names": [name for name in _names(rule) if name not in names]}


def _names(rule: Mapping[str, Any]) -> list[str]:
    return list(map(str, rule.get("names") or ()))
