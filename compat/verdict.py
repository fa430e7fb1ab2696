"""The verdict: would this image restore into this spec on this node?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compat import profile, rules
from compat.profile import DumpHost, Profile
from engines.api import Finding, Needs


def judge(
    needs: Needs,
    spec: Mapping[str, Any],
    *,
    dump_host: DumpHost | None,
    rootfs_path: Path | None = None,
    node: Profile | None = None,
    cache_path: Path | None = None,
) -> tuple[Finding, ...]:
    """Run every rule that can be decided before anything is touched; empty if all is well.

    dump_host: the node that made the image, None if nobody recorded it. rootfs_path: the new container's,
    as it is before the image's changes, None if it is not there yet (mounts are then judged less surely).
    node: the one to judge for, None for this one. cache_path: see `profile.load`.
    """
    case = rules.Case(
        needs=needs,
        spec=spec,
        node=node or profile.load(cache_path),
        dump_host=dump_host,
        rootfs_path=rootfs_path,
    )
    found = [finding for rule in rules.ALL for finding in rule(case)]
    if needs.gpus:
        from compat import gpus  # few images need it

        found += gpus.check(needs, spec)
    return (*found, *rules.files(needs, spec, rootfs_path, complete=False))


def judge_files(needs: Needs, spec: Mapping[str, Any], rootfs_path: Path) -> tuple[Finding, ...]:
    """Look at every open file, after the image's changes were applied to the root file system.

    rootfs_path: the new container's. Cheap: one stat for each file, three small reads for each library.
    """
    return tuple(rules.files(needs, spec, rootfs_path, complete=True))
