"""The verdict for a scheduler: labels of a node, and what an image demands of them.

Labels carry what can be compared by name or by number. What they cannot say (free memory, paths of the
kernel, the new spec) the node decides itself, before it touches anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from compat.profile import DumpHost, Profile
from compat.rules.case import version
from compat.rules.cpu import INSTRUCTIONS, PICKED_BY_GLIBC
from engines.api import Needs

PREFIX = "torpor.dev/"
_MAX_VALUE = 63
_DROPPABLE_SINCE, _GUARDS_SINCE = (6, 11), (6, 13)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """One expression of a node affinity. values: empty for Exists."""

    key: str
    operator: Literal["In", "Exists", "Gt"]
    values: tuple[str, ...] = ()

    def met_by(self, labels: Mapping[str, str]) -> bool:
        """Whether a node of these labels would be chosen, as Kubernetes decides."""
        found = labels.get(self.key)
        if found is None or self.operator == "Exists":
            return found is not None
        if self.operator == "In":
            return found in self.values
        return found.isdigit() and int(found) > int(self.values[0])


def of_node(node: Profile) -> dict[str, str]:
    """Labels of a node, sorted by key."""
    found = {
        "arch": node.arch,
        "page-size": str(node.page_size_bytes),
        "cgroup": "" if "cgroup_mode" in node.unknown else node.cgroup_mode,
        "kernel": _number(node.kernel),
    }
    for flag in set(node.cpu_flags) & (PICKED_BY_GLIBC | INSTRUCTIONS | {"xsave"}):
        found[f"cpu.{flag}"] = "true"
    for kind in node.namespaces or ():
        found[f"ns.{kind}"] = "true"
    if criu := node.tools.get("criu"):
        found["criu"] = _number(criu)
    if runsc := node.tools.get("runsc"):
        found["runsc"] = _value(runsc)
    if node.lsm:
        found["lsm"] = node.lsm
    for model in {gpu.model for gpu in node.gpus or () if not gpu.mig}:
        count = sum(gpu.model == model for gpu in node.gpus or ())
        found[f"gpu.{_value(model)}"] = str(count)
    # A profile of another node may hold anything.
    told = {_value(key): _value(value) for key, value in sorted(found.items())}
    return {f"{PREFIX}{key}": value for key, value in told.items() if value}


def of_image(needs: Needs, dump_host: DumpHost | None) -> tuple[Demand, ...]:
    """What an image demands of a node's labels: a node that lacks one of them would answer no."""
    return tuple(_demands(needs, dump_host))


def _demands(needs: Needs, dump_host: DumpHost | None) -> Iterator[Demand]:
    has_kernel = needs.engine == "gvisor"
    arch = dump_host.arch if dump_host else needs.arch
    if arch:
        yield _in("arch", arch)
    had = set((dump_host.cpu_flags if dump_host else needs.cpu_flags) or ())
    wanted = had & (PICKED_BY_GLIBC | INSTRUCTIONS if has_kernel else PICKED_BY_GLIBC)
    if needs.xsave:
        wanted.add("xsave")
    for flag in sorted(wanted):
        yield Demand(key=f"{PREFIX}cpu.{flag}", operator="Exists")
    page_bytes = dump_host.page_size_bytes if dump_host else needs.page_size_bytes
    if page_bytes:
        yield _in("page-size", str(page_bytes))
    if has_kernel:
        yield _in("runsc", _value(needs.image_version))
        return
    since = max(
        (_DROPPABLE_SINCE if needs.droppable_mappings else (0, 0)),
        (_GUARDS_SINCE if needs.guard_pages else (0, 0)),
    )
    if since != (0, 0):
        yield _above("kernel", since)
    made_by = version(dump_host.tools.get("criu", "") if dump_host else "")[:2]
    if len(made_by) == 2:
        yield _above("criu", (made_by[0], made_by[1]))
    else:
        yield Demand(key=f"{PREFIX}criu", operator="Exists")
    shows_groups = any(mount.fstype in {"cgroup", "cgroup2"} for mount in needs.mounts)
    if shows_groups and dump_host and "cgroup_mode" not in dump_host.unknown:
        yield _in("cgroup", dump_host.cgroup_mode)
    for kind, where in sorted(needs.namespaces.items()):
        if where == "own" and kind in {"time", "user"}:
            yield Demand(key=f"{PREFIX}ns.{kind}", operator="Exists")
    if needs.lsm and any(task.lsm_profile for task in needs.tasks):
        yield _in("lsm", needs.lsm)
    for model in sorted({gpu.model for gpu in needs.gpus}):
        count = sum(gpu.model == model for gpu in needs.gpus)
        yield Demand(key=f"{PREFIX}{_value(f'gpu.{_value(model)}')}", operator="Gt", values=(str(count - 1),))


def snippet(demands: tuple[Demand, ...]) -> str:
    """The demands as a pod's `affinity`, in YAML."""
    lines = [
        "affinity:",
        "  nodeAffinity:",
        "    requiredDuringSchedulingIgnoredDuringExecution:",
        "      nodeSelectorTerms:",
        "      - matchExpressions:",
    ]
    for demand in demands:
        lines.append(f"        - key: {demand.key}")
        lines.append(f"          operator: {demand.operator}")
        if demand.values:
            lines.append("          values: [" + ", ".join(f'"{value}"' for value in demand.values) + "]")
    return "\n".join(lines)


def _in(key: str, value: str) -> Demand:
    return Demand(key=f"{PREFIX}{key}", operator="In", values=(value,))


def _above(key: str, since: tuple[int, int]) -> Demand:
    return Demand(key=f"{PREFIX}{key}", operator="Gt", values=(str(since[0] * 1000 + since[1] - 1),))


def _number(release: str) -> str:
    """A release as a number that grows with it: 6.18 is 6018. "" if it is none."""
    found = version(release)
    return str(found[0] * 1000 + found[1]) if len(found) >= 2 else ""


def _value(text: str) -> str:
    """A text as a label's value may be."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:_MAX_VALUE].strip("-._")
