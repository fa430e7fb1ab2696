"""Limits of the new container's control group, too tight or refused; and names that somebody else has."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.containers import PYTHON
from tests.truth import sources
from tests.truth.files import at
from tests.truth.mounts import entry
from tests.truth.node import resources
from tests.truth.place import World
from tests.truth.rights import linux, process
from tests.truth.scenario import Scenario, Source, as_it_is, counting


def _source(name: str, *before: str, **more: Any) -> Source:
    return Source(name=name, args=counting(*before), **more)


_IN_SHM = _source("in-shm", "f = open('/dev/shm/x', 'wb')", "f.write(b'z' * (40 << 20))", "f.flush()")
_SHARED = _source("shared", "import mmap", "m = mmap.mmap(-1, 40 << 20)", "m.write(b'z' * (40 << 20))")
_MEMFD = _source("memfd", "import os", "f = os.memfd_create('x')", "os.write(f, b'z' * (40 << 20))")
_GHOST = _source(
    *("ghost", "import os", "f = open('/dev/shm/g', 'wb')", "f.write(b'z' * (40 << 20))", "f.flush()"),
    "os.unlink('/dev/shm/g')",
)
_TIGHT = resources(memory={"limit": 30 << 20})


def _pids(limit: int) -> Callable[[World], object]:
    return resources(pids={"limit": limit})


# --- names -------------------------------------------------------------------------------------------------

_INET = "import socket; s = socket.socket()"


def _beside(text: str) -> Callable[[World], object]:
    """Somebody in the new container's network namespace runs this."""

    def change(world: World) -> None:
        network = world.network()
        words = ("ip", "netns", "exec", network.pod, PYTHON, "-IS", "-c")
        world.beside(*words, f"{text}; print(1, flush=True); input()")

    return change


_REUSING = _source(
    *("reuse", "import socket", "l = socket.socket()", "l.setsockopt(1, 15, 1)"),
    *("l.bind(('0.0.0.0', 7000))", "l.listen()"),
    network="joined",
)
_V6ONLY = _source(
    *("v6only", "import socket", "l = socket.socket(socket.AF_INET6)", "l.setsockopt(41, 26, 1)"),
    *("l.bind(('::', 7000))", "l.listen()"),
    network="joined",
)
_FREE = _source(
    *("freebind", "import socket", "l = socket.socket(socket.AF_INET6)", "l.setsockopt(0, 15, 1)"),
    *("l.bind(('fd00::2', 7000))", "l.listen()"),
    network="joined",
)
_ABSTRACT = _source(
    *("abstract", "import socket", "l = socket.socket(socket.AF_UNIX)", "l.bind('\\0torpor')", "l.listen()"),
    network="joined",
)
_ON_LINK = _source(
    *("on-link", "import socket", "l = socket.socket()", "l.setsockopt(1, 25, b'eth0')"),
    *("l.bind(('0.0.0.0', 7000))", "l.listen()"),
    network="joined",
)
_BOUND = _source(
    *("bound-only", "import socket", "l = socket.socket()", "l.bind(('10.77.0.2', 7000))"), network="joined"
)


def _same_network(world: World) -> None:
    world.network()


def _renamed(world: World) -> None:
    pod = world.network().pod
    for words in ("set eth0 down", "set eth0 name net1", "set net1 up"):
        subprocess.run(["ip", "-n", pod, "link", *words.split()], check=True)


# --- files -------------------------------------------------------------------------------------------------

_LEASE = _source(
    *("lease", "import fcntl", "open('/vol/lease', 'w').close()", "file = open('/vol/lease')"),
    "fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    edit=sources.with_volume,
)


def _written_by_another(world: World) -> None:
    path = f"{entry(world, '/vol')['source']}/lease"
    text = "import sys; f = open(sys.argv[1], 'a'); print(1, flush=True); input()"
    world.beside(sys.executable, "-IS", "-c", text, path)


def _immutable(world: World) -> None:
    path = world.rootfs / "data/log"
    subprocess.run(["chattr", "+i", path], check=True)
    world.closers.append(lambda: subprocess.run(["chattr", "-i", path], check=True))


def _file(path: Path) -> None:
    path.unlink()
    path.touch()


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _behind_link(target: str) -> Callable[[World], object]:
    def change(world: World) -> None:
        shutil.move(world.rootfs / "data", world.rootfs / "other")
        (world.rootfs / "data").symlink_to(target)

    return change


def _hosts_uts(world: World) -> None:
    sources.drop_namespace(world.spec, "uts")
    del world.spec["hostname"]


def _mount_cgroups(world: World) -> None:
    options = ["ro", "nosuid", "noexec", "nodev"]
    world.spec["mounts"].append(
        {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": options}
    )


def _map_ids(world: World) -> None:
    mapping = [{"containerID": 0, "hostID": 100000, "size": 65536}]
    entry(world, "/vol").update(uidMappings=mapping, gidMappings=mapping)


def _option(path: str, *options: str) -> Callable[[World], object]:
    def change(world: World) -> None:
        entry(world, path)["options"] = [*entry(world, path)["options"], *options]

    return change


def _of(name: str, source: Source, change: Callable[[World], object] = as_it_is) -> Scenario:
    return Scenario(kind="limits", name=name, source=source, change=change)


_PLAIN = sources.PLAIN
_ONE = _source("one")
_FUSE = {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229, "fileMode": 0o666}
SCENARIOS = (
    _of("40 MiB in /dev/shm, no limit", _IN_SHM),
    _of("40 MiB in /dev/shm, 30 MiB allowed", _IN_SHM, _TIGHT),
    _of("40 MiB of shared memory, 30 MiB allowed", _SHARED, _TIGHT),
    _of("a memfd of 40 MiB, 30 MiB allowed", _MEMFD, _TIGHT),
    _of("a deleted file of 40 MiB in /dev/shm, 30 MiB allowed", _GHOST, _TIGHT),
    _of("nine tasks, eleven allowed", sources.FAMILY, _pids(11)),
    _of("nine tasks, twelve allowed", sources.FAMILY, _pids(12)),
    _of("one task and four dead ones, seven allowed", sources.DEAD, _pids(7)),
    _of("one task and four dead ones, eight allowed", sources.DEAD, _pids(8)),
    _of("five tasks without four leaders, eleven allowed", sources.LEADERLESS, _pids(11)),
    _of("five tasks without four leaders, twelve allowed", sources.LEADERLESS, _pids(12)),
    _of("one task, five allowed", _ONE, _pids(5)),
    _of("one task, six allowed", _ONE, _pids(6)),
    _of("one task in a user namespace, six allowed", sources.USER_NAMESPACE, _pids(6)),
    _of("one task in a user namespace, seven allowed", sources.USER_NAMESPACE, _pids(7)),
    _of("a memory node that the node has not", _PLAIN, resources(cpu={"mems": "7"})),
    _of("processors that are no list", _PLAIN, resources(cpu={"cpus": "abc"})),
    _of("a processor quota of 1 µs", _PLAIN, resources(cpu={"quota": 1, "period": 100000})),
    _of("a processor period of 5 µs", _PLAIN, resources(cpu={"quota": 50000, "period": 5})),
    _of("less swap than memory", _PLAIN, resources(memory={"limit": 100 << 20, "swap": 50 << 20})),
    _of("huge pages of 3 MB", _PLAIN, resources(hugepageLimits=[{"pageSize": "3MB", "limit": 0}])),
    _of("huge pages of 2 MB", _PLAIN, resources(hugepageLimits=[{"pageSize": "2MB", "limit": 0}])),
    _of("unified limits", _PLAIN, resources(unified={"memory.max": "100000000"})),
    _of(
        "a limit of a device that is not there",
        _PLAIN,
        resources(blockIO={"throttleReadBpsDevice": [{"major": 250, "minor": 77, "rate": 1000}]}),
    ),
    _of(
        "a resource limit that nobody knows",
        _PLAIN,
        process(rlimits=[{"type": "RLIMIT_BOGUS", "hard": 1, "soft": 1}]),
    ),
    _of("the port bound by another", sources.JOINED, _beside(f"{_INET}; s.bind(('10.77.0.2', 7000))")),
    _of(
        "the port is that of another's connection",
        sources.JOINED,
        _beside(
            f"{_INET}; l = socket.create_server(('127.0.0.1', 5)); s.bind(('127.0.0.1', 7000)); "
            "s.connect(('127.0.0.1', 5))"
        ),
    ),
    _of(
        "a bound port, taken", _BOUND, _beside("import socket; s = socket.create_server(('10.77.0.2', 7000))")
    ),
    _of("a bound port, free", _BOUND, _same_network),
    _of(
        "both with SO_REUSEPORT",
        _REUSING,
        _beside(f"{_INET}; s.setsockopt(1, 15, 1); s.bind(('0.0.0.0', 7000)); s.listen()"),
    ),
    _of(
        "a listener of IPv6 only, another of IPv4",
        _V6ONLY,
        _beside("import socket; s = socket.create_server(('0.0.0.0', 7000))"),
    ),
    _of("a listener on an address that need not be there", _FREE, _same_network),
    _of("an abstract unix socket, free", _ABSTRACT, _same_network),
    _of(
        "an abstract unix socket, taken",
        _ABSTRACT,
        _beside("import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0torpor'); s.listen()"),
    ),
    _of("a socket on an interface that is there", _ON_LINK, _same_network),
    _of("a socket on an interface that is missing", _ON_LINK, _renamed),
    _of("a lease on a volume's file, free", _LEASE),
    _of("a lease on a volume's file that another writes to", _LEASE, _written_by_another),
    _of("an open file is immutable", sources.FILES, _immutable),
    _of("a file where a unix socket was", sources.UNIX_SOCKET, at("data/run/sock", _file)),
    _of("a directory where a unix socket was", sources.UNIX_SOCKET, at("data/run/sock", _directory)),
    _of("the files' directory behind a link", sources.FILES, _behind_link("other")),
    _of("the files' directory behind an absolute link", sources.FILES, _behind_link("/other")),
    _of("a volume whose ids are mapped", sources.VOLUME, _map_ids),
    _of("a volume with another propagation", sources.VOLUME, _option("/vol", "rshared")),
    _of("a tmpfs with another size", sources.TMPFS, _option("/scratch", "size=64k")),
    _of("another umask", _PLAIN, process(user={"uid": 0, "gid": 0, "umask": 0o77})),
    _of("another personality", _PLAIN, linux(personality={"domain": "LINUX32"})),
    _of("the root's mounts shared", _PLAIN, linux(rootfsPropagation="shared")),
    _of("a device that only the new spec has", _PLAIN, linux(devices=[_FUSE])),
    _of("the host's uts in place of its own", _PLAIN, _hosts_uts),
    _of("control groups mounted by the new spec only", _PLAIN, _mount_cgroups),
)
