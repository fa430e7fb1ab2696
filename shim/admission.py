"""No privilege by restore: may this image become this container?

Called before anything of the image is touched. See `privileges` for what tasks hold and `confinement` for
what the container can reach.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from engines.api import Finding, ImageIncompatible, Needs, WiderPrivileges
from shim.confinement import check_container
from shim.errors import AdmissionRefused
from shim.images.manifest import Manifest
from shim.privileges import check_tasks


def check(
    spec: Mapping[str, Any],
    needs: Needs,
    manifest: Manifest | None,
    *,
    allowed_hooks: Collection[str] = (),
    rootfs_path: Path | None = None,
    inherited_rlimits: Mapping[str, int] | None = None,
) -> tuple[Finding, ...]:
    """Compare an image with the spec of the container it shall become; empty if nothing is wider.

    manifest: what was recorded at the dump, None if nobody did.
    allowed_hooks: absolute paths of OCI hooks that may run at a restore.
    rootfs_path: the new container's, in which the destinations of its mounts are resolved, None if unknown.
    inherited_rlimits: hard limits of the runtime's caller by name, None to ask this process.
    """
    recorded = manifest.security.seccomp_digest if manifest else None
    return (
        *check_tasks(spec, needs, recorded_seccomp=recorded, inherited=inherited_rlimits),
        *check_container(spec, needs, allowed_hooks=allowed_hooks, rootfs_path=rootfs_path),
    )


def refuse(findings: Iterable[Finding], *, what: str) -> None:
    """Raise if any finding is a refusal, with all of them named.

    what: the image in words, for the message. Raises WiderPrivileges if the image holds more than the spec
    grants, else AdmissionRefused if the node's rules forbid it, else ImageIncompatible.
    """
    refusals = [finding for finding in findings if finding.severity == "refuse"]
    if not refusals:
        return
    causes = "; ".join(f"{finding.message} [{finding.rule}]" for finding in refusals)
    remedies = "; ".join(dict.fromkeys(finding.remedy for finding in refusals if finding.remedy))
    message = f"could not admit image '{what}': {causes}; what to do: {remedies}"
    fields = {finding.rule.partition(".")[0] for finding in refusals}
    if "privileges" in fields:
        raise WiderPrivileges(message, after="stopped")
    if "admission" in fields:
        raise AdmissionRefused(message)
    raise ImageIncompatible(message, after="stopped")
