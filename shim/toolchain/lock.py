"""The lock: which packages, in which version, with which hash, the toolchain is made of."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shim.errors import ShimError

SCHEMA = 1
PACKAGED_LOCK_PATH = Path(__file__).with_name("toolchain.lock")


class ToolchainError(ShimError):
    """The toolchain cannot be installed, or is not what the lock says."""


@dataclass(frozen=True, kw_only=True)
class LockedPackage:
    """One Debian package. units: names of the units (see `units.UNITS`) that take files from it."""

    name: str
    suite: str
    version: str
    size_bytes: int
    sha256: str
    units: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Lock:
    """All packages for one architecture (Debian's name). dates: suite to the date of its index."""

    schema: int
    architecture: str
    dates: dict[str, str]
    packages: tuple[LockedPackage, ...]

    def digest(self) -> str:
        """Hash of the content: tells one lock from another."""
        return hashlib.sha256(encode(self)).hexdigest()


def encode(lock: Lock) -> bytes:
    """The lock as a file, the same bytes for the same content."""
    return msgspec.json.format(msgspec.json.encode(lock, order="sorted"), indent=1) + b"\n"


def read(path: Path = PACKAGED_LOCK_PATH) -> Lock:
    """Read a lock. Raises ToolchainError if it cannot be read or has another schema."""
    try:
        data = path.read_bytes()
        schema = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("schema", msgspec.Raw(b"null"))
        if bytes(schema) != str(SCHEMA).encode():
            raise ToolchainError(
                f"could not read the lock '{path}': its schema is {bytes(schema).decode()}, "
                f"this torpor knows {SCHEMA}; use the torpor that wrote it"
            )
        return msgspec.json.decode(data, type=Lock)
    except (OSError, msgspec.MsgspecError) as error:
        raise ToolchainError(f"could not read the lock '{path}': {error}; reinstall torpor") from error


def check(package: LockedPackage, archive: Path) -> None:
    """Compare a downloaded package with the lock. Raises ToolchainError naming what was wanted and got."""
    size = archive.stat().st_size
    if size != package.size_bytes:
        raise mismatch(package, f"{package.size_bytes} bytes", f"{size} bytes")
    with archive.open("rb") as stream:
        got = hashlib.file_digest(stream, "sha256").hexdigest()
    if got != package.sha256:
        raise mismatch(package, f"sha256 {package.sha256}", f"sha256 {got}")


def mismatch(package: LockedPackage, wanted: str, got: str) -> ToolchainError:
    """The error for a package that is not the locked one."""
    return ToolchainError(
        f"could not install package '{package.name}' of {package.suite}: the lock wants {wanted}, got {got}; "
        "name an archive that still has it with --mirror (a snapshot of the lock's date), "
        "or take what there is with --unlocked"
    )
