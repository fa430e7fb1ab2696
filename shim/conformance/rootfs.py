"""Root file systems of real services, from the distribution's own packages, verified by apt and cached."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from engines.conformance import Absent
from shim.conformance.spec import skeleton
from shim.toolchain import apt
from shim.toolchain.lock import ToolchainError

# What the services' packages name for their installation only.
_LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/include")


def of_packages(packages: tuple[str, ...], cache: Path) -> Path:
    """A directory with these Debian packages and all they depend on, unpacked but not configured.

    Never write into it. Raises Absent.
    """
    release = _release()
    key = hashlib.sha256(repr((packages, release, _LEFT_OUT)).encode()).hexdigest()[:16]
    target = cache / f"services-{key}"
    with _locked(cache):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                try:
                    _build(packages, release, Path(scratch)).rename(target)
                except (ToolchainError, subprocess.CalledProcessError, OSError) as error:
                    raise Absent(f"no packages {', '.join(packages)} on this node: {error}") from error
    return target


def of_machine(cache: Path) -> Path:
    """A directory into which this machine's own programs can be mounted. Never write into it."""
    with _locked(cache):
        return skeleton(cache / "machine")


def _build(packages: tuple[str, ...], release: str, scratch: Path) -> Path:
    suite = apt.Suite(name=release, path=scratch / "apt", mirror=apt.system_mirror())
    suite.prepare()
    archives, tree = scratch / "archives", scratch / "tree"
    archives.mkdir()
    suite.download_closure(packages, archives)
    tree.mkdir()
    for folder in ("bin", "lib", "lib64", "sbin"):
        (tree / "usr" / folder).mkdir(parents=True)
        (tree / folder).symlink_to(f"usr/{folder}")
    for archive in sorted(archives.glob("*.deb")):
        content = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE)
        # Older packages bring /lib and /bin as directories of their own: keep the links made above.
        subprocess.run(
            ["tar", "-x", "--keep-directory-symlink", "-C", str(tree)],
            stdin=content.stdout,
            check=True,
            capture_output=True,
        )
        if content.wait():
            raise subprocess.CalledProcessError(content.returncode, content.args)
        archive.unlink()
    for name in _LEFT_OUT:
        shutil.rmtree(tree / name, ignore_errors=True)
    _alternatives(tree)
    return skeleton(tree)


def _alternatives(tree: Path) -> None:
    """Links that installation scripts would make."""
    subprocess.run(["/sbin/ldconfig", "-r", str(tree)], check=False, capture_output=True)
    python = next(iter(sorted((tree / "usr/bin").glob("python3.*[0-9]"))), None)
    if python and not (tree / "usr/bin/python3").exists():
        (tree / "usr/bin/python3").symlink_to(python.name)
    # NumPy finds its linear algebra by an alternative of the system.
    for name in ("libblas.so.3", "liblapack.so.3"):
        for library in tree.glob(f"usr/lib/*/*/{name}"):
            link = library.parent.parent / name
            if not link.exists():
                link.symlink_to(library.relative_to(link.parent))


def _release() -> str:
    lines = Path("/etc/os-release").read_text().splitlines()
    words = dict(line.split("=", 1) for line in lines if "=" in line)
    return words.get("VERSION_CODENAME", "stable").strip('"')


@contextmanager
def _locked(cache: Path) -> Generator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
