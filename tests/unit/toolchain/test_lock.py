"""The lock: complete, and loud when something differs from it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from shim.toolchain import lock
from shim.toolchain.units import UNITS

PACKAGE = lock.LockedPackage(
    name="criu",
    suite="forky",
    version="4.2.1-1",
    size_bytes=4,
    sha256=hashlib.sha256(b"good").hexdigest(),
    units=("criu",),
)


def test_the_packaged_lock_covers_every_unit() -> None:
    packaged = lock.read()
    for unit in UNITS:
        names = {package.name for package in packaged.packages if unit.name in package.units}
        assert names.issuperset(unit.packages), unit.name
    assert all(len(package.sha256) == 64 for package in packaged.packages)
    assert lock.encode(packaged) == lock.PACKAGED_LOCK_PATH.read_bytes()


def test_the_locked_package_passes(tmp_path: Path) -> None:
    archive = tmp_path / "a.deb"
    archive.write_bytes(b"good")
    lock.check(PACKAGE, archive)


@pytest.mark.parametrize("data", [b"evil", b"shorter or longer"])
def test_a_mismatch_names_both_and_the_way_out(tmp_path: Path, data: bytes) -> None:
    archive = tmp_path / "a.deb"
    archive.write_bytes(data)
    with pytest.raises(lock.ToolchainError) as caught:
        lock.check(PACKAGE, archive)
    message = str(caught.value)
    assert "'criu'" in message
    assert "--unlocked" in message
    if len(data) == PACKAGE.size_bytes:
        assert PACKAGE.sha256 in message
        assert hashlib.sha256(data).hexdigest() in message
    else:
        assert f"{PACKAGE.size_bytes} bytes" in message
        assert f"{len(data)} bytes" in message


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 99}', '{"packages": []}', '{"schema": 1}'])
def test_a_lock_that_is_not_ours_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "toolchain.lock"
    path.write_text(text)
    with pytest.raises(lock.ToolchainError, match=r"could not read the lock .*toolchain\.lock"):
        lock.read(path)


def test_the_digest_tells_locks_apart() -> None:
    packaged = lock.read()
    other = replace(packaged, packages=(*packaged.packages[1:], PACKAGE))
    assert packaged.digest() != other.digest()
    assert packaged.digest() == lock.read().digest()
