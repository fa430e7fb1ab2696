"""Where the tools are: in torpor's own prefix first, on the system's PATH otherwise."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

SYSTEM_DIRECTORIES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""Searched after PATH: services and plain users often lack the sbin directories."""

SYSTEM_CNI_DIRECTORIES = (Path("/opt/cni/bin"), Path("/usr/lib/cni"), Path("/usr/libexec/cni"))
SYSTEM_PYTHON_DIRECTORY = Path("/usr/lib/python3/dist-packages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools of this node; None where one was not found.

    prefix: torpor's own toolchain (it may be absent). cni_path: directory of the CNI plugins.
    python_path: directory that holds the `pycriu` package. search_path: a PATH with the prefix first; runc
    finds criu, and containerd its shim, by it.
    """

    prefix: Path
    search_path: str
    criu: Path | None
    runc: Path | None
    runsc: Path | None
    crun: Path | None
    containerd: Path | None
    containerd_shim: Path | None
    ctr: Path | None
    podman: Path | None
    conmon: Path | None
    checkpointctl: Path | None
    nft: Path | None
    ip: Path | None
    cni_path: Path | None
    python_path: Path | None


def default_prefix() -> Path:
    """TORPOR_PREFIX; else .toolchain of the checkout this runs from; else /opt/torpor/toolchain."""
    given = os.environ.get("TORPOR_PREFIX")
    if given:
        return Path(given).absolute()
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file() and (checkout / "run").is_file():
        return checkout / ".toolchain"
    return Path("/opt/torpor/toolchain")


def system_path() -> str:
    """PATH of this process, with the usual system directories added at the end, absolute entries only."""
    entries = [entry for entry in os.environ.get("PATH", "").split(":") if entry.startswith("/")]
    return ":".join(dict.fromkeys([*entries, *SYSTEM_DIRECTORIES]))


def search_path(prefix: Path) -> str:
    """The PATH under which the toolchain in `prefix` works."""
    return ":".join(dict.fromkeys([str(prefix / "bin"), *system_path().split(":")]))


def find_tools(prefix: Path | None = None) -> Tools:
    """Find every tool. prefix: torpor's toolchain, `default_prefix()` if None. Starts no program."""
    where = (prefix or default_prefix()).absolute()
    return _find(where, search_path(where))


def find_system_tools() -> Tools:
    """Find what the system itself has; PATH does not count, it may name another toolchain of torpor."""
    return _find(Path("/nonexistent"), ":".join(SYSTEM_DIRECTORIES))


def _find(where: Path, path: str) -> Tools:
    def find(name: str) -> Path | None:
        found = shutil.which(name, path=path)
        return Path(found) if found else None

    return Tools(
        prefix=where,
        search_path=path,
        criu=find("criu"),
        runc=find("runc"),
        runsc=find("runsc"),
        crun=find("crun"),
        containerd=find("containerd"),
        containerd_shim=find("containerd-shim-runc-v2"),
        ctr=find("ctr"),
        podman=find("podman"),
        conmon=find("conmon"),
        checkpointctl=find("checkpointctl"),
        nft=find("nft"),
        ip=find("ip"),
        cni_path=next((d for d in (where / "cni", *SYSTEM_CNI_DIRECTORIES) if (d / "bridge").exists()), None),
        python_path=next(
            (
                d
                for d in (where / "python", SYSTEM_PYTHON_DIRECTORY)
                if (d / "pycriu" / "__init__.py").exists()
            ),
            None,
        ),
    )
