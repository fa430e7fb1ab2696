"""What is on this node: processes, mounts and cgroups, as the kernel tells."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from engines.mountinfo import mounts


def processes_in(*, cgroup: str = "", command: str = "", pids: Iterable[int] | None = None) -> list[int]:
    """Living processes whose cgroup or command line has these words in it, or those of `pids` that live.

    Zombies do not count: whoever is to reap them is not under test.
    """
    found: list[int] = []
    entries = [Path(f"/proc/{pid}") for pid in pids] if pids is not None else list(Path("/proc").iterdir())
    for entry in entries:
        if not entry.name.isdigit():
            continue
        try:
            if (entry / "stat").read_text(errors="replace").rpartition(") ")[2][:1] in "ZX":
                continue
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            groups = (entry / "cgroup").read_text(errors="surrogateescape")
        except OSError:
            continue
        if pids is not None or (cgroup and cgroup in groups) or (command and command in line):
            found.append(int(entry.name))
    return found


def mounts_below(path: Path) -> list[str]:
    """Mount points of this machine at or below a path."""
    points = [mount.point for mount in mounts()]
    return [point for point in points if point == str(path) or point.startswith(f"{path}/")]


def cgroup_directories(name: str) -> list[Path]:
    """Directories of this name (relative to the root) in every cgroup hierarchy."""
    text = Path("/proc/self/mounts").read_text(errors="surrogateescape")
    rows = [line.split() for line in text.splitlines()]
    tops = [Path(row[1]) for row in rows if row[2] in ("cgroup", "cgroup2")]
    return [path for top in tops if (path := top / name).is_dir()]
