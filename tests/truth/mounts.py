"""The new container has other mounts."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Any

from tests.support.containers import bind
from tests.truth import sources
from tests.truth.place import World
from tests.truth.scenario import Scenario, Source, as_it_is


def entry(world: World, path: str) -> dict[str, Any]:
    """The mount of a spec on this path."""
    return next(mount for mount in world.spec["mounts"] if mount["destination"] == path)


def drop(path: str) -> Callable[[World], object]:
    """The spec has no mount on this path."""
    return lambda world: world.spec["mounts"].remove(entry(world, path))


def _add_bind(world: World) -> None:
    (world.bundle_path / "extra").mkdir()
    world.spec["mounts"].append(bind(world.bundle_path / "extra", "/data", writable=True))


def _add_tmpfs(world: World) -> None:
    world.spec["mounts"].append(sources.tmpfs("/data"))


def _bind_over_tmpfs(world: World) -> None:
    (world.bundle_path / "extra").mkdir()
    drop("/scratch")(world)
    world.spec["mounts"].append(bind(world.bundle_path / "extra", "/scratch", writable=True))


def _elsewhere(world: World) -> None:
    """The same volume, copied to another place of the node."""
    mount = entry(world, "/vol")
    copy = world.bundle_path / "volume"
    shutil.copytree(mount["source"], copy)
    mount["source"] = str(copy)


def other_content(world: World) -> None:
    """Another volume, in which the open file is missing."""
    _elsewhere(world)
    (world.bundle_path / "volume/state").unlink()


def grown(world: World) -> None:
    """Another volume, in which the open file is longer."""
    _elsewhere(world)
    (world.bundle_path / "volume/state").write_text("longer than it was")


def _no_source(path: str) -> Callable[[World], object]:
    def change(world: World) -> None:
        entry(world, path)["source"] = str(world.bundle_path / "nowhere")

    return change


def _read_only(path: str) -> Callable[[World], object]:
    def change(world: World) -> None:
        options = entry(world, path)["options"]
        entry(world, path)["options"] = [word for word in options if word != "rw"] + ["ro"]

    return change


def _writable(world: World) -> None:
    mount = entry(world, "/etc/hosts")
    mount["options"] = [word for word in mount["options"] if word != "ro"] + ["rw"]


def _directory_for_file(world: World) -> None:
    (world.bundle_path / "hosts").mkdir()
    entry(world, "/etc/hosts")["source"] = str(world.bundle_path / "hosts")


def _other_file(world: World) -> None:
    (world.bundle_path / "hosts").write_text("10.0.0.1 other\n")
    entry(world, "/etc/hosts")["source"] = str(world.bundle_path / "hosts")


def _in_another_order(world: World) -> None:
    world.spec["mounts"][-3:] = world.spec["mounts"][-3:][::-1]


def _moved(world: World) -> None:
    (world.rootfs / "other").mkdir()
    entry(world, "/vol")["destination"] = "/other"


def _lock_taken(world: World) -> None:
    path = f"{entry(world, '/vol')['source']}/lock"
    lock = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX)"
    text = f"{lock}; print(1, flush=True); input()"
    world.beside(sys.executable, "-IS", "-c", text, path)


def _relative_groups(world: World) -> None:
    """Below the control groups of whoever makes the container."""
    world.spec["linux"]["cgroupsPath"] = world.spec["linux"]["cgroupsPath"].lstrip("/")


def _of(
    name: str, source: Source, change: Callable[[World], object] = as_it_is, *, short: bool = False
) -> Scenario:
    return Scenario(kind="mounts", name=name, source=source, change=change, short=short)


SCENARIOS = (
    _of("a volume as it was", sources.VOLUME),
    _of("the same volume at another place of the node", sources.VOLUME, _elsewhere),
    _of("mounts in another order", sources.VOLUME, _in_another_order),
    _of("a volume that the new spec lacks", sources.VOLUME, drop("/vol"), short=True),
    _of("a volume without the open file", sources.VOLUME, other_content),
    _of("a volume in which the open file has grown", sources.VOLUME, grown),
    _of("a volume whose source is missing", sources.VOLUME, _no_source("/vol")),
    _of("a volume at another path in the container", sources.VOLUME, _moved),
    _of("a volume that is now read-only", sources.VOLUME, _read_only("/vol")),
    _of("a bound file with another content", sources.BOUND_FILE, _other_file),
    _of("a bound file that is now a directory", sources.BOUND_FILE, _directory_for_file),
    _of("a bound file whose source is missing", sources.BOUND_FILE, _no_source("/etc/hosts")),
    _of("a read-only bind that the new spec has writable", sources.BOUND_FILE, _writable),
    _of("a bind that only the new spec has", sources.PLAIN, _add_bind, short=True),
    _of("a tmpfs that only the new spec has", sources.PLAIN, _add_tmpfs),
    _of("a tmpfs with an open file, as it was", sources.TMPFS),
    _of("a tmpfs that the new spec lacks", sources.TMPFS, drop("/scratch")),
    _of("a bind in place of a tmpfs", sources.TMPFS, _bind_over_tmpfs),
    _of("a tmpfs mounted by the program itself", sources.MOUNTED_INSIDE),
    _of(
        "the place of a mount of the program's own is missing",
        sources.MOUNTED_INSIDE,
        lambda world: (world.rootfs / "data/inside").rmdir(),
    ),
    _of("control groups mounted, as they were", sources.CGROUPS),
    _of("control groups mounted, writable", sources.CGROUPS_WRITABLE),
    _of("control groups mounted, a relative path", sources.CGROUPS_WRITABLE, _relative_groups),
    _of("control groups mounted, one of their files open", sources.CGROUPS_OPEN),
    _of("control groups mounted, a user namespace", sources.CGROUPS_MAPPED),
    _of("a lock on a volume's file, free", sources.LOCK),
    _of("a lock on a volume's file that another has", sources.LOCK, _lock_taken),
)
