"""Gets the packages of the wanted units: the locked ones, or with their whole closure the newest."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from shim.toolchain import apt
from shim.toolchain.lock import Lock, LockedPackage, ToolchainError, check, mismatch
from shim.toolchain.units import Unit

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where packages come from.

    mirror: URI of the archive. cache: folder of packages named by their hash, None for none.
    accept_expired: take an index past its date although nothing is locked.
    """

    mirror: str
    cache: Path | None = None
    accept_expired: bool = False


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """One package, unpacked below `root`."""

    name: str
    suite: str
    version: str
    size_bytes: int
    sha256: str
    root: Path


def fetch_locked(lock: Lock, units: Iterable[Unit], source: Source, work: Path, say: Say) -> list[Unpacked]:
    """Fetch, check and unpack the locked packages of the units. Raises ToolchainError."""
    if lock.architecture != apt.architecture():
        raise ToolchainError(
            f"could not use the lock: it is for {lock.architecture}, this machine is {apt.architecture()}; "
            "install with --unlocked"
        )
    names = {unit.name for unit in units}
    wanted = [package for package in lock.packages if names.intersection(package.units)]
    archives: dict[LockedPackage, Path] = {}
    for package in wanted:
        cached = _cached(package, source.cache)
        if cached is not None:
            archives[package] = cached
    for suite_name in sorted({package.suite for package in wanted}):
        missing = [p for p in wanted if p.suite == suite_name and p not in archives]
        if missing:
            megabytes = sum(package.size_bytes for package in missing) / 1e6
            say(f"fetching {len(missing)} packages ({megabytes:.0f} MB) of {suite_name} from {source.mirror}")
            suite = apt.Suite(
                name=suite_name, path=work / suite_name, mirror=source.mirror, check_valid_until=False
            )
            archives.update(_download_locked(suite, missing, source.cache, work))
    say(f"unpacking {len(archives)} packages")
    return [
        Unpacked(
            name=package.name,
            suite=package.suite,
            version=package.version,
            size_bytes=package.size_bytes,
            sha256=package.sha256,
            root=_unpack(archive, work / "roots" / f"{package.suite}-{package.name}"),
        )
        for package, archive in archives.items()
    ]


def fetch_newest(
    units: Iterable[Unit], source: Source, work: Path, say: Say
) -> tuple[list[Unpacked], dict[str, str]]:
    """Fetch and unpack the newest packages of the units and all they depend on, as the index has them.

    Returns them and the date of each suite's index. Raises ToolchainError.
    """
    unpacked: list[Unpacked] = []
    dates: dict[str, str] = {}
    by_suite: dict[str, list[str]] = {}
    for unit in units:
        by_suite.setdefault(unit.suite, []).extend(unit.packages)
    for suite_name, names in sorted(by_suite.items()):
        say(f"fetching the newest packages of {suite_name} from {source.mirror}")
        suite = apt.Suite(
            name=suite_name,
            path=work / suite_name,
            mirror=source.mirror,
            check_valid_until=not source.accept_expired,
        )
        suite.prepare()
        dates[suite_name] = suite.date()
        folder = work / f"{suite_name}-packages"
        folder.mkdir()
        suite.download_closure(names, folder)
        for archive in sorted(folder.glob("*.deb")):
            name, version = _identity(archive)
            unpacked.append(
                Unpacked(
                    name=name,
                    suite=suite_name,
                    version=version,
                    size_bytes=archive.stat().st_size,
                    sha256=_sha256(archive),
                    root=_unpack(archive, work / "roots" / f"{suite_name}-{name}"),
                )
            )
    return unpacked, dates


def _cached(package: LockedPackage, cache: Path | None) -> Path | None:
    """The package from the cache; a file that is not what its name says is removed."""
    if cache is None:
        return None
    archive = cache / f"{package.sha256}.deb"
    if not archive.is_file():
        return None
    try:
        check(package, archive)
    except ToolchainError:
        archive.unlink()
        return None
    return archive


def _download_locked(
    suite: apt.Suite, packages: list[LockedPackage], cache: Path | None, work: Path
) -> dict[LockedPackage, Path]:
    suite.prepare()
    offered = suite.versions(package.name for package in packages)
    for package in packages:
        versions = offered.get(package.name, ())
        if package.version not in versions:
            got = "version " + " and ".join(versions) if versions else "no such package"
            raise mismatch(package, f"version {package.version}", got)
    folder = work / f"{suite.name}-packages"
    folder.mkdir()
    suite.download([(package.name, package.version) for package in packages], folder)
    by_identity = {_identity(archive): archive for archive in folder.glob("*.deb")}
    archives: dict[LockedPackage, Path] = {}
    for package in packages:
        archive = by_identity[(package.name, package.version)]
        check(package, archive)
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True)
            kept = cache / f"{package.sha256}.deb"
            partial = cache / f"{package.sha256}.{work.name}"
            shutil.copyfile(archive, partial)
            partial.rename(kept)
        archives[package] = archive
    return archives


def _identity(archive: Path) -> tuple[str, str]:
    done = subprocess.run(
        ["dpkg-deb", "--show", "--showformat=${Package}\n${Version}", archive],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ToolchainError(f"could not read the package '{archive.name}': {done.stderr.strip()}; try again")
    name, _, version = done.stdout.partition("\n")
    return name, version


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _unpack(archive: Path, root: Path) -> Path:
    root.mkdir(parents=True)
    done = subprocess.run(
        ["dpkg-deb", "--extract", archive, root], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ToolchainError(f"could not unpack '{archive.name}': {done.stderr.strip()}; is the disk full?")
    return root
