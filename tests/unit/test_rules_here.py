"""Rules of the verdict that look at this very machine: ports, process ids, files, mounts, locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compat import verdict
from compat.rules import limits
from engines.api import AbstractNeed, FileNeed, LockNeed, MountNeed, Needs, SocketNeed
from tests.support.verdicts import SPEC, At, has, image, named, new, node, task


def test_ports(tmp_path: Path):
    host = new(linux={"namespaces": [{"type": "pid"}]})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        def found(address: str, **more: Any) -> list[str]:
            need = SocketNeed(
                family="inet",
                protocol=more.get("protocol", "tcp"),
                state="listen",
                address=address,
                port=port,
            )
            needs = image(sockets=(need,), namespaces={"network": "host"})
            return named(At(needs, spec=host, local=True).found(), "place.ports")

        assert found("127.0.0.1") == found("0.0.0.0") == ["refuse"]
        assert found("127.0.0.2") == found("127.0.0.1", protocol="udp") == []
    assert found("127.0.0.1") == []
    need = SocketNeed(family="inet", protocol="tcp", state="listen", address="0.0.0.0", port=1)
    needs = image(sockets=(need,), namespaces={"network": "external"})
    (tmp_path / "none").touch()
    for name, rule, severity in (("none", "place.ports", "unknown"), ("gone", "spec.namespaces", "refuse")):
        joined = {"type": "network", "path": str(tmp_path / name)}
        spec = new(linux={"namespaces": [{"type": "pid"}, joined]})
        findings = At(needs, spec=spec, local=True).found()
        assert [(one.rule, one.severity) for one in findings] == [(rule, severity)]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("0", []), ("0-0", []), ("", []), ("0,60000", ["refuse"]), ("0-60000", ["refuse"]), ("x", ["refuse"])],
)
def test_processors(wanted: str, found: list[str]):
    spec = new(linux={"resources": {"cpu": {"cpus": wanted}}})
    assert named(At(spec=spec, local=True).found(), "place.cpus") == found


@pytest.mark.parametrize(("wanted", "found"), [("0", []), ("60000", ["refuse"]), ("0-", ["refuse"])])
def test_memory_nodes(wanted: str, found: list[str]):
    spec = new(linux={"resources": {"cpu": {"mems": wanted}}})
    assert named(At(spec=spec, local=True).found(), "place.cpus") == found


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"cpu": {"quota": 999, "period": 100000}}, "quota of 999"),
        ({"cpu": {"quota": 1000, "period": 100000}}, ""),
        ({"cpu": {"quota": -1, "period": 999}}, "period of 999"),
        ({"cpu": {"period": 1000001}}, "period of 1000001"),
        ({"memory": {"limit": 2 << 20, "swap": 1 << 20}}, "less memory with swap (1 MiB)"),
        ({"memory": {"limit": 2 << 20, "swap": -1}}, ""),
        ({"memory": {"limit": 2 << 20, "swap": 2 << 20}}, ""),
        ({"unified": {"memory.max": "1"}}, "unified limits on cgroup hybrid"),
        ({"hugepageLimits": [{"pageSize": "3MB"}]}, "huge pages of 3MB"),
        ({"hugepageLimits": [{"pageSize": "huge"}]}, "huge pages of huge"),
        ({"hugepageLimits": [{"pageSize": "2MB"}]}, ""),
        ({"hugepageLimits": []}, ""),
        ({"blockIO": {"throttleWriteIOPSDevice": [{"major": 4095, "minor": 7}]}}, "block device 4095:7"),
        ({"blockIO": {"weight": 100}}, ""),
    ],
)
def test_limits_that_are_refused(
    resources: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "groups").write_text("1:hugetlb:/\n")
    (tmp_path / "hugepages-2048kB").mkdir()
    monkeypatch.setattr(limits, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(limits, "_HUGE", tmp_path)
    spec = new(linux={"resources": resources})
    needs = replace(image(), memory_bytes=0)
    found = At(needs, node(cgroup_mode="hybrid"), spec=spec, local=True).found()
    assert named(found, "spec.limits") == (["refuse"] if said else [])
    assert said in "".join(one.message for one in found)
    assert (
        At(needs, spec=new(linux={"resources": {"unified": {"memory.max": "1"}}}), local=True).found() == ()
    )


def test_limits_of_huge_pages_without_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = new(linux={"resources": {"hugepageLimits": [{"pageSize": "2MB"}]}})
    (tmp_path / "groups").write_text("1:memory:/\n")
    monkeypatch.setattr(limits, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(limits, "_UNIFIED", tmp_path / "none")
    assert named(At(spec=spec, local=True).found(), "spec.limits") == ["refuse"]
    (tmp_path / "none").write_text("memory hugetlb\n")
    monkeypatch.setattr(limits, "_HUGE", tmp_path / "absent")
    assert At(spec=spec, local=True).found() == ()


def test_resource_limits_that_nobody_knows():
    for name, found in (("RLIMIT_BOGUS", ["refuse"]), ("RLIMIT_NOFILE", [])):
        spec = new(process={"rlimits": [{"type": name, "soft": 1, "hard": 1}]})
        assert named(At(spec=spec, local=True).found(), "spec.limits") == found


def of_the_host(**more: Any) -> At:
    """An image that lived in the host's network, and so shall the new container."""
    spec = new(linux={"namespaces": [{"type": "pid"}]})
    return At(image(namespaces={"network": "host"}, **more), spec=spec, local=True)


def test_a_port_is_taken_as_the_kernel_sees_it():
    def found(port: int, state: str = "closed", **more: Any) -> list[str]:
        values: dict[str, Any] = {
            "family": "inet",
            "protocol": "tcp",
            "state": state,
            "address": "127.0.0.1",
            "port": port,
        }
        return named(of_the_host(sockets=(SocketNeed(**(values | more)),)).found(), "place.ports")

    with socket.socket() as bound, socket.create_server(("0.0.0.0", 0)) as server:
        bound.bind(("127.0.0.1", 0))
        port, other = bound.getsockname()[1], server.getsockname()[1]
        assert found(port) == found(port, "listen") == ["refuse"]
        assert found(port, "established") == [], "a connection has its port beside its neighbours"
        assert found(other, family="inet6", address="::") == ["refuse"]
        assert found(other, family="inet6", address="::", v6only=True) == []
        assert found(other, address="192.0.2.1", freebind=True) == ["refuse"]
        assert found(port, address="192.0.2.1", freebind=True) == []
    with socket.socket() as sharing:
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sharing.bind(("127.0.0.1", 0))
        sharing.listen()
        assert found(sharing.getsockname()[1], "listen") == []


def test_abstract_names_and_interfaces():
    name = f"torpor-test-{os.getpid()}"
    need = AbstractNeed(name=name.encode().hex(), kind="stream")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0{name}")
        assert named(of_the_host(abstract=(need,)).found(), "place.names") == ["refuse"]
        assert of_the_host(abstract=(replace(need, kind="datagram"),)).found() == ()
    assert of_the_host(abstract=(need,)).found() == ()
    for interface, found in (("lo", []), ("nowhere0", ["refuse"])):
        bound = SocketNeed(family="inet", protocol="tcp", state="established", address="127.0.0.1", port=1,
                           interface=interface)  # fmt: skip
        assert named(of_the_host(sockets=(bound,)).found(), "place.interface") == found


def test_process_ids(tmp_path: Path):
    def found(pid: int, path: str | None) -> list[str]:
        entry = {"type": "pid", "path": path} if path else {"type": "network"}
        spec = new(linux={"namespaces": [{"type": "network"}, entry]})
        return named(At(task(pid=pid), spec=spec, local=True).found(), "place.pids")

    mine = f"/proc/{os.getpid()}/ns/pid"
    assert found(os.getpid(), None) == ["refuse"]
    assert found(os.getpid(), mine) == ["refuse"]
    assert found(4194303, None) == []
    (tmp_path / "file").touch()
    assert found(1, str(tmp_path / "file" / "beneath")) == ["unknown"]
    own = At(task(pid=os.getpid()), spec=SPEC, local=True).found()
    assert named(own, "place.pids") == []
    spec = new(linux={"namespaces": [{"type": "network"}]})
    dead = At(replace(task(pid=4194303), dead_pids=(os.getpid(),)), spec=spec, local=True).found()
    assert named(dead, "place.pids") == ["refuse"]


# Numbers that no process has: of a thread, of a group without its first process, of a namespace below.
_TAKES = """
import ctypes, os, threading
def stay():
    os.read(0, 1)
    os._exit(0)
leader = os.fork()
if not leader:
    os.setsid()
    os.fork() or stay()
    os._exit(0)
os.waitpid(leader, 0)
thread = threading.Thread(target=stay)
thread.start()
assert ctypes.CDLL(None).unshare(0x20000000) == 0
below = os.fork() or stay()
print(thread.native_id, leader, below, flush=True)
stay()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes PID namespaces")
@pytest.mark.parametrize("before", [(), ("unshare", "--pid", "--fork")])
def test_process_ids_that_no_process_has(before: tuple[str, ...]):
    words = [*before, sys.executable, "-IS", "-c", _TAKES]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        taken = [int(number) for number in process.stdout.readline().split()]
        kind = "pid_for_children" if before else "pid"
        path = f"/proc/{process.pid if before else os.getpid()}/ns/{kind}"
        spec = new(linux={"namespaces": [{"type": "network"}, {"type": "pid", "path": path}]})

        def found(pid: int) -> list[str]:
            return named(At(task(pid=pid), spec=spec, local=True).found(), "place.pids")

        assert len(taken) == 3
        assert [found(pid) for pid in (*taken, 4194303)] == [["refuse"]] * 3 + [[]]


def test_files_are_looked_at_here_only(tmp_path: Path):
    entry = {"destination": "/vol", "type": "bind", "source": str(tmp_path), "options": ["bind"]}
    needs = replace(has("/vol", external=True), files=(FileNeed(path="/vol/log", size_bytes=1, mode=-1),))
    spec = new(mounts=[entry])
    assert named(At(needs, spec=spec, local=True).found(), "files.missing") == ["refuse"]
    assert named(At(needs, spec=spec).found(), "files.missing") == []


HERE: tuple[tuple[str, str, str, str], ...] = (
    ("directory", "working-directory", "work in", ""),
    ("directory", "open", "open", ""),
    ("directory", "socket", "unix socket in", ""),
    ("any", "watched", "watch", ""),
    ("fifo", "open", "open", "fifo"),
)


@pytest.mark.parametrize(("kind", "use", "words", "made"), HERE)
def test_what_tasks_hold_beside_files(tmp_path: Path, kind: Any, use: Any, words: str, made: str):
    entry = {"destination": "/vol", "type": "bind", "source": str(tmp_path), "options": ["bind"]}
    need = FileNeed(path="/vol/here", size_bytes=-1, mode=0o711, kind=kind, use=use)
    case = At(replace(has("/vol", external=True), files=(need,)), spec=new(mounts=[entry]), local=True)
    missing = case.found()
    assert named(missing, "files.missing") == ["refuse"]
    assert words in missing[0].message
    here = tmp_path / "here"
    here.touch()
    assert named(case.found(), "files.missing") == ([] if kind == "any" else ["refuse"])
    here.unlink()
    os.mkfifo(here) if made else here.mkdir()
    here.chmod(0o711)
    assert case.found() == ()
    here.chmod(0o700)
    assert named(case.found(), "files.mode") == ["refuse"]


def test_of_gvisor_files_of_the_root_are_looked_at_at_once(tmp_path: Path):
    need = FileNeed(path="/data/table", size_bytes=-1, mode=-1)
    needs = image(engine="gvisor", image_version="20240729.0", files=(need,))
    root = tmp_path / "root"

    def found() -> list[str]:
        return named(At(needs, spec=SPEC, local=True, rootfs_path=root).found(), "files.missing")

    assert found() == []
    root.mkdir()
    assert found() == [], "it is not mounted yet"
    (root / "data").mkdir()
    assert found() == ["refuse"]
    (root / "data/table").touch()
    assert found() == []
    assert named(At(replace(needs, engine="criu"), spec=SPEC, local=True, rootfs_path=root).found(),
                 "files.missing") == []  # fmt: skip


def test_the_place_of_a_mount(tmp_path: Path):
    root, volume = tmp_path / "root", tmp_path / "vol"
    (root / "run").mkdir(parents=True)
    volume.mkdir()
    paths = ("/run/inside", "/vol/inside", "/run/own/inside", "/run/own", "/made")
    needs = image(mounts=(MountNeed(destination="/", fstype="overlay", source="", external=True),
                          MountNeed(destination="/vol", fstype="other", source="", external=True),
                          *(MountNeed(destination=path, fstype="tmpfs", source="", external=False)
                            for path in paths)))  # fmt: skip
    mounts = [
        {"destination": "/vol", "type": "bind", "source": str(volume), "options": ["bind"]},
        {"destination": "/made", "type": "tmpfs", "source": "tmpfs", "options": []},
    ]
    spec = new(mounts=mounts)

    def missing(*, complete: bool) -> list[str]:
        if complete:
            found = verdict.judge_files(needs, spec, root)
        else:
            found = At(needs, spec=spec, local=True, rootfs_path=root).found()
        return [one.message.split("'")[1] for one in found if one.rule == "mounts.place"]

    assert missing(complete=False) == ["/vol/inside"], "the image's changes are not in the root file system"
    assert missing(complete=True) == ["/run/inside", "/vol/inside", "/run/own"]
    for path in (root / "run/inside", volume / "inside", root / "run/own"):
        path.mkdir()
    assert missing(complete=True) == missing(complete=False) == []


@pytest.mark.parametrize(
    ("kind", "exclusive", "first", "last", "barred"),
    [
        ("flock", True, 0, None, "flock"),
        ("flock", False, 0, None, ""),
        ("range", True, 0, None, "range"),
        ("range", False, 10, 19, "range"),
        ("range", True, 0, 9, ""),
        ("range", True, 20, None, ""),
    ],
)
def test_locks(tmp_path: Path, kind: Any, exclusive: bool, first: int, last: int | None, barred: str):
    """Somebody has a shared lock on the file, or an exclusive one on bytes 10 to 19."""
    entry = {"destination": "/vol", "type": "bind", "source": str(tmp_path), "options": ["bind"]}
    lock = LockNeed(path="/vol/lock", kind=kind, exclusive=exclusive, first=first, last=last)
    case = At(replace(has("/vol", external=True), locks=(lock,)), spec=new(mounts=[entry]), local=True)
    assert case.found() == (), "where there is no file, another rule says so"
    with (tmp_path / "lock").open("w") as file:
        assert case.found() == ()
        fcntl.flock(file, fcntl.LOCK_SH)
        assert named(case.found(), "files.locked") == (["refuse"] if barred == "flock" else [])
        fcntl.flock(file, fcntl.LOCK_UN)
        fcntl.lockf(file, fcntl.LOCK_EX, 10, 10)
        found = case.found()
        assert named(found, "files.locked") == (["refuse"] if barred == "range" else [])
        assert not found or str(os.getpid()) in found[0].message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_what_the_root_of_a_user_namespace_may_not_enter(tmp_path: Path):
    closed = tmp_path / "closed"
    (closed / "volume").mkdir(parents=True)
    for path in (tmp_path, *tmp_path.parents[:-2]):
        path.chmod(path.stat().st_mode | 0o001)
    mapping = [{"containerID": 0, "hostID": 100000, "size": 65536}]
    entry = {"destination": "/v", "type": "bind", "source": str(closed / "volume"), "options": ["bind"]}
    spec = new(mounts=[entry], linux={"uidMappings": mapping, "gidMappings": mapping})
    needs = replace(has("/v", external=True), namespaces={"network": "own", "pid": "own", "user": "own"})

    def found(needs: Needs = needs) -> list[str]:
        return named(At(needs, spec=spec, local=True).found(), "mounts.reach")

    assert found() == []
    closed.chmod(0o700)
    assert found() == ["refuse"]
    assert found(replace(needs, namespaces={"network": "own", "pid": "own"})) == [], "root enters everything"
    os.chown(closed, 100000, 0)
    assert found() == [], "it is its own"
    os.chown(closed, 100001, 100001)
    assert found() == [], "it rules over its users' directories"
    os.chown(closed, 0, 100000)
    assert found() == ["refuse"]
    closed.chmod(0o710)
    assert found() == []


def in_volume(tmp_path: Path, **more: Any) -> At:
    entry = {"destination": "/vol", "type": "bind", "source": str(tmp_path), "options": ["bind"]}
    return At(replace(has("/vol", external=True), **more), spec=new(mounts=[entry]), local=True)


def test_a_lease_that_another_keeps_from_being_given(tmp_path: Path):
    path = tmp_path / "lease"
    path.touch()
    reading = LockNeed(path="/vol/lease", kind="lease", exclusive=False)
    writing = replace(reading, exclusive=True)

    def found(need: LockNeed) -> list[str]:
        return named(in_volume(tmp_path, locks=(need,)).found(), "files.locked")

    assert found(reading) == found(writing) == []
    with path.open():
        assert (found(reading), found(writing)) == ([], ["refuse"])
    with path.open("a"):
        assert found(reading) == found(writing) == ["refuse"]


def test_nothing_is_looked_at_that_the_container_does_not_have(tmp_path: Path):
    """Neither `..` nor a link leads out of a volume: no size is told, and no lease taken."""
    volume, outside = tmp_path / "volume", tmp_path / "outside"
    for folder in (volume, outside):
        folder.mkdir()
    (outside / "secret").write_text("123")
    (volume / "relative").symlink_to("../outside")
    (volume / "absolute").symlink_to(outside)
    (volume / "link").symlink_to(outside / "secret")
    ways = ("../outside/secret", "relative/secret", "absolute/secret")
    with (outside / "secret").open("a"):
        for way in (*ways, "link"):
            lease = LockNeed(path=f"/vol/{way}", kind="lease", exclusive=True)
            assert in_volume(volume, locks=(lease,)).found() == ()
    for way in ways:
        need = FileNeed(path=f"/vol/{way}", size_bytes=7, mode=-1)
        case = in_volume(volume, files=(need,))
        assert case.found() == (), "where it is in the root file system nobody knows yet"
        (tmp_path / "root").mkdir(exist_ok=True)
        (found,) = verdict.judge_files(case.needs, case.spec or {}, tmp_path / "root")
        assert found.rule == "files.missing"
    (found,) = in_volume(volume, files=(FileNeed(path="/vol/link", size_bytes=7, mode=-1),)).found()
    assert "no regular file" in found.message


def test_a_flock_on_what_a_link_leads_to_is_not_the_tasks(tmp_path: Path):
    (tmp_path / "link").symlink_to("file")
    need = LockNeed(path="/vol/link", kind="flock", exclusive=True)
    with (tmp_path / "file").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert in_volume(tmp_path, locks=(need,)).found() == ()
        named_file = in_volume(tmp_path, locks=(replace(need, path="/vol/file"),)).found()
    assert named(named_file, "files.locked") == ["refuse"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_lock_where_files_have_another_device_than_their_file_system(tmp_path: Path):
    """As on btrfs, whose snapshots also number their files alike. So does an overlay over two."""
    names = ("lock", "like-it", "upper", "vol")
    lock, like_it, upper, volume = (tmp_path / name for name in names)
    with contextlib.ExitStack() as closing:
        for path in (lock, like_it, upper, volume):
            path.mkdir()
            words = ["-t", "tmpfs", "torpor-test"]
            if path == volume:
                options = f"lowerdir={lock}:{like_it},upperdir={upper}/up,workdir={upper}/work"
                words = ["-t", "overlay", "torpor-test", "-o", options]
            subprocess.run(["mount", *words, path], check=True)
            closing.callback(subprocess.run, ["umount", path], check=True)
            for name in ("up", "work") if path == upper else ():
                (upper / name).mkdir()
            if path in (lock, like_it):
                (path / path.name).touch()

        def found(name: str) -> list[str]:
            need = LockNeed(path=f"/vol/{name}", kind="flock", exclusive=True)
            return named(in_volume(volume, locks=(need,)).found(), "files.locked")

        assert (volume / "lock").stat().st_dev != volume.stat().st_dev
        assert (volume / "lock").stat().st_ino == (volume / "like-it").stat().st_ino
        assert found("lock") == []
        with (volume / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            assert (found("lock"), found("like-it")) == (["refuse"], [])


def test_a_name_that_no_file_can_have(tmp_path: Path):
    case = in_volume(
        tmp_path,
        files=(FileNeed(path="/vol/a\0b", size_bytes=-1, mode=-1),),
        locks=(LockNeed(path="/vol/a\0b", kind="flock", exclusive=True),),
    )
    assert named(case.found(), "files.missing") == ["refuse"]


def test_only_a_socket_may_be_where_one_is_bound(tmp_path: Path):
    need = FileNeed(path="/vol/sock", size_bytes=-1, mode=-1, kind="socket", use="socket")
    case = in_volume(tmp_path, files=(need,))
    assert case.found() == ()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "sock"))
        assert case.found() == ()
    (tmp_path / "sock").unlink()
    (tmp_path / "sock").mkdir()
    assert named(case.found(), "files.in-way") == ["refuse"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_what_is_written_needs_a_writable_file_system(tmp_path: Path):
    subprocess.run(["mount", "-t", "tmpfs", "torpor-test", tmp_path], check=True)
    log = FileNeed(path="/vol/log", size_bytes=0, mode=-1)
    gone = FileNeed(path="/vol/sub/gone", size_bytes=-1, mode=-1, kind="any", use="deleted")
    sock = FileNeed(path="/vol/sock", size_bytes=-1, mode=-1, kind="socket", use="socket")
    try:
        (tmp_path / "log").touch()
        writing = [replace(log, writable=True), gone, sock]
        assert in_volume(tmp_path, files=(*writing, log)).found() == ()
        subprocess.run(["mount", "-o", "remount,bind,ro", tmp_path], check=True)
        assert in_volume(tmp_path, files=(*writing, log)).found() == ()
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        for need in writing:
            assert named(in_volume(tmp_path, files=(need,)).found(), "files.read-only") == ["refuse"]
        assert in_volume(tmp_path, files=(log,)).found() == ()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_file_is_no_place_for_a_deleted_one(tmp_path: Path):
    gone = FileNeed(path="/vol/sub/gone", size_bytes=-1, mode=-1, kind="any", use="deleted")
    assert in_volume(tmp_path, files=(gone,)).found() == ()
    (tmp_path / "sub").touch()
    assert named(in_volume(tmp_path, files=(gone,)).found(), "files.in-way") == ["refuse"]


def test_a_removed_name_is_kept_in_one_volume_only(tmp_path: Path):
    link = FileNeed(path="/vol/link_remap.3", size_bytes=-1, mode=-1, kind="any", use="link", writable=True)
    (found,) = in_volume(tmp_path, files=(link,)).found()
    assert (found.rule, "the volume of the dump itself" in found.remedy) == ("files.missing", True)
    (tmp_path / "link_remap.3").touch()
    assert in_volume(tmp_path, files=(link,)).found() == ()


def test_programs_are_not_written_to(tmp_path: Path):
    shutil.copy("/bin/sleep", tmp_path / "sleep")
    need = FileNeed(path="/vol/sleep", size_bytes=-1, mode=-1)
    writing, run = (
        in_volume(tmp_path, files=(replace(need, **{k: True}),)) for k in ("writable", "executed")
    )
    assert writing.found() == run.found() == ()
    with (tmp_path / "sleep").open("r+b"):
        assert writing.found() == ()
        assert named(run.found(), "files.busy") == ["refuse"]
    with subprocess.Popen([tmp_path / "sleep", "60"]) as process:
        assert run.found() == ()
        assert named(writing.found(), "files.busy") == ["refuse"]
        process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files immutable")
def test_what_was_written_to_must_not_be_immutable(tmp_path: Path):
    (tmp_path / "log").touch()
    if subprocess.run(["chattr", "+i", tmp_path / "log"], check=False).returncode:
        pytest.skip("this file system has no such files")
    try:
        need = FileNeed(path="/vol/log", size_bytes=0, mode=-1)
        assert in_volume(tmp_path, files=(need,)).found() == ()
        found = in_volume(tmp_path, files=(replace(need, writable=True),)).found()
        assert named(found, "files.immutable") == ["refuse"]
    finally:
        subprocess.run(["chattr", "-i", tmp_path / "log"], check=True)


def test_an_absolute_link_leads_elsewhere_in_the_container(tmp_path: Path):
    root, volume = tmp_path / "root", tmp_path / "volume"
    (root / "real").mkdir(parents=True)
    volume.mkdir()
    (root / "data").symlink_to("/real")
    (root / "mounted").symlink_to("/vol")
    files = tuple(FileNeed(path=path, size_bytes=-1, mode=-1) for path in ("/data/log", "/mounted/log"))
    case = in_volume(volume, files=files)

    def missing() -> list[str]:
        found = verdict.judge_files(case.needs, case.spec or {}, root)
        return [one.message.split("'")[1] for one in found]

    assert missing() == ["/data/log", "/mounted/log"]
    for here, there in (("one", "two"), ("two", "three"), ("three", "one")):
        (root / here).symlink_to(there)
    loop = FileNeed(path="/one/log", size_bytes=-1, mode=-1)
    (found,) = verdict.judge_files(replace(case.needs, files=(loop,)), case.spec or {}, root)
    assert found.rule == "files.missing"
    (root / "real/log").touch()
    assert missing() == ["/mounted/log"]
    (volume / "log").touch()
    assert missing() == []


def test_control_groups_that_only_the_new_spec_mounts():
    entry = {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": []}
    for needs, found in ((image(), ["unknown"]), (has("/sys/fs/cgroup", "tmpfs"), [])):
        assert named(At(needs, spec=new(mounts=[entry])).found(), "mounts.added") == found
