"""What a node allows: smoke tests of CRIU and of what it needs, not version comparisons."""

from __future__ import annotations

import os
import shutil
import subprocess

from engines.api import EngineSettings, Finding
from engines.criu import config

_CHECK_S = 30.0


def _ask(settings: EngineSettings, *argv: str) -> tuple[bool, str]:
    """Run a tool: whether it succeeded, and its last line."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CHECK_S,
            check=False,
            env={**os.environ, "PATH": settings.search_path},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else f"exit status {done.returncode}"


def tools(settings: EngineSettings) -> tuple[Finding, ...]:
    """Whether the programs are there that a call runs. Cheap: nothing is executed."""
    found: list[Finding] = []
    if not os.access(settings.runtime_path, os.X_OK):
        found.append(
            Finding(
                rule="criu.runtime",
                severity="refuse",
                message=f"there is no runtime at {settings.runtime_path}",
                remedy="install runc and name it in the configuration",
            )
        )
    for name, severity, why in (
        ("criu", "refuse", "nothing can be dumped or restored"),
        ("tar", "refuse", "CRIU packs the container's tmpfs mounts with it"),
        ("gzip", "refuse", "CRIU's tar compresses the container's tmpfs mounts with it"),
        ("nsenter", "warn", "a network lock that a killed call left cannot be removed"),
        ("nft", "warn", "a network lock that a killed call left cannot be removed"),
    ):
        if shutil.which(name, path=settings.search_path) is None:
            found.append(
                Finding(
                    rule=f"criu.tool.{name}",
                    severity="refuse" if severity == "refuse" else "warn",
                    message=f"there is no {name} in {settings.search_path}: {why}",
                    remedy=f"install {name}",
                )
            )
    return tuple(found)


def tracks_memory(settings: EngineSettings) -> bool:
    """Whether the kernel can tell which pages were written, as a pre-dump needs."""
    return _ask(settings, "criu", "check", "--feature", "mem_dirty_track")[0]


def probe(settings: EngineSettings) -> tuple[Finding, ...]:
    """Findings about this node; never raises."""
    found = [*tools(settings), *config.check_system()]
    if os.geteuid() != 0:
        found.append(
            Finding(
                rule="criu.root",
                severity="refuse",
                message="not running as root: containers can be neither dumped nor restored",
                remedy="run as root",
            )
        )
    if any(finding.severity == "refuse" for finding in found):
        return tuple(found)
    works, line = _ask(settings, "criu", "check")
    found.append(
        Finding(
            rule="criu.smoke",
            severity="ok" if works else "refuse",
            message=f"criu check: {line}",
            remedy="" if works else "install a CRIU that knows this kernel (4.2 or newer)",
        )
    )
    if works:
        tracks = tracks_memory(settings)
        found.append(
            Finding(
                rule="criu.pre-dump",
                severity="ok" if tracks else "warn",
                message=f"the kernel {'tracks' if tracks else 'cannot track'} dirty memory",
                remedy="" if tracks else "dump in one go; pre-dumps need CONFIG_MEM_SOFT_DIRTY",
            )
        )
    return tuple(found)
