"""Images that are made on one machine and woken up on another: another kernel, processor, cgroup version.

The program is static, so that no library must be the same on both. glibc's has variants of its own of what
copies memory, chosen at its start by the processor, as every program of today has.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.truth import sources
from tests.truth.scenario import Scenario, Source
from tests.truth.tools import FOLDER

PROGRAM = FOLDER / "counter"  # the same path in every machine
_TEXT = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static char one[4096], other[4096];
int main(void) {
    volatile size_t size = sizeof one - 1;
    for (int n = 1;; n++) {
        memset(one, 1 + n % 100, size);
        memcpy(other, one, size);
        if (memcmp(one, other, size) || strlen(other) != size || strchr(other, 101)) return 1;
        printf("tick %d\n", n);
        fflush(stdout);
        usleep(20000);
    }
}
"""


_LIMITS = {"NPROC": 1000, "SIGPENDING": 1000, "NOFILE": 1024, "MEMLOCK": 65536}


def compile_program() -> None:
    """Make the static program."""
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    words = ["gcc", "-O1", "-fno-builtin", "-static", "-x", "c", "-", "-o", PROGRAM]
    subprocess.run(words, input=_TEXT, text=True, check=True)


def _inheriting(spec: dict[str, Any], path: Path) -> None:
    spec["mounts"] = [entry for entry in spec["mounts"] if entry["type"] != "bind"]
    shutil.copy(PROGRAM, path / "rootfs/counter")


def _static(spec: dict[str, Any], path: Path) -> None:
    """With limits of its own: those that it would inherit go by the size of a machine's memory."""
    _inheriting(spec, path)
    spec["process"]["rlimits"] = [
        {"type": f"RLIMIT_{name}", "hard": limit, "soft": limit} for name, limit in _LIMITS.items()
    ]


def _unmasked(spec: dict[str, Any], path: Path) -> None:
    """Without the paths of the kernel's that are covered, which another kernel may not have."""
    _static(spec, path)
    spec["linux"]["maskedPaths"] = spec["linux"]["readonlyPaths"] = []


def _tuned(spec: dict[str, Any], path: Path) -> None:
    """As the verdict advises: the library does not choose what the other processor lacks."""
    _unmasked(spec, path)
    off = "AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX512CD"
    spec["process"]["env"].append(f"GLIBC_TUNABLES=glibc.cpu.hwcaps=-{off}")


def _with_cgroups(spec: dict[str, Any], path: Path) -> None:
    _tuned(spec, path)
    sources.CGROUPS.edit(spec, path)


INHERITING = Source(name="inheriting", args=["/counter"], edit=_inheriting)
STATIC = Source(name="static", args=["/counter"], edit=_static)
UNMASKED = Source(name="unmasked", args=["/counter"], edit=_unmasked)
TUNED = Source(name="tuned", args=["/counter"], edit=_tuned)
WITH_CGROUPS = Source(name="with-cgroups", args=["/counter"], edit=_with_cgroups)


@dataclass(frozen=True, kw_only=True)
class Journey(Scenario):
    """From one machine to another. made_on, woken_on: processors, as qemu names them; "" is this machine."""

    made_on: str = ""
    woken_on: str = ""


def _of(name: str, source: Source, made_on: str, woken_on: str) -> Journey:
    return Journey(kind="machine", name=name, source=source, made_on=made_on, woken_on=woken_on)


JOURNEYS = (
    _of("another machine of the same kind", STATIC, "max", "max"),
    _of("a processor with less that nobody uses", STATIC, "max", "Haswell"),
    _of("a processor without AVX2", STATIC, "max", "SandyBridge"),
    _of("a processor without XSAVE", STATIC, "max", "Nehalem"),
    _of("a processor with more", STATIC, "Nehalem", "max"),
    _of("limits inherited from a machine with a little more memory", INHERITING, "Nehalem", "max"),
    _of("from an emulated machine to this one", STATIC, "max", ""),
    _of("from an emulated machine, no path of the kernel's covered", UNMASKED, "max", ""),
    _of("from this machine to an emulated one", UNMASKED, "", "max"),
    _of("to an emulated machine, the C library told what is missing there", TUNED, "", "max"),
    _of("to an emulated machine, control groups mounted", WITH_CGROUPS, "", "max"),
)
