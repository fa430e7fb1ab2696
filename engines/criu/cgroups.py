"""A container's cgroups, v1 and v2: where they are, who is in them, freezing and thawing.

Imported by the guardian's undo, so only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from engines import mountinfo

Groups = dict[str, str]
"""Controller name ("" for cgroup v2) to cgroup directory."""

_POLL_S = 0.002

# Where a parent sleeps in the kernel after vfork, under the names it has had.
_VFORK_WAITS = frozenset({"kernel_clone", "wait_for_vfork_done", "_do_fork", "do_fork"})


def _mounts() -> dict[str, tuple[str, str]]:
    """Controller to (mount point, root of the mount within the hierarchy)."""
    found: dict[str, tuple[str, str]] = {}
    for mount in mountinfo.mounts():
        for controller in mount.super_options if mount.kind == "cgroup" else ():
            found.setdefault(controller, (mount.point, mount.root))
        if mount.kind == "cgroup2":
            found.setdefault("", (mount.point, mount.root))
    return found


def of_process(pid: int | str) -> Groups:
    """The cgroup directories a process is in. Raises OSError if the process is gone."""
    mounts = _mounts()
    found: Groups = {}
    for line in os.fsdecode(Path(f"/proc/{pid}/cgroup").read_bytes()).split("\n")[:-1]:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in mounts:
                point, root = mounts[controller]
                inner = path.removeprefix(root) if root != "/" else path
                found[controller] = point + inner.rstrip("/")
    return found


def of_container(root_path: Path, container_id: str, pid: int) -> Groups:
    """The cgroups of a container: as runc noted them, else those of its init.

    runc's note is better where it is there: init may have moved into a cgroup below.
    """
    return noted(root_path, container_id) or of_process(pid)


def noted(root_path: Path, container_id: str) -> Groups:
    """The cgroups of a container as runc noted them, empty if it did not."""
    try:
        state = json.loads((root_path / container_id / "state.json").read_text())
        paths = state["cgroup_paths"]
        if isinstance(paths, dict):
            return {str(name): str(path) for name, path in paths.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {}


def foreseen(cgroups_path: str, container_id: str) -> list[str]:
    """The cgroup directories that the runtime will make for a new container and that are not there yet.

    cgroups_path: from its spec; empty or relative means below our own. A path in systemd's form
    ("slice:prefix:name") gives none: systemd removes an empty scope itself.
    """
    if ":" in cgroups_path:
        return []
    if cgroups_path.startswith("/"):
        tops = [point for point, _ in _mounts().values()]
    else:
        tops = list(of_process("self").values())
    wanted = {f"{top}/{(cgroups_path or container_id).strip('/')}" for top in tops}
    return sorted(path for path in wanted if not Path(path).exists())


def strictly_own(groups: Groups) -> Groups:
    """Without those that this very process is in too, or that are a hierarchy's root.

    Whoever kills all tasks of a cgroup must know that the cgroup was made for them.
    """
    ours = of_process("self")
    roots = {point for point, _ in _mounts().values()}
    return {name: path for name, path in groups.items() if path != ours.get(name) and path not in roots}


def tasks(groups: Groups) -> list[int]:
    """All processes in these cgroups and below."""
    found: set[int] = set()
    for path in set(groups.values()):
        for directory, _, _ in os.walk(path):  # which minds none that vanishes meanwhile
            with contextlib.suppress(OSError):
                found.update(int(word) for word in Path(directory, "cgroup.procs").read_text().split())
    found.discard(0)
    return sorted(found)


def remove(paths: Iterable[str], *, timeout_s: float = 1.0) -> None:
    """Remove these cgroups and those below, as far as they are empty.

    timeout_s: how long to try again, since a task that has died stays in its cgroup for a moment.
    """
    deadline = time.monotonic() + timeout_s
    left = {path for path in paths if Path(path).is_dir()}
    while left:
        for path in left:
            for directory, _, _ in os.walk(path, topdown=False):
                with contextlib.suppress(OSError):
                    Path(directory).rmdir()
        left = {path for path in left if Path(path).is_dir()}
        if tasks({path: path for path in left}) or time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


def freezer(groups: Groups) -> Freezer | None:
    """The freezer of a container, None if it has no cgroup that can freeze."""
    for controller, name in (("freezer", "freezer.state"), ("", "cgroup.freeze")):
        path = groups.get(controller)
        if path and Path(path, name).exists():
            return Freezer(Path(path), v1=controller == "freezer")
    return None


class Freezer:
    """Freezes and thaws one cgroup."""

    def __init__(self, path: Path, *, v1: bool) -> None:
        self.path = path
        self.v1 = v1
        self.control = path / ("freezer.state" if v1 else "cgroup.freeze")
        self.thawed = "THAWED" if v1 else "0"

    def is_frozen(self) -> bool:
        """Whether it is frozen, or about to be; False if the cgroup is gone."""
        try:
            if self.v1:
                return self._read("freezer.state") != "THAWED"
            return self._read("cgroup.freeze") == "1"
        except OSError:
            return False

    def freeze(self, *, timeout_s: float) -> bool:
        """Freeze, and wait until nothing in it runs; False if that took longer than timeout_s."""
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                # On v1 a task that was about to exit can keep the cgroup in FREEZING until it is asked again.
                self._write("FROZEN" if self.v1 else "1")
                if self._settled():
                    return True
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_S)
        except OSError:
            return False

    def thaw(self) -> None:
        """Thaw. Nothing happens if the cgroup is gone."""
        with contextlib.suppress(OSError):
            self._write(self.thawed)

    def _settled(self) -> bool:
        if self.v1:
            return self._read("freezer.state") == "FROZEN"
        return "frozen 1" in self._read("cgroup.events")

    def _read(self, name: str) -> str:
        return (self.path / name).read_text().strip()

    def _write(self, value: str) -> None:
        self.control.write_text(value)


def in_vfork(pid: int) -> bool:
    """Whether a task waits for a vforked child to run its program; False where the kernel does not tell."""
    try:
        waits_in = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return False
    return waits_in in _VFORK_WAITS
