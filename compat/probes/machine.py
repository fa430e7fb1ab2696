"""The processor as the kernel shows it, and the kernel."""

from __future__ import annotations

import os
import platform
from typing import Any

from compat.probes.base import System, Untold, probe


@probe("machine")
def read(system: System) -> dict[str, Any]:
    """Architecture, kernel, page size: what uname and sysconf say."""
    del system
    return {
        "arch": platform.machine(),
        "kernel": platform.release(),
        "page_size_bytes": os.sysconf("SC_PAGE_SIZE"),
    }


@probe("cpu")
def processor(system: System) -> dict[str, Any]:
    """Vendor, model and feature flags of the first processor in /proc/cpuinfo, read no further."""
    found: dict[str, Any] = {"cpu_vendor": "", "cpu_model": ""}
    with (system.root / "proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            match key.strip():
                case "vendor_id" | "CPU implementer":
                    found["cpu_vendor"] = value.strip()
                case "model name":
                    found["cpu_model"] = value.strip()
                case "flags" | "Features":
                    found["cpu_flags"] = tuple(sorted(set(value.split())))
                    return found
                case _:
                    pass
    raise Untold("/proc/cpuinfo names no feature flags")
