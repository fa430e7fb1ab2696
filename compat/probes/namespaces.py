"""Which kinds of namespaces the kernel has, and whether user namespaces may be made."""

from __future__ import annotations

from typing import Any

from compat.probes.base import System, Untold, probe


@probe("namespaces")
def read(system: System) -> dict[str, Any]:
    """The kinds, as /proc names them."""
    kinds = sorted(
        entry.name for entry in (system.root / "proc/self/ns").iterdir() if "_for_children" not in entry.name
    )
    if not kinds:
        raise Untold("/proc/self/ns is empty")
    try:
        allowed = int((system.root / "proc/sys/user/max_user_namespaces").read_text())
    except FileNotFoundError:
        allowed = 0
    return {"namespaces": tuple(kind for kind in kinds if kind != "user" or allowed)}
