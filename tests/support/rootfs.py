"""Small container root filesystems for the tests, built from the distribution's own packages.

Nothing is pulled from a registry: packages are downloaded and verified by apt, unpacked, and
only the wanted programs, with the shared libraries they name, are kept. The results are cached in
build/rootfs of the checkout.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = CHECKOUT / "build" / "rootfs"

# What the wanted programs depend on only for their installation.
SKIPPED = ("perl", "libperl", "debconf", "passwd", "adduser", "libpam", "usrmerge", "dpkg", "tar", "gcc-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """packages: Debian packages; keep: glob patterns of what is kept of them, below the unpacked root."""

    name: str
    packages: tuple[str, ...]
    keep: tuple[str, ...]


RECIPES = {
    "busybox": Recipe(name="busybox", packages=(), keep=()),
    "python": Recipe(
        name="python",
        packages=("python3-minimal",),
        keep=("usr/bin/python3*", "usr/lib/python3.*", "usr/lib/python3"),
    ),
    "redis": Recipe(
        name="redis",
        packages=("redis-server",),
        keep=tuple(f"usr/bin/redis-{name}" for name in ("server", "check-rdb", "cli", "benchmark")),
    ),
}


def rootfs(name: str) -> Path:
    """The cached root filesystem `name` ("busybox", "python", "redis"), built if absent.

    Never write into it: copy it, or mount it as the lower layer of an overlay.
    """
    recipe = RECIPES[name]
    key = hashlib.sha256(repr((recipe, SKIPPED, _release())).encode()).hexdigest()[:16]
    target = CACHE / f"{name}-{key}"
    with _locked():
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                built = Path(scratch) / "built"
                _build(recipe, built, Path(scratch))
                built.rename(target)
    return target


def copy_rootfs(name: str, target: Path) -> Path:
    """A writable copy of the root filesystem `name` at `target` (absent)."""
    shutil.copytree(rootfs(name), target, symlinks=True)
    return target


def _build(recipe: Recipe, target: Path, scratch: Path) -> None:
    for folder in (
        "usr/bin",
        "usr/lib",
        "usr/lib64",
        "dev",
        "etc",
        "proc",
        "sys",
        "run",
        "var",
        "root",
        "data",
    ):
        (target / folder).mkdir(parents=True)
    (target / "tmp").mkdir()
    (target / "tmp").chmod(0o1777)
    for link, goal in (("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64"), ("sbin", "usr/bin")):
        (target / link).symlink_to(goal)
    (target / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n")
    (target / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    for file in ("hosts", "hostname", "resolv.conf"):
        (target / "etc" / file).write_text("")
    busybox = next(_unpack(("busybox-static",), scratch).rglob("bin/busybox"))
    shutil.copy2(busybox, target / "usr/bin/busybox")
    listing = subprocess.run([str(busybox), "--list"], check=True, capture_output=True, text=True)
    for applet in set(listing.stdout.split()) - {"busybox"}:
        (target / "usr/bin" / applet).symlink_to("busybox")
    if recipe.packages:
        _keep(recipe, _unpack(recipe.packages, scratch), target)


def _keep(recipe: Recipe, unpacked: Path, target: Path) -> None:
    binaries: list[Path] = []
    for pattern in recipe.keep:
        for found in sorted(unpacked.glob(pattern)):
            kept = target / found.relative_to(unpacked)
            if found.is_dir():
                shutil.copytree(found, kept, symlinks=True, dirs_exist_ok=True)
                binaries += [path for path in kept.rglob("*") if _is_elf(path)]
            else:
                shutil.copy2(found, kept, follow_symlinks=False)
                if _is_elf(kept):
                    binaries.append(kept)
    folders = [*unpacked.glob("usr/lib/*-linux-gnu"), unpacked / "usr/lib"]
    loader = next(path for path in unpacked.glob("usr/lib/**/ld-linux*.so.*") if not path.is_symlink())
    for folder in ("usr/lib64", "usr/lib"):  # where the ABI of x86-64 and of others looks for it
        shutil.copy2(loader, target / folder / loader.name)
    for library in _libraries(binaries, loader, folders):
        shutil.copy2(library, target / "usr/lib" / library.name)


def _libraries(binaries: Sequence[Path], loader: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """The shared libraries that `binaries` need. The loader of their own release tells."""
    seen: set[str] = set()
    search = ":".join(map(str, folders))
    for binary in binaries:
        listing = subprocess.run(
            [str(loader), "--library-path", search, "--list", str(binary)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for line in listing.splitlines():
            name, arrow, rest = line.strip().partition(" => ")
            if arrow and name not in seen and not name.startswith(("/", "linux-vdso", "ld-linux")):
                seen.add(name)
                yield Path(rest.split(" (")[0])


def _unpack(packages: Sequence[str], scratch: Path) -> Path:
    """Download the packages and what they depend on, and unpack them into one tree with a merged /usr."""
    archives = Path(tempfile.mkdtemp(dir=scratch))
    tree = Path(tempfile.mkdtemp(dir=scratch))
    for folder in ("bin", "lib", "lib64", "sbin"):
        (tree / "usr" / folder).mkdir(parents=True)
        (tree / folder).symlink_to(f"usr/{folder}")
    # An empty status file: what happens to be installed on this machine must not shorten the closure.
    # The same goes for packages that lie in the machine's own cache.
    (archives / "status").touch()
    (archives / "partial").mkdir()
    apt = ["apt-get", "-qq", "-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=root"]
    apt += ["-o", f"Dir::State::status={archives / 'status'}", "-o", f"Dir::Cache::archives={archives}"]
    listing = _apt([*apt, "-o", "APT::Install-Recommends=false", "--print-uris", "-y", "install", *packages])
    names = [line.split()[1].split("_")[0] for line in listing.splitlines() if line.startswith("'")]
    wanted = [name for name in names if not name.startswith(SKIPPED)]
    _apt([*apt, "download", *wanted], cwd=archives)
    for archive in sorted(archives.glob("*.deb")):
        content = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", str(archive)], check=True, capture_output=True
        )
        # Older packages bring /lib and /bin as directories of their own: keep the links made above.
        unpack = ["tar", "-x", "--keep-directory-symlink", "-C", str(tree)]
        subprocess.run(unpack, check=True, input=content.stdout)
    return tree


def _apt(command: Sequence[str], cwd: Path | None = None) -> str:
    """Run apt-get; refresh the package lists once where they are missing or out of date."""
    for attempt in (1, 2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
        if done.returncode == 0:
            return done.stdout
        if attempt == 1:
            subprocess.run(["apt-get", "-qq", "update"], check=True, capture_output=True)
    raise RuntimeError(f"could not run {' '.join(command)}: {done.stderr.strip()}")


def _is_elf(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _release() -> str:
    lines = Path("/etc/os-release").read_text().splitlines()
    return next((line for line in lines if line.startswith("VERSION_CODENAME=")), "unknown")


@contextmanager
def _locked() -> Generator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    handle = os.open(CACHE / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
