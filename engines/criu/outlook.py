"""What is to be expected of a dump: obstacles, and what it must be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from engines.api import Finding


@dataclass(slots=True)
class Outlook:
    """What is to be expected.

    findings: obstacles. passing: obstacles that may be gone in a moment, which a dump finds out by itself.
    watched: paths that CRIU must be told (`watches`). outside: mounts that it must be told (`views`).
    timers: periodic timerfds, as pids and descriptors.
    terminals: pids, descriptors and their flags.
    """

    findings: list[Finding] = field(default_factory=list[Finding])
    passing: list[Finding] = field(default_factory=list[Finding])
    watched: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    timers: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    terminals: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])

    def add(self, rule: str, message: str, remedy: str) -> None:
        """Note an obstacle, once for each rule."""
        _add(self.findings, rule, message, remedy)

    def has(self, rule: str) -> bool:
        """Whether there is an obstacle of this rule already: then no other need be waited for."""
        return any(finding.rule == f"criu.foresee.{rule}" for finding in self.findings)

    def add_passing(self, rule: str, message: str, remedy: str) -> None:
        """Note an obstacle that may be gone in a moment, once for each rule."""
        _add(self.passing, rule, message, remedy)

    def sentence(self) -> str:
        """All obstacles, and what to do about them."""
        causes = "; ".join(finding.message for finding in self.findings)
        remedies = ", and ".join(dict.fromkeys(finding.remedy for finding in self.findings))
        return f"{causes}; {remedies}"


def _add(findings: list[Finding], rule: str, message: str, remedy: str) -> None:
    rule = f"criu.foresee.{rule}"
    if all(finding.rule != rule for finding in findings):
        findings.append(Finding(rule=rule, severity="refuse", message=message, remedy=remedy))
