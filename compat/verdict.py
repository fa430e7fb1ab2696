"""The verdict: would this image restore into this spec on this node?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from compat import profile
from compat.profile import DumpHost, Profile
from compat.rules import cpu, edits, files, gpu, kernel, limits, names, place, spec, tools, words
from compat.rules.case import REGISTRY, Case, Origin, Rule
from engines.api import Finding, Needs, Severity

Answer = Literal["yes", "no", "unknown"]
ROOMS = (cpu, kernel, tools, gpu, spec, edits, files, place, limits, names, words)
"""The modules that register rules."""
_ORDER: Mapping[Severity, int] = {"refuse": 0, "unknown": 1, "warn": 2, "ok": 3}


def judge(
    needs: Needs,
    spec: Mapping[str, Any],
    *,
    dump_host: DumpHost | None,
    rootfs_path: Path | None = None,
    node: Profile | None = None,
    origin: Origin | None = None,
    new_image_ref: str = "",
) -> tuple[Finding, ...]:
    """Run every rule that can be decided before anything is touched; empty if all is well.

    dump_host: the node that made the image, None if nobody recorded it. rootfs_path: the new container's,
    as it is before the image's changes, None if it is not there yet (mounts are then judged less surely).
    node: this one's profile, None to read it. origin: what else is known of the
    image. new_image_ref: container image of the new container, "" if unknown.
    """
    return run(
        Case(
            needs=needs,
            spec=spec,
            node=node or profile.load(None),
            dump_host=dump_host,
            rootfs_path=rootfs_path,
            origin=origin or Origin(),
            new_image_ref=new_image_ref,
        )
    )


def judge_for(
    needs: Needs,
    node: Profile,
    *,
    dump_host: DumpHost | None,
    origin: Origin | None = None,
    local: bool = False,
) -> tuple[Finding, ...]:
    """Would the image restore on that node, into a container like the dumped one? Looks at nothing here.

    local: the node is this one.
    """
    case = Case(
        needs=needs, spec=None, node=node, dump_host=dump_host, origin=origin or Origin(), local=local
    )
    return run(case)


def run(case: Case) -> tuple[Finding, ...]:
    """Findings of all rules that have something to look at, the worst first."""
    wanted = {"node"}
    if case.spec is not None:
        wanted |= {"spec", "here"} if case.local else {"spec"}
    found = [finding for rule in REGISTRY if rule.about in wanted for finding in rule.check(case)]
    return ordered(found)


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The worst first."""
    return tuple(sorted(findings, key=lambda finding: _ORDER[finding.severity]))


def answer(findings: Iterable[Finding]) -> Answer:
    """What findings come to: no if any refuses, unknown if any is that, else yes."""
    severities = {finding.severity for finding in findings}
    return "no" if "refuse" in severities else "unknown" if "unknown" in severities else "yes"


def explain(name: str) -> tuple[Rule, ...]:
    """The rules of a name, or of which the name is the beginning; empty if there is none."""
    return tuple(
        rule
        for rule in REGISTRY
        if any(known == name or known.startswith(f"{name}.") for known in rule.names)
    )


def judge_files(needs: Needs, spec: Mapping[str, Any], rootfs_path: Path) -> tuple[Finding, ...]:
    """Look at every open file and every mount's place, after the image's changes were applied to the root
    file system.

    rootfs_path: the new container's. Cheap: one stat for each, three small reads for each library.
    """
    return (
        *files.files(needs, spec, rootfs_path, complete=True),
        *files.places(needs, spec, rootfs_path, complete=True),
    )
