"""What this kernel can do that others cannot, and which paths of /proc and /sys it has."""

from __future__ import annotations

import errno
import os
import platform
import re
from typing import Any

from compat.probes.base import System, Untold, probe

MASKABLE = (
    *("/proc/acpi", "/proc/asound", "/proc/bus", "/proc/fs", "/proc/interrupts", "/proc/irq", "/proc/kcore"),
    *("/proc/kmsg", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/sys"),
    *("/proc/sysrq-trigger", "/proc/timer_list", "/proc/timer_stats"),
    *("/sys/devices/virtual/powercap", "/sys/dev/block", "/sys/firmware", "/sys/fs/selinux"),
)
"""What callers hide from containers or make read-only there (containerd, CRI-O, Podman)."""

_PER_CPU = re.compile(r"/sys/devices/system/cpu/cpu\d+/thermal_throttle")


def maskable(path: str) -> bool:
    """Whether a profile tells if the node has this path."""
    return path in MASKABLE or _PER_CPU.fullmatch(path) is not None


_USERFAULTFD = {"x86_64": 323, "aarch64": 282}


@probe("kernel_paths")
def paths(system: System) -> dict[str, Any]:
    """Which of the paths exist that containers usually have a mount on."""
    top = system.root
    if not (top / "proc/self").exists():
        raise Untold("/proc is not mounted")
    found = [path for path in MASKABLE if os.path.lexists(top / path.lstrip("/"))]
    found += [
        "/" + str(path.relative_to(top)) for path in top.glob("sys/devices/system/cpu/cpu*/thermal_throttle")
    ]
    return {"kernel_paths": tuple(sorted(found))}


@probe("userfaultfd")
def userfaultfd(system: System) -> dict[str, Any]:
    """Whether there is userfaultfd, which lazy restores need: it is tried."""
    import ctypes  # slow to load, and a restore does not ask this

    del system
    number = _USERFAULTFD.get(platform.machine())
    if number is None:
        raise Untold(f"its number on {platform.machine()} is not known here")
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(number, os.O_CLOEXEC)
    if descriptor >= 0:
        os.close(descriptor)
        return {"userfaultfd": True}
    if ctypes.get_errno() == errno.ENOSYS:
        return {"userfaultfd": False}
    raise Untold(os.strerror(ctypes.get_errno()))
