"""What rules are: small functions from a `Case` to findings, each with its name, its source and its remedy.

Many were measured with CRIU 4.2 and runc 1.3: several of these combinations end with exit status 0 and a
container that is wrong (no volume, another network namespace) or that dies of SIGILL later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from compat.profile import DumpHost, Profile
from engines.api import Finding, Needs, Severity
from engines.places import resolve

About = Literal["node", "spec", "here"]
"""What a rule looks at beside the image: a node's profile; the new spec; or this very machine, where the spec
is to run."""
Given = Literal["own", "joined", "host"]

_LINK_NAMES: Mapping[str, str] = {"network": "net", "mount": "mnt"}
NODE_DEVICES = frozenset(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))
"""What a runtime binds into a container that may not make device nodes."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What else is known of an image.

    dump_spec: of the container that was dumped, None if it is not asked about. rootfs_bytes: what its root
    file system difference unpacks to. image_ref: the container image it came from. leave_running, use,
    used_by: see the manifest and the store. damage: what of its files is not as its manifest says, "" if
    nobody has looked.
    """

    dump_spec: Mapping[str, Any] | None = None
    rootfs_bytes: int = 0
    image_ref: str = ""
    leave_running: bool = False
    use: Literal["clone", "move"] | None = None
    used_by: str = ""
    damage: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An image, the node and the spec that shall have it.

    spec: None where only the node is in question. dump_host: None if nobody recorded it. rootfs_path: the new
    root file system, None if it is not there yet. local: the node is this one. new_image_ref: container image
    of the new container, "" if unknown.
    """

    needs: Needs
    spec: Mapping[str, Any] | None
    node: Profile
    dump_host: DumpHost | None
    rootfs_path: Path | None = None
    local: bool = True
    origin: Origin = field(default_factory=Origin)
    new_image_ref: str = ""

    @cached_property
    def new(self) -> Mapping[str, Any]:
        """The new spec, empty where there is none."""
        return self.spec or {}

    @property
    def has_kernel(self) -> bool:
        """Whether the image brings its own kernel: then this node's does not matter to it."""
        return self.needs.engine == "gvisor"

    def where(self) -> str:
        """The node, in words."""
        return "this node" if self.local or not self.node.node else f"node '{self.node.node}'"

    def untold(self, rule: str, fact: str, why: str) -> Iterator[Finding]:
        """`unknown`, because the node's profile lacks a fact that matters here.

        On this node it is only that where a probe failed: what nobody probed the engine finds out itself.
        """
        reason = self.node.unknown.get(fact)
        if reason is None and self.local:
            return
        yield finding(
            rule,
            "unknown",
            f"{why}, and {self.where()} does not tell: {reason or 'its profile does not say'}",
            f"make the node's profile again (torpor compat profile), as root, and look at '{fact}'",
        )


Check = Callable[[Case], Iterator[Finding]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule. names: of the findings it makes. source: where it is known from. text: what it says."""

    names: tuple[str, ...]
    about: About
    source: str
    text: str
    check: Check


REGISTRY: list[Rule] = []


def rule(*names: str, about: About, source: str) -> Callable[[Check], Check]:
    """Register a function as a rule; its docstring says what it is and what helps."""

    def wrap(check: Check) -> Check:
        text = " ".join((check.__doc__ or "").split())
        REGISTRY.append(Rule(names=names, about=about, source=source, text=text, check=check))
        return check

    return wrap


def finding(rule: str, severity: Severity, message: str, remedy: str) -> Finding:
    """A Finding, in one line."""
    return Finding(rule=rule, severity=severity, message=message, remedy=remedy)


def version(text: str) -> tuple[int, ...]:
    """The numbers at the beginning of a release, empty if there are none."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(number) for number in found[0].split(".")) if found else ()


def part(spec: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a spec, empty if it is absent or null."""
    found: Any = spec.get(name)
    return found or {}


def given(spec: Mapping[str, Any], kind: str) -> Given:
    """Which namespace of a kind a spec gives: one of its own, somebody's by path, or the host's."""
    for entry in part(spec, "linux").get("namespaces") or ():
        if entry.get("type") == kind:
            path = str(entry.get("path") or "")
            if not path:
                return "own"
            return "host" if _is_ours(path, kind) else "joined"
    return "host"


def _is_ours(path: str, kind: str) -> bool:
    """Whether a path leads to the namespace that this process lives in, which is the host's."""
    try:
        return Path(path).samefile(f"/proc/self/ns/{_LINK_NAMES.get(kind, kind)}")
    except OSError:
        return False


def specified_mounts(spec: Mapping[str, Any], rootfs_path: Path | None) -> dict[str, Mapping[str, Any]]:
    """A spec's mounts by where they really lie; of several in one place the last, which hides the others."""
    entries: Sequence[Mapping[str, Any]] = spec.get("mounts") or ()
    return {resolve(rootfs_path, str(entry.get("destination"))): entry for entry in entries}


def clean(path: Any) -> str:
    """A path without what does not matter."""
    return os.path.normpath(str(path))


def mib(size: int) -> str:
    """A size in words, in bytes given."""
    return f"{max(size, 1 << 20) >> 20} MiB"
