"""Whether this node's runsc, as it is set up, restores an image.

runsc 20240729 compares next to nothing itself. What it does not compare fails late and darkly, or succeeds
and the program dies: an image of the systrap platform on ptrace ends in an illegal instruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engines.api import EngineSettings, Finding
from engines.gvisor.image import Record
from engines.gvisor.runsc import Runsc, flags, setup


def judge(
    head: Mapping[str, str], record: Record, settings: EngineSettings, runsc: Runsc
) -> tuple[Finding, ...]:
    """Findings about an image on this node; all are refusals. Raises EngineUnavailable."""
    here = setup(flags(list(settings.runtime_args)))
    return tuple(_findings(head, record, here, runsc.version()))


def _findings(
    head: Mapping[str, str], record: Record, here: Mapping[str, str], version: str
) -> Iterator[Finding]:
    if record.runsc != version:
        yield _refusal(
            "gvisor.version",
            f"runsc {record.runsc} made the image, this node has {version}",
            f"restore with runsc {record.runsc}",
        )
    noted = len(record.pod) or 1
    if head.get("container_count", "1") != str(noted):
        yield _refusal(
            "gvisor.containers",
            f"the image holds a sandbox of {head['container_count']} containers, and {noted} are noted in it",
            "checkpoint again",
        )
    had = record.setup.get("platform", "")
    # ptrace leaves the program's code as it is, systrap does not.
    if here["platform"] not in ({"ptrace", "systrap"} if had == "ptrace" else {had}):
        yield _refusal(
            "gvisor.platform",
            f"the image was made on the platform {had}, this node's runsc uses {here['platform']}",
            f"set --platform={had} in RUNSC_ARGS of runtime.conf",
        )
    for key, option in (("overlay", "overlay2"), ("directfs", "directfs")):
        if record.setup.get(key) != here[key]:
            yield _refusal(
                f"gvisor.{key}",
                f"the image was made with --{option}={record.setup.get(key)}, this node's runsc has "
                f"--{option}={here[key]}",
                f"set --{option}={record.setup.get(key)} in RUNSC_ARGS of runtime.conf",
            )
    if here["network"] == "host":
        yield _refusal(
            "gvisor.network",
            "this node's runsc uses the host's network, into which gVisor restores nothing",
            "set --network=none or sandbox in RUNSC_ARGS of runtime.conf",
        )


def _refusal(rule: str, message: str, remedy: str) -> Finding:
    return Finding(rule=rule, severity="refuse", message=message, remedy=remedy)
