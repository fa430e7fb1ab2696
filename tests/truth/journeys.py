"""Images that are made on one machine and woken up on another: another kernel, processor, cgroup version.

The program is static, so that no library must be the same on both. glibc's has variants of its own of what
copies memory, chosen at its start by the processor, as every program of today has.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.truth import sources, tools
from tests.truth.scenario import Scenario, Source
from tests.truth.tools import FOLDER

PROGRAM = FOLDER / "counter"  # the same path in every machine
_TEXT = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
static char one[4096], other[4096];
static int hold(const char *what) {
    int huge = !strcmp(what, "huge"), large = !strcmp(what, "large");
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (huge ? MAP_HUGETLB : 0);
    size_t size = large ? 240 << 20 : huge ? 4 << 20 : 16 << 12;
    char *place = mmap(0, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (place == MAP_FAILED) return -1;
    memset(place, 1, size);
    return huge || large ? 0 : madvise(place + 4096, 4096, 102);  /* MADV_GUARD_INSTALL */
}
int main(int n_words, char **words) {
    volatile size_t size = sizeof one - 1;
    if (n_words > 1 && hold(words[1])) {
        perror(words[1]);
        return 2;
    }
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
    off = "AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX512CD,-XSAVEC"
    spec["process"]["env"].append(f"GLIBC_TUNABLES=glibc.cpu.hwcaps=-{off}")


def _with_cgroups(spec: dict[str, Any], path: Path) -> None:
    _tuned(spec, path)
    sources.CGROUPS.edit(spec, path)


def _apart(spec: dict[str, Any], path: Path) -> None:
    _with_cgroups(spec, path)
    spec["linux"]["namespaces"].append({"type": "cgroup"})


def _mapped_apart(spec: dict[str, Any], path: Path) -> None:
    _apart(spec, path)
    sources.map_ids(spec, path)


def _capable(spec: dict[str, Any], path: Path) -> None:
    _unmasked(spec, path)
    sources.grant(spec, "CAP_SYS_RESOURCE")


def _mapped(spec: dict[str, Any], path: Path) -> None:
    _unmasked(spec, path)
    sources.map_ids(spec, path)


def _confined(spec: dict[str, Any], path: Path) -> None:
    _unmasked(spec, path)
    spec["process"]["apparmorProfile"] = "torpor-truth"


def _policy() -> dict[str, bytes]:
    """A profile of AppArmor that forbids nothing, compiled here."""
    rules = ("file", "capability", "network", "mount", "umount", "pivot_root", "ptrace", "signal", "unix")
    text = "profile torpor-truth flags=(attach_disconnected,mediate_deleted) {%s}"
    compiler = tools.prefix("apparmor") / "bin/apparmor_parser"
    words = [compiler, "--skip-kernel-load", "--skip-cache", "--stdout"]
    source = (text % "".join(f"{rule}," for rule in rules)).encode()
    return {_POLICY: subprocess.run(words, input=source, capture_output=True, check=True).stdout}


def _nothing() -> dict[str, bytes]:
    return {}


INHERITING = Source(name="inheriting", args=["/counter"], edit=_inheriting)
STATIC = Source(name="static", args=["/counter"], edit=_static)
UNMASKED = Source(name="unmasked", args=["/counter"], edit=_unmasked)
TUNED = Source(name="tuned", args=["/counter"], edit=_tuned)
WITH_CGROUPS = Source(name="with-cgroups", args=["/counter"], edit=_with_cgroups)
APART = Source(name="apart", args=["/counter"], edit=_apart)
MAPPED_APART = Source(name="mapped-apart", args=["/counter"], edit=_mapped_apart)
MAPPED_APART_PLAIN = Source(name="mapped-apart-plain", args=["/counter"], edit=_mapped_apart, plain=True)
HUGE = Source(name="huge", args=["/counter", "huge"], edit=_unmasked)
GUARDED = Source(name="guarded", args=["/counter", "guard"], edit=_tuned)
LARGE = Source(name="large-static", args=["/counter", "large"], edit=_unmasked)
CAPABLE = Source(name="capable", args=["/counter"], edit=_capable)
CONFINED = Source(name="confined", args=["/counter"], edit=_confined)
MAPPED = Source(name="mapped-ids", args=["/counter"], edit=_mapped)
_POLICY = "/root/policy"
_LOAD = f"dd if={_POLICY} of=/sys/kernel/security/apparmor/.replace bs=4M"
_RESERVE = "echo 8 > /proc/sys/vm/nr_hugepages"
_CAP_SYS_RESOURCE = 24


@dataclass(frozen=True, kw_only=True)
class Journey(Scenario):
    """From one machine to another. made_on, woken_on: processors, as qemu names them, and after a colon how
    much memory they have in MiB if it is not the usual; "" is this machine.

    brings: files for the machine of the dump. before_dump, before_wake: for a shell of an emulated machine.
    after: sets the latter right again.
    lacks: a capability that root has not got where the image is woken.
    """

    made_on: str = ""
    woken_on: str = ""
    brings: Callable[[], Mapping[str, bytes]] = _nothing
    before_dump: str = ""
    before_wake: str = ""
    after: str = ""
    lacks: int | None = None


def _of(name: str, source: Source, made_on: str, woken_on: str, **more: Any) -> Journey:
    return Journey(kind="machine", name=name, source=source, made_on=made_on, woken_on=woken_on, **more)


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
    _of("control groups of version 2", WITH_CGROUPS, "max", "max"),
    _of("control groups of version 2, a namespace of their own", APART, "max", "max"),
    _of("control groups of version 2, a user namespace", MAPPED_APART, "max", "max"),
    _of("control groups of version 2, dumped by runc alone", MAPPED_APART_PLAIN, "max", "max"),
    _of("huge pages, as many free", HUGE, "max", "max", before_dump=_RESERVE),
    _of(
        "huge pages, none free",
        HUGE,
        "max",
        "max",
        before_dump=_RESERVE,
        before_wake="echo 0 > /proc/sys/vm/nr_hugepages",
    ),
    _of("a processor with a larger state", STATIC, "Haswell", "max"),
    _of("a machine with less memory than the image", LARGE, "max", "max:256"),
    _of("guard pages, the same kernel", GUARDED, "", ""),
    _of("guard pages, a kernel without", GUARDED, "", "max"),
    _of("a capability that root has", CAPABLE, "max", "max"),
    _of("a capability that root has not got", CAPABLE, "max", "max", lacks=_CAP_SYS_RESOURCE),
    _of("a profile of AppArmor, its kernel", CONFINED, "max", "max", brings=_policy, before_dump=_LOAD),
    _of("a profile of AppArmor, no such kernel", CONFINED, "max", "", brings=_policy, before_dump=_LOAD),
    _of("a user namespace, which may be made", MAPPED, "max", "max"),
    _of(
        "a user namespace, which may not be made",
        MAPPED,
        "max",
        "max",
        before_wake="echo 0 > /proc/sys/user/max_user_namespaces",
        after="echo 1000 > /proc/sys/user/max_user_namespaces",
    ),
)
