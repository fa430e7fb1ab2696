"""What the toolchain consists of: units, each taken as a whole from Debian packages or from the system."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One group of programs that belong together.

    suite, packages: Debian packages that have its files. programs: file in the package to name in PREFIX/bin.
    trees: folder in the package to folder in PREFIX. opened: libraries that the programs open by name at run
    time. minimum: the oldest version of the first program that
    will do, None where any will. why: what the minimum is for. version_args: make that program tell its
    version; empty if it cannot.
    """

    name: str
    suite: str
    packages: tuple[str, ...]
    programs: tuple[tuple[str, str], ...] = ()
    trees: tuple[tuple[str, str], ...] = ()
    opened: tuple[str, ...] = ()
    minimum: tuple[int, ...] | None = None
    why: str = ""
    version_args: tuple[str, ...] = ("--version",)

    @property
    def program(self) -> str:
        """Name of the program that stands for the unit; empty where the unit has none."""
        return self.programs[0][1] if self.programs else ""


FORKY = "forky"
TRIXIE = "trixie"

UNITS: tuple[Unit, ...] = (
    Unit(
        name="criu",
        suite=FORKY,
        packages=("criu",),
        programs=(("usr/sbin/criu", "criu"),),
        minimum=(4, 2),
        why="older ones cannot dump TCP or UDP sockets on kernels since 6.16",
    ),
    Unit(
        name="pycriu",
        suite=FORKY,
        packages=("python3-pycriu",),
        trees=(("usr/lib/python3/dist-packages/pycriu", "python/pycriu"),),
    ),
    Unit(
        name="runc",
        suite=FORKY,
        packages=("runc",),
        programs=(("usr/bin/runc", "runc"),),
        minimum=(1, 2),
        why="torpor is not tested with older ones",
    ),
    Unit(
        # testing's build panics at the first fork although it tells its version.
        name="runsc",
        suite=TRIXIE,
        packages=("runsc",),
        programs=(("usr/bin/runsc", "runsc"),),
        minimum=(20240729,),
        why="older ones have no systrap platform",
    ),
    Unit(
        name="crun",
        suite=FORKY,
        packages=("crun", "libcriu2"),
        programs=(("usr/bin/crun", "crun"),),
        opened=("libcriu.so.2",),
    ),
    Unit(
        name="containerd",
        suite=FORKY,
        packages=("containerd",),
        programs=(
            ("usr/bin/containerd", "containerd"),
            ("usr/bin/containerd-shim-runc-v2", "containerd-shim-runc-v2"),
            ("usr/bin/ctr", "ctr"),
        ),
        minimum=(2, 0),
        why="older ones have no CRI call for checkpoints",
    ),
    Unit(
        name="podman",
        suite=FORKY,
        packages=(
            "podman",
            "conmon",
            "netavark",
            "aardvark-dns",
            "catatonit",
            "golang-github-containers-common",
        ),
        programs=(
            ("usr/bin/podman", "podman"),
            ("usr/bin/conmon", "conmon"),
            ("usr/lib/podman/netavark", "netavark"),
            ("usr/lib/podman/aardvark-dns", "aardvark-dns"),
            ("usr/bin/catatonit", "catatonit"),
        ),
        trees=(("usr/share/containers", "share/containers"),),
        minimum=(5, 0),
        why="torpor is not tested with older ones",
    ),
    Unit(
        name="checkpointctl",
        suite=FORKY,
        packages=("checkpointctl",),
        programs=(("usr/bin/checkpointctl", "checkpointctl"),),
        version_args=(),
    ),
    Unit(
        name="nft",
        suite=FORKY,
        packages=("nftables",),
        programs=(("usr/sbin/nft", "nft"),),
    ),
    Unit(
        name="ip",
        suite=FORKY,
        packages=("iproute2",),
        programs=(("usr/bin/ip", "ip"),),
        version_args=("-V",),
    ),
    Unit(
        name="cni",
        suite=FORKY,
        packages=("containernetworking-plugins",),
        trees=(("usr/lib/cni", "cni"),),
    ),
)

BY_NAME = {unit.name: unit for unit in UNITS}


def parse_version(text: str) -> tuple[int, ...] | None:
    """The first dotted number (or date) in what a program says about itself, None if there is none."""
    found = re.search(r"(?<![\w./])v?(?:0\.0~)?(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in found[1].split(".")) if found else None


def ask_version(unit: Unit, program: Path, *, timeout_s: float = 20) -> tuple[tuple[int, ...] | None, str]:
    """Ask a program for its version. Returns it parsed (None if it does not tell) and as text."""
    try:
        done = subprocess.run(
            [program, *unit.version_args],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"does not run: {error}"
    version = parse_version(done.stdout or done.stderr)
    if done.returncode != 0 or version is None:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"status {done.returncode}"]
        return None, f"does not run: {last[0]}"
    return version, ".".join(map(str, version))
