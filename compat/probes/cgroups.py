"""Which control groups the node has mounted."""

from __future__ import annotations

from typing import Any

from compat.probes.base import System, Untold, probe


@probe("cgroup_mode")
def read(system: System) -> dict[str, Any]:
    """v2 alone, v1, or v1 beside v2 (hybrid)."""
    top = system.root / "sys/fs/cgroup"
    if not top.is_dir():
        raise Untold("nothing is mounted at /sys/fs/cgroup")
    if (top / "cgroup.controllers").exists():
        return {"cgroup_mode": "v2"}
    return {"cgroup_mode": "hybrid" if (top / "unified/cgroup.controllers").exists() else "v1"}
