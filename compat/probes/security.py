"""The security module, and what this caller's root may do."""

from __future__ import annotations

import os
from typing import Any

from compat.probes.base import System, Untold, probe


@probe("lsm")
def read(system: System) -> dict[str, Any]:
    """The module that labels processes: "apparmor", "selinux", or "" if none does."""
    if (system.root / "sys/fs/selinux/enforce").exists():
        return {"lsm": "selinux"}
    try:
        enabled = (system.root / "sys/module/apparmor/parameters/enabled").read_text().strip()
    except FileNotFoundError:
        enabled = "N"
    return {"lsm": "apparmor" if enabled == "Y" else ""}


@probe("capabilities")
def capabilities(system: System) -> dict[str, Any]:
    """The bounding set, as a mask: root restores nobody who holds more than that."""
    if os.geteuid():
        raise Untold("this is not asked as root")
    for line in (system.root / "proc/self/status").read_text().splitlines():
        if line.startswith("CapBnd:"):
            return {"capabilities": int(line.split()[1], 16)}
    raise Untold("/proc/self/status names no bounding set")
