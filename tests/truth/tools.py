"""Other releases of CRIU and runc: Debian's own of another suite, beside the toolchain's, made once."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Literal

from shim.toolchain import apt, install
from shim.toolchain.packages import Source, fetch_newest
from shim.toolchain.units import Unit
from tests.support.containers import CHECKOUT, PREFIX

FOLDER = CHECKOUT / "build" / "truth"
Release = Literal["", "criu-4.1", "criu-3.17", "runc-1.1", "runsc-2022", "no-criu", "apparmor"]

_UNITS = {
    "criu-4.1": Unit(name="criu", suite="trixie", packages=("criu",), programs=(("usr/sbin/criu", "criu"),)),
    "criu-3.17": Unit(
        name="criu", suite="bookworm", packages=("criu",), programs=(("usr/sbin/criu", "criu"),)
    ),
    "runsc-2022": Unit(
        name="runsc", suite="bookworm", packages=("runsc",), programs=(("usr/bin/runsc", "runsc"),)
    ),
    "apparmor": Unit(
        name="apparmor",
        suite="trixie",
        packages=("apparmor",),
        programs=(("usr/sbin/apparmor_parser", "apparmor_parser"),),
    ),
    "runc-1.1": Unit(name="runc", suite="trixie", packages=("runc",), programs=(("usr/sbin/runc", "runc"),)),
}


def prefix(release: Release) -> Path:
    """A toolchain in which one program is of another release, or missing. Raises ToolchainError."""
    if not release:
        return PREFIX
    found = FOLDER / release
    if (found / "complete").exists():
        return found
    shutil.rmtree(found, ignore_errors=True)
    found.mkdir(parents=True)
    if release in _UNITS:
        unit = _UNITS[release]
        with tempfile.TemporaryDirectory(prefix="work-", dir=FOLDER) as work:
            source = Source(mirror=apt.system_mirror())
            unpacked, _ = fetch_newest((unit,), source, Path(work), lambda line: print(f"truth: {line}"))
            install._copy(found, (unit,), unpacked)
    (found / "bin").mkdir(exist_ok=True)
    for program in (PREFIX / "bin").iterdir():
        if f"no-{program.name}" != release and not (found / "bin" / program.name).exists():
            (found / "bin" / program.name).symlink_to(program.resolve())
    (found / "complete").touch()
    return found
