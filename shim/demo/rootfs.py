"""A container's root file system made from this machine's own Python: no registry, no download."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

_LIBRARY = re.compile(r"(/[^ ]+) \(0x[0-9a-f]+\)")
_LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "config-*",
             "turtledemo", "lib2to3", "__pycache__", "pydoc_data")  # fmt: skip


def make(path: Path) -> str:
    """Fill an empty directory; return the interpreter's path inside. Raises OSError, CalledProcessError."""
    python = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    answer = subprocess.run(["ldd", str(python)], capture_output=True, text=True, check=True)
    for name in [str(python), *_LIBRARY.findall(answer.stdout)]:
        target = path / name.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, target)
    library = Path(sysconfig.get_path("stdlib", vars={"base": str(python.parents[1])}))
    shutil.copytree(
        library, path / str(library).lstrip("/"), ignore=shutil.ignore_patterns(*_LEFT_OUT), symlinks=True
    )
    for name in ("proc", "sys", "dev", "tmp", "run", "etc", "data"):
        (path / name).mkdir(exist_ok=True)
    os.chmod(path / "tmp", 0o1777)  # noqa: S103, PTH101
    return str(python)
