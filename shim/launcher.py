"""Writes the launchers: the files that a runtime caller's BinaryName names, and their runtime.conf.

`python -m shim.launcher` writes those of a checkout into its virtual environment.
"""

from __future__ import annotations

import compileall
import encodings
import os
import platform
import shlex
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from shim import stub
from shim.errors import UsageError
from shim.toolchain.find import find_tools

LAUNCHERS = {"torpor-runtime": "RUNTIME", "torpor-runtime-runsc": "RUNSC"}
"""File name to the runtime.conf key of the real runtime behind it."""

MARKER = "# Written by torpor."

RUNSC_ARGS = "--platform=systrap --network=none --ignore-cgroups"
"""gVisor's set-up as tested; a node whose gVisor can do more says so in runtime.conf."""


def base_python() -> Path:
    """The interpreter behind this one's virtual environment; starting it directly is faster."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def package_root() -> Path:
    """The directory that holds the package `shim`."""
    return Path(__file__).resolve().parents[1]


def write_launchers(
    directory: Path,
    *,
    python: Path,
    package_root: Path,
    site: Path,
    settings: Mapping[str, str],
    conf_path: Path | None = None,
) -> list[Path]:
    """Write `torpor-runtime`, and `torpor-runtime-runsc` if the settings name a RUNSC, and runtime.conf.

    directory: where the launchers go. python: the interpreter they start. package_root: the directory that
    holds the package `shim`. site: site-packages with torpor's dependencies. settings: what goes into
    runtime.conf; RUNTIME must be there, SITE is added. conf_path: where that file goes, by default
    etc/torpor/runtime.conf beside `directory`. Every file is replaced at once, never half-written.
    Returns the files written. Raises UsageError if a path cannot be written into a launcher.
    """
    if conf_path is None:
        conf_path = directory.absolute().parent / "etc" / "torpor" / "runtime.conf"
    if "RUNTIME" not in settings:
        raise UsageError("could not write the launchers: no runtime is known; install runc and try again")
    # Compiled now, so that the first calls do not each pay for it.
    compileall.compile_dir(package_root / "shim", quiet=2)
    _write(conf_path, conf_text({**settings, "SITE": str(site)}).encode(), 0o644)
    launchers = launcher_files(
        directory, python=python, package_root=package_root, settings=settings, conf_path=conf_path
    )
    for path, content in launchers.items():
        _write(path, content, 0o755)
    return [conf_path, *launchers]


def launcher_files(
    directory: Path, *, python: Path, package_root: Path, settings: Mapping[str, str], conf_path: Path
) -> dict[Path, bytes]:
    """The launchers for the runtimes that `settings` name: path in `directory` to content."""
    return {
        directory / name: launcher(python, package_root, conf_path, key, settings[key], platform.machine())
        for name, key in LAUNCHERS.items()
        if settings.get(key)
    }


def conf_text(settings: Mapping[str, str]) -> str:
    """The text of a runtime.conf. Raises UsageError for a value that a line cannot hold."""
    for key, value in settings.items():
        if "\n" in value or value != value.strip():
            raise UsageError(f"could not write setting '{key}': {value!r} does not fit on a line; change it")
    lines = [f"{key}={value}" for key, value in sorted(settings.items())]
    return "\n".join([MARKER, *lines, ""])


def launcher(python: Path, root: Path, conf_path: Path, key: str, runtime: str, machine: str) -> bytes:
    """The content of one launcher: the small program of `shim.stub`, or a shell script on other machines.

    key: "RUNTIME" or "RUNSC"; runtime: the real runtime that takes over if the interpreter or torpor is gone;
    machine: as `platform.machine()` says it.
    """
    code = (
        f"import sys;sys.path.insert(0,{str(root)!r});from shim.entry import main"
        f";main({str(conf_path)!r},{key!r},{runtime!r})"
    )
    # -X utf8: arguments of any bytes come through, and no other codec is loaded.
    prefix = [str(python), "-IS", "-Xutf8", "-c", code]
    landmarks = [str(python), encodings.__file__, str(root / "shim" / "entry.py")]
    if machine in stub.machines():
        return stub.build(machine, prefix=prefix, landmarks=landmarks, runtime=runtime)
    tests = " && ".join(f"[ -e {shlex.quote(path)} ]" for path in landmarks)
    # A shell changes the environment a little (PWD, names that are no identifiers), and the signals that
    # its caller ignores remain unknown.
    return (
        f'#!/bin/sh\n{MARKER}\n{tests} && exec {shlex.join(prefix)} 0 "$0" "$@"\n'
        f'exec {shlex.quote(runtime)} "$@"\n'
    ).encode("utf-8", "surrogateescape")


def default_settings(prefix: Path | None) -> dict[str, str]:
    """Settings for the tools found on this node. prefix: the toolchain's, None for the default."""
    tools = find_tools(prefix)
    settings = {"TOOLS": str(tools.prefix)}
    if tools.runc:
        settings["RUNTIME"] = str(tools.runc)
    if tools.runsc:
        settings["RUNSC"] = str(tools.runsc)
        settings["RUNSC_ARGS"] = RUNSC_ARGS
    return settings


def main() -> None:
    """Write the launchers of the virtual environment this runs in."""
    for path in write_launchers(
        Path(sys.prefix) / "bin",
        python=base_python(),
        package_root=package_root(),
        site=Path(sysconfig.get_path("purelib")),
        settings=default_settings(None),
    ):
        print(path)


def _write(path: Path, content: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_bytes() == content and path.stat().st_mode & 0o7777 == mode:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
