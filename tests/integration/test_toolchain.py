"""The toolchain, installed for real into a fresh prefix, and every tool tried."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engines.api import Finding
from shim.toolchain import apt, lock, smoke
from shim.toolchain.find import find_tools
from shim.toolchain.install import RECORD_NAME, install, read_record
from shim.toolchain.packages import Source, fetch_locked
from shim.toolchain.units import BY_NAME, UNITS
from tests.support.containers import CHECKOUT, until

pytestmark = pytest.mark.engine

CACHE = CHECKOUT / "build" / "packages"
INSTALL = [sys.executable, "-m", "shim.cli.main", "toolchain", "install", "--private", "--cache", str(CACHE)]


def generations(prefix: Path) -> set[str]:
    return {path.name for path in (prefix / "generations").glob("*")}


def current(prefix: Path) -> str:
    return (prefix / "current").resolve().name


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.geteuid() != 0:
        pytest.skip("trying the tools needs root")
    path = tmp_path_factory.mktemp("toolchain") / "prefix"
    done = subprocess.run([*INSTALL, "--prefix", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def findings(prefix: Path) -> dict[str, Finding]:
    found = smoke.run(find_tools(prefix), UNITS)
    return {finding.rule.removeprefix("toolchain."): finding for finding in found}


@pytest.mark.parametrize("unit", [unit.name for unit in UNITS])
def test_every_tool_works(prefix: Path, findings: dict[str, Finding], unit: str) -> None:
    program = smoke.program_of(BY_NAME[unit], find_tools(prefix))
    assert program is not None
    assert program.is_relative_to(prefix)
    finding = findings[unit]
    if unit == "crun" and "hybrid" in finding.message:
        assert (finding.severity, bool(finding.remedy)) == ("warn", True)  # it says so, and refuses
        return
    assert finding.severity == "ok", finding


def test_doctor_is_content(prefix: Path) -> None:
    command = [sys.executable, "-m", "shim.cli.main", "doctor", "--json", "--prefix", prefix]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["obstacles"] == []
    assert report["ready"] is True
    assert done.returncode == 0


def test_a_second_installation_changes_nothing(prefix: Path) -> None:
    before = (current(prefix), (prefix / "current" / RECORD_NAME).stat().st_mtime_ns)
    said: list[str] = []
    done = install(
        prefix, Source(mirror="http://nowhere.invalid"), lock.read(), use_system=False, say=said.append
    )
    assert not done.changed
    assert said == []
    assert before == (current(prefix), (prefix / "current" / RECORD_NAME).stat().st_mtime_ns)


def test_foreign_libraries_do_not_get_in(prefix: Path) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": "/usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu"}
    for name in ("criu", "runc", "podman", "nft"):
        command = [prefix / "bin" / name, "--version"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def apart(prefix: Path, tmp_path: Path) -> Iterator[Path]:
    """A prefix of its own for what goes wrong; where the packages come from the cache."""
    yield tmp_path / "prefix"
    shutil.rmtree(tmp_path / "prefix", ignore_errors=True)


@pytest.mark.parametrize("moment", ["generations/*/bin", "generations/*/toolchain.lock"])
def test_killed_half_way_it_leaves_nothing_or_the_old(apart: Path, moment: str) -> None:
    with subprocess.Popen(
        [*INSTALL, "--prefix", apart], stderr=subprocess.DEVNULL, start_new_session=True
    ) as running:
        until(lambda: list(apart.glob(moment)), timeout_s=120, what=moment)
        os.killpg(running.pid, signal.SIGKILL)
    assert not (apart / "current").exists()
    assert read_record(apart) is None
    assert find_tools(apart).criu != apart / "bin" / "criu"


def test_after_a_kill_it_installs_and_keeps_the_last_for_those_that_still_run(prefix: Path) -> None:
    old = current(prefix)
    command = [*INSTALL, "--force", "--prefix", prefix]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as running:
        until(lambda: generations(prefix) - {old}, timeout_s=120)
        (killed,) = generations(prefix) - {old}
        os.killpg(running.pid, signal.SIGKILL)
    assert current(prefix) == old
    assert (
        subprocess.run([prefix / "bin/criu", "--version"], capture_output=True, check=False).returncode == 0
    )
    subprocess.run(command, capture_output=True, check=True)
    assert killed not in generations(prefix)
    assert generations(prefix) == {old, current(prefix)}
    assert current(prefix) != old
    assert not list(prefix.glob("work-*"))


def test_a_version_that_is_gone_is_named_with_what_there_is(apart: Path) -> None:
    locked = lock.read()
    packages = tuple(
        replace(p, version="0.0-1", sha256="0" * 64) if p.name == "criu" else p for p in locked.packages
    )
    source = Source(mirror=apt.system_mirror(), cache=CACHE)
    with pytest.raises(lock.ToolchainError) as caught:
        install(apart, source, replace(locked, packages=packages), use_system=False, say=lambda _: None)
    message = str(caught.value)
    real = next(p.version for p in locked.packages if p.name == "criu")
    assert "'criu'" in message
    assert "version 0.0-1" in message
    assert f"got version {real}" in message
    assert "--unlocked" in message
    assert generations(apart) == set()


def test_another_content_is_refused_with_both_hashes(apart: Path) -> None:
    locked = lock.read()
    real = next(p for p in locked.packages if p.name == "criu")
    packages = tuple(replace(p, sha256="1" * 64) if p.name == "criu" else p for p in locked.packages)
    source = Source(mirror=apt.system_mirror(), cache=CACHE)
    with pytest.raises(lock.ToolchainError, match=f"sha256 {'1' * 64}, got sha256 {real.sha256}"):
        install(apart, source, replace(locked, packages=packages), use_system=False, say=lambda _: None)
    assert not (CACHE / f"{'1' * 64}.deb").exists()


def test_a_spoilt_cache_is_not_believed(prefix: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    locked = lock.read()
    for package in locked.packages:
        if "runc" in package.units:
            shutil.copy(CACHE / f"{package.sha256}.deb", cache)
    package = next(p for p in locked.packages if p.name == "runc")
    kept = cache / f"{package.sha256}.deb"
    kept.write_bytes(b"\0" * package.size_bytes)
    source = Source(mirror=apt.system_mirror(), cache=cache)
    said: list[str] = []
    unpacked = fetch_locked(locked, [BY_NAME["runc"]], source, tmp_path, said.append)
    assert {p.name for p in unpacked} >= {"runc", "libc6"}
    assert any("fetching 1 packages" in line for line in said)
    lock.check(package, kept)
