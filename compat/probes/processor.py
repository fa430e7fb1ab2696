"""What the kernel does not tell of a processor: its microarchitecture, and how large its state is.

archspec knows the names and levels, and asks the processor itself (CPUID).
"""

from __future__ import annotations

import importlib
import platform
import re
from typing import Any

from compat.probes.base import System, Untold, probe

_XSAVE_LEAF = 0xD


@probe("cpu_level")
def read(system: System) -> dict[str, Any]:
    """The microarchitecture's name and its level: 3 for x86-64-v3, 0 for an architecture without levels."""
    del system
    cpu: Any = importlib.import_module("archspec.cpu")
    host = cpu.host()
    names = [host.name, *(ancestor.name for ancestor in host.ancestors)]
    levels = [int(found[1]) for name in names if (found := re.fullmatch(r"x86_64_v(\d)", name))]
    base = 1 if "x86_64" in names else 0
    return {"cpu_name": host.name, "cpu_level": max(levels, default=base)}


@probe("xsave_bytes")
def xsave(system: System) -> dict[str, Any]:
    """Size of the XSAVE area with what this kernel has switched on (CPUID leaf 0xD, EBX), 0 without any."""
    del system
    if platform.machine() != "x86_64":
        return {"xsave_bytes": 0}
    cpuid: Any = importlib.import_module("archspec.vendor.cpuid.cpuid").CPUID()
    if cpuid(0, 0)[0] < _XSAVE_LEAF:
        return {"xsave_bytes": 0}
    size = int(cpuid(_XSAVE_LEAF, 0)[1])
    if not size:
        raise Untold("the processor tells no size of its XSAVE area")
    return {"xsave_bytes": size}
