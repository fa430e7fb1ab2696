"""Tries every tool for real: a version number has lied before.

Needs root. Everything happens in a folder and in process and mount namespaces of its own: whatever a broken
tool or a killed installation leaves behind ends with them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engines.api import Finding, Severity
from shim.toolchain.find import Tools
from shim.toolchain.smoke_tools import SMOKE, Bench, SmokeFailure
from shim.toolchain.units import BY_NAME, Unit

REQUIRED = frozenset({"criu", "pycriu", "runc"})
"""Units without which no container sleeps or wakes; one caller (containerd or Podman) comes on top."""

_NAMESPACES = ("unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
_TIMEOUT_S = 600
_STALE_S = 3600


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What the inner process is to do."""

    tools: Tools
    units: tuple[str, ...]
    folder: Path


def program_of(unit: Unit, tools: Tools) -> Path | None:
    """The file that stands for a unit on this node, None if it was not found."""
    if unit.name == "pycriu":
        return tools.python_path and tools.python_path / "pycriu" / "__init__.py"
    if unit.name == "cni":
        return tools.cni_path and tools.cni_path / "bridge"
    return getattr(tools, unit.name)


def run(tools: Tools, units: Iterable[Unit]) -> tuple[Finding, ...]:
    """Try the units; one finding each, rule `toolchain.<unit>`. Never raises for a tool that fails."""
    units = tuple(units)
    present = tuple(unit for unit in units if program_of(unit, tools) is not None)
    tried = {finding.rule: finding for finding in _run_apart(tools, present)} if present else {}
    return tuple(tried.get(f"toolchain.{unit.name}") or _not_found(unit) for unit in units)


def _not_found(unit: Unit) -> Finding:
    return Finding(
        rule=f"toolchain.{unit.name}",
        severity="refuse" if unit.name in REQUIRED else "warn",
        message=f"{unit.name} was not found",
        remedy="torpor toolchain install",
    )


def _run_apart(tools: Tools, units: tuple[Unit, ...]) -> list[Finding]:
    if os.geteuid() != 0:
        return _for_all(units, "unknown", "was not tried: that needs root", "run as root")
    _sweep()
    with tempfile.TemporaryDirectory(prefix="torpor-smoke-") as name:
        order = _Order(tools=tools, units=tuple(unit.name for unit in units), folder=Path(name))
        command = [*_NAMESPACES, sys.executable, "-m", "shim.toolchain.smoke"]
        try:
            done = subprocess.run(
                command,
                input=msgspec.json.encode(order, enc_hook=str),
                capture_output=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                timeout=_TIMEOUT_S,
                check=True,
            )
            return msgspec.json.decode(done.stdout, type=list[Finding])
        except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
            stderr = getattr(error, "stderr", None) or b""
            cause = stderr.decode(errors="replace").strip().splitlines()[-1:] or [str(error)]
            return _for_all(
                units, "refuse", f"could not be tried: {cause[0]}", "look at the cause, try again"
            )


def _for_all(units: Iterable[Unit], severity: Severity, message: str, remedy: str) -> list[Finding]:
    return [
        Finding(
            rule=f"toolchain.{unit.name}", severity=severity, message=f"{unit.name} {message}", remedy=remedy
        )
        for unit in units
    ]


def _sweep() -> None:
    """Remove folders and empty cgroups that killed runs left; those of a run at work are younger."""
    old = time.time() - _STALE_S
    for folder in Path(tempfile.gettempdir()).glob("torpor-smoke-*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_mtime < old:
                shutil.rmtree(folder)
    for pattern in ("torpor-bundle-*", "*/torpor-bundle-*"):
        for cgroup in Path("/sys/fs/cgroup").glob(pattern):
            with contextlib.suppress(OSError):  # somebody else's, or gone
                if cgroup.stat().st_mtime < old:
                    cgroup.rmdir()


def _main() -> None:
    """The inner process: an order on stdin, findings on stdout."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=_Order, dec_hook=lambda _, text: Path(text))
    bench = Bench(order.tools, order.folder)
    findings = [_try(BY_NAME[name], bench) for name in order.units]
    sys.stdout.buffer.write(msgspec.json.encode(findings))


def _try(unit: Unit, bench: Bench) -> Finding:
    rule = f"toolchain.{unit.name}"
    try:
        message = SMOKE[unit.name](bench)
    except (SmokeFailure, OSError, subprocess.TimeoutExpired, ValueError) as error:
        if unit.name == "crun" and "hybrid" in str(error):
            return Finding(
                rule=rule,
                severity="warn",
                message=f"crun does not work with this machine's cgroups: {error}",
                remedy="use runc, or boot with cgroup v2 alone",
            )
        return Finding(
            rule=rule,
            severity="refuse",
            message=f"{unit.name} does not work: {error}",
            remedy="torpor toolchain install --force",
        )
    return Finding(rule=rule, severity="ok", message=message)


if __name__ == "__main__":
    _main()
