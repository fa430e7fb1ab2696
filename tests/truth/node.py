"""The node gives less: memory, process ids, control groups, tools; or the image itself is damaged."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engines.criu.images import read_file, schema
from tests.support.containers import PREFIX
from tests.truth import sources
from tests.truth.place import World
from tests.truth.scenario import Scenario, Source, as_it_is
from tests.truth.tools import Release


def resources(**fields: Any) -> Callable[[World], object]:
    """Limits of the new container's control group."""

    def change(world: World) -> None:
        world.spec["linux"]["resources"] = {**world.spec["linux"].get("resources", {}), **fields}

    return change


def _memory(mebibytes: int) -> Callable[[World], object]:
    return resources(memory={"limit": mebibytes << 20})


def _other_cgroup(world: World) -> None:
    world.spec["linux"]["cgroupsPath"] = f"/tt-{world.place.lab.tag}/elsewhere/{world.container_id}"


def _cut(pattern: str) -> Callable[[World], object]:
    """A file of the image was cut short on its way."""

    def change(world: World) -> None:
        for path in world.own_image().glob(pattern):
            os.truncate(path, path.stat().st_size // 2)

    return change


def _lost(pattern: str) -> Callable[[World], object]:
    def change(world: World) -> None:
        for path in world.own_image().glob(pattern):
            path.unlink()

    return change


def _with(release: Release, *, afar: bool = False) -> Callable[[World], object]:
    """The node has other tools. afar: torpor is asked elsewhere."""

    def change(world: World) -> None:
        world.tools, world.afar = release, afar

    return change


def _of_arm(world: World) -> None:
    """The image says that it was made on another architecture, which is all that CRIU goes by."""
    types = schema(PREFIX / "python")
    for path in world.own_image().glob("core-*.img"):
        (core,) = read_file(path, "CORE", types)
        core.mtype = core.AARCH64
        data = core.SerializeToString()
        path.write_bytes(path.read_bytes()[:8] + struct.pack("<I", len(data)) + data)
    assert world.host
    world.host = replace(world.host, arch="aarch64", cpu_flags=("asimd", "fp"))


def _full_disk(world: World) -> None:
    """The root file system is small, and the image unpacks more into it."""
    kept = world.bundle_path / "kept"
    world.rootfs.rename(kept)
    world.rootfs.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", world.rootfs]
    subprocess.run(mounting, check=True)
    world.closers.append(lambda: subprocess.run(["umount", "--lazy", world.rootfs], check=True))
    subprocess.run(["cp", "-a", f"{kept}/.", world.rootfs], check=True)
    world.unpack = world.bundle_path / "changes.tar"
    with tarfile.open(world.unpack, "w") as tar:
        member = tarfile.TarInfo("data/large")
        member.size = 8 << 20
        tar.addfile(member, io.BytesIO(os.urandom(member.size)))


_THREAD = """
import sys, threading
def look():
    if threading.get_native_id() == int(sys.argv[1]):
        print(1, flush=True)
        sys.stdin.read()
thread = None
while not (thread and thread.is_alive()):
    with open('/proc/sys/kernel/ns_last_pid', 'w') as last:
        last.write(str(int(sys.argv[1]) - 1))
    thread = threading.Thread(target=look)
    thread.start()
    thread.join(0.01)
"""


def _thread_with(world: World) -> None:
    """Somebody's thread has a process id of the image: that of a dead task if there is one."""
    needs = world.dumped.needs
    (pid,) = needs.dead_pids or [needs.tasks[0].pid]
    world.beside(sys.executable, "-IS", "-c", _THREAD, str(pid))


def _other_image(world: World) -> None:
    """The new container has another image, in which nothing differs that is open."""
    world.spec["annotations"] |= sources.crio_image("example.org/app@sha256:" + "2" * 64)
    (world.rootfs / "etc/release").write_text("2\n")


def _of(
    name: str, source: Source, change: Callable[[World], object] = as_it_is, *, short: bool = False
) -> Scenario:
    return Scenario(kind="node", name=name, source=source, change=change, short=short)


SCENARIOS = (
    _of("made by CRIU 4.1, restored by a later one", sources.OF_OLD_CRIU),
    _of("made and restored by CRIU 4.1", sources.OF_OLD_CRIU, _with("criu-4.1")),
    _of("restored by CRIU 4.1, made by a later one", sources.PLAIN, _with("criu-4.1")),
    _of("a CRIU too old for the kernel", sources.PLAIN, _with("criu-3.17")),
    _of("no CRIU", sources.PLAIN, _with("no-criu")),
    _of("no CRIU, asked from afar", sources.PLAIN, _with("no-criu", afar=True)),
    _of("the same tools, asked from afar", sources.PLAIN, _with("", afar=True)),
    _of("an older runsc", sources.SANDBOX, _with("runsc-2022")),
    _of("an older runsc, asked from afar", sources.SANDBOX, _with("runsc-2022", afar=True)),
    _of("an image of another architecture", sources.PLAIN, _of_arm),
    _of("a disk too full for what the image changed", sources.PLAIN, _full_disk),
    _of("a tunnel", sources.TUNNEL),
    _of("another container image, nothing open differs", sources.NAMED_IMAGE, _other_image),
    _of("restored through an older runc", sources.PLAIN, _with("runc-1.1")),
    _of("its source lives on beside it", sources.ALIVE),
    _of("another control group", sources.PLAIN, _other_cgroup),
    _of("memory enough", sources.LARGE, _memory(256)),
    _of("memory for a quarter of the image", sources.LARGE, _memory(16)),
    _of("process ids enough", sources.FAMILY, resources(pids={"limit": 100})),
    _of("process ids for half of the tasks", sources.FAMILY, resources(pids={"limit": 4})),
    _of("a processor that the node has not", sources.PLAIN, resources(cpu={"cpus": "512"})),
    _of("the host's process ids, free", sources.HOST_PIDS),
    _of("the host's process ids, taken", sources.HOST_PIDS_ALIVE),
    _of("the host's process ids, one taken by a thread", sources.HOST_PIDS, _thread_with),
    _of("the host's process ids, a dead one's taken", sources.DEAD_HOST_PIDS, _thread_with),
    _of("an image without its inventory", sources.PLAIN, _lost("inventory.img")),
    _of("an image with half a list of tasks", sources.PLAIN, _cut("pstree.img")),
    _of("an image without a task", sources.PLAIN, _lost("core-1.img")),
)
