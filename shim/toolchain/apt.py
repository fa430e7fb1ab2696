"""Packages of another Debian suite by apt's own machinery, without touching the system's apt.

apt checks the index with the distribution's keyring and every package with the index; it gets a state,
a cache and a source list of its own.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shim.toolchain.lock import ToolchainError

KEYRINGS = (
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
)
TIMEOUT_S = 1800


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One suite with an apt of its own below `path`.

    check_valid_until: refuse an index past its date. Only to be switched off where hashes are locked: then
    an old index cannot bring an old package.
    """

    name: str
    path: Path
    mirror: str
    check_valid_until: bool = True

    def prepare(self) -> None:
        """Write the private configuration and fetch the index. Raises ToolchainError."""
        for folder in ("lists/partial", "cache/archives/partial", "etc", "log"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        (self.path / "status").touch()
        options = f"signed-by={keyring()}"
        if not self.check_valid_until:
            options += " check-valid-until=no"
        (self.path / "etc/sources.list").write_text(f"deb [{options}] {self.mirror} {self.name} main\n")
        (self.path / "etc/auth.conf").touch()
        (self.path / "apt.conf").write_text(_configuration(self.path))
        self._run("apt-get", "update", "-qq")

    def versions(self, packages: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Versions that the suite offers of each package, newest first; no entry where it has none."""
        offered: dict[str, tuple[str, ...]] = {}
        for line in self._run("apt-cache", "madison", *packages).splitlines():
            columns = [column.strip() for column in line.split("|")]
            if len(columns) == 3:
                offered[columns[0]] = (*offered.get(columns[0], ()), columns[1])
        return offered

    def download(self, packages: Iterable[tuple[str, str]], into: Path) -> None:
        """Fetch exactly these (name, version) into a folder. Raises ToolchainError."""
        wanted = [f"{name}={version}" for name, version in packages]
        self._run("apt-get", "download", "-qq", *wanted, cwd=into)

    def download_closure(self, packages: Sequence[str], into: Path) -> None:
        """Fetch the newest of these packages and all they depend on. Raises ToolchainError."""
        self._run("apt-get", "install", "-y", "-qq", "--download-only", "--no-install-recommends", *packages)
        for archive in (self.path / "cache/archives").glob("*.deb"):
            shutil.move(archive, into / archive.name)

    def date(self) -> str:
        """Date of the index, as its signed header says."""
        for header in (self.path / "lists").glob("*_InRelease"):
            found = re.search(r"^Date: (.+)$", header.read_text(errors="replace"), re.MULTILINE)
            if found:
                return found[1]
        return "unknown"

    def _run(self, *command: str, cwd: Path | None = None) -> str:
        environment = {**os.environ, "APT_CONFIG": str(self.path / "apt.conf"), "LC_ALL": "C"}
        try:
            done = subprocess.run(
                command,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolchainError(f"could not run {command[0]} for suite {self.name}: {error}") from error
        # apt-get update exits 0 although an index could not be fetched or verified.
        failed = done.returncode != 0 or (command[1] == "update" and re.search(r"^[EW]: ", done.stderr, re.M))
        if failed:
            raise ToolchainError(
                f"could not fetch packages of {self.name} from {self.mirror}: {_complaint(done.stderr)}; "
                "check the network, or name another archive with --mirror"
            )
        return done.stdout


def _complaint(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.startswith(("E: ", "W: "))] or stderr.splitlines()
    return " ".join(lines[:2]) or "no reason given"


def _configuration(path: Path) -> str:
    settings = {
        "Dir::State": path,
        "Dir::State::Lists": path / "lists",
        "Dir::State::Status": path / "status",
        "Dir::State::extended_states": path / "extended_states",
        "Dir::Etc::sourcelist": path / "etc/sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::Cache": path / "cache",
        "Dir::Log": path / "log",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
        "Acquire::AllowInsecureRepositories": "false",
        "Acquire::AllowDowngradeToInsecureRepositories": "false",
        "APT::Get::AllowUnauthenticated": "false",
        "APT::Install-Recommends": "false",
        "APT::Architecture": architecture(),
        # The sandbox user could not read the private folders of a root-only prefix.
        "APT::Sandbox::User": "",
    }
    lines = [f'{key} "{value}";' for key, value in settings.items()]
    # Hooks of the system (snapshots, needrestart, apt-listchanges) have no business with a download.
    lines += ["#clear DPkg::Pre-Install-Pkgs;", "#clear APT::Update::Post-Invoke;"]
    lines += ["#clear APT::Update::Post-Invoke-Success;", "#clear APT::Update::Pre-Invoke;"]
    lines += ["#clear APT::Architectures;"]
    return "\n".join(lines) + "\n"


def architecture() -> str:
    """Debian's name of this machine's architecture."""
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def keyring() -> Path:
    """The distribution's keyring. Raises ToolchainError if there is none."""
    found = next((path for path in KEYRINGS if path.is_file()), None)
    if found is None:
        raise ToolchainError(
            f"could not find the keyring '{KEYRINGS[0]}', without which no package can be verified; "
            "install the package debian-archive-keyring"
        )
    return found


def missing_programs() -> list[str]:
    """Programs that the installation needs and this system lacks."""
    return [p for p in ("apt-get", "apt-cache", "dpkg-deb") if shutil.which(p) is None]


def system_mirror(etc: Path = Path("/etc/apt")) -> str:
    """The archive that the system itself uses: the first enabled source of Debian's main archive.

    Raises ToolchainError if there is none.
    """
    for source in sorted([etc / "sources.list", *(etc / "sources.list.d").glob("*")]):
        if not source.is_file():
            continue
        text = source.read_text(errors="replace")
        uris = _stanza_uris(text) if source.suffix == ".sources" else _line_uris(text)
        for uri in uris:
            # Debian's main archive ends in /debian; security updates and others end in something else.
            if uri.rstrip("/").endswith("/debian") and uri.startswith(("http://", "https://")):
                return uri.rstrip("/")
    raise ToolchainError(
        f"could not find the Debian archive of this system: no source below {etc} names one; give --mirror"
    )


def _stanza_uris(text: str) -> list[str]:
    uris: list[str] = []
    for stanza in re.split(r"\n\s*\n", text):
        fields = {
            key.lower(): value.strip()
            for key, _, value in (line.partition(":") for line in stanza.splitlines() if line[:1].isalpha())
        }
        if fields.get("enabled", "yes").lower() != "no" and "deb" in fields.get("types", "").split():
            uris += fields.get("uris", "").split()
    return uris


def _line_uris(text: str) -> list[str]:
    return re.findall(r"^\s*deb\s+(?:\[[^\]]*\]\s+)?(\S+)", text, re.MULTILINE)
