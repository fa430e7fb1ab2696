"""No privilege by restore: may this image become this container?

Called before anything of the image is touched. See `privileges` for what tasks hold and `confinement` for
what the container can reach.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from engines.api import Finding, Needs, WiderPrivileges
from shim.confinement import check_container
from shim.errors import AdmissionRefused
from shim.privileges import check_tasks, seccomp_digest

__all__ = ["check", "refuse", "seccomp_digest"]


def check(
    spec: Mapping[str, Any],
    needs: Needs,
    *,
    recorded_seccomp: str | None,
    allowed_hooks: Collection[str] = (),
    inherited_rlimits: Mapping[str, int] | None = None,
) -> tuple[Finding, ...]:
    """Compare an image with the spec of the container it shall become; empty if nothing is wider.

    recorded_seccomp: `seccomp_digest` of the spec at the dump ("" if it had no profile), None if unknown.
    allowed_hooks: absolute paths of OCI hooks that may run at a restore.
    inherited_rlimits: hard limits of the runtime's caller by name, None to ask this process.
    """
    return (
        *check_tasks(spec, needs, recorded_seccomp=recorded_seccomp, inherited=inherited_rlimits),
        *check_container(spec, needs, allowed_hooks=allowed_hooks),
    )


def refuse(findings: Iterable[Finding], *, image: str) -> None:
    """Raise if any finding is a refusal, with all of them named.

    image: its reference, for the message. Raises WiderPrivileges if the image holds more than the spec
    grants, AdmissionRefused if only something else stands against it.
    """
    refusals = [finding for finding in findings if finding.severity == "refuse"]
    if not refusals:
        return
    causes = "; ".join(f"{finding.message} [{finding.rule}]" for finding in refusals)
    remedies = "; ".join(dict.fromkeys(finding.remedy for finding in refusals if finding.remedy))
    message = f"could not admit image '{image}': {causes}; what to do: {remedies}"
    if any(finding.rule.startswith("privileges.") for finding in refusals):
        raise WiderPrivileges(message, after="stopped")
    raise AdmissionRefused(message)
