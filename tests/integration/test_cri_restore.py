"""A container falls asleep in one pod and wakes up in another: annotations on the pod only."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from pathlib import Path

import pytest

from tests.support.containerd import Containerd
from tests.support.containers import command, until
from tests.support.counter import COUNTER, crowd, put_to_sleep, wakes
from tests.support.cri import Container, Cri, Mount, Pod
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine


def inode(pid: int, kind: str) -> int:
    return os.stat(f"/proc/{pid}/ns/{kind}").st_ino


def volume(pod: Pod, word: str) -> Mount:
    """A host directory of the pod's own, mounted at /volume, with a file that says `word`."""
    (pod.path / "volume").mkdir()
    (pod.path / "volume" / "word").write_text(word)
    return Mount(container_path="/volume", host_path=pod.path / "volume")


def restored_pod(cri: Cri, name: str, image: str, **annotations: str) -> Pod:
    """A pod whose container `main` restores from the image."""
    more = {f"torpor.dev/{key.replace('_', '-')}": value for key, value in annotations.items()}
    return cri.pod(name, annotations={"torpor.dev/restore-from.main": image, **more})


def counter(pod: Pod, daemon: Containerd, name: str = "main", attempt: int = 0) -> Container:
    return pod.run(name, COUNTER, image=daemon.image("busybox"), attempt=attempt)


def test_state_log_and_files_go_on_in_a_new_pod(cri: Cri, daemon: Containerd, torpor: Torpor) -> None:
    old = cri.pod("old")
    source = old.run("main", COUNTER, image=daemon.image("busybox"), mounts=[volume(old, "old")])
    source.exec("sh", "-c", "echo kept >/data/marker; echo kept >/dev/marker; rm /etc/group")
    last = put_to_sleep(source, torpor, "state")
    with tarfile.open(old.path / "state.tar") as archive:
        names = {name.removeprefix("./") for name in archive.getnames()}
    assert "checkpoint/torpor-manifest.json" in names
    assert "checkpoint/inventory.img" in names
    assert "checkpoint/torpor-network.json" in names
    imported = torpor.image_path("state", namespace="default")
    manifest = json.loads((imported / "manifest.json").read_text())
    content = (imported / "network.json").read_bytes()
    assert manifest["files"]["network.json"]["sha256"] == hashlib.sha256(content).hexdigest()
    assert old.ip.encode() in content
    source.until_number(last + 10)  # it was left running

    new = restored_pod(cri, "new", "state")
    target = new.run("main", COUNTER, image=daemon.image("busybox"), mounts=[volume(new, "new")])
    wakes(target, last)
    assert target.state == "RUNNING"
    done = target.exec("cat", "/data/marker", "/dev/marker", "/volume/word")
    assert done.stdout == "kept\nkept\nnew"
    assert target.exec("test", "-e", "/etc/group").exit_code == 1
    assert int(target.exec("cat", "/data/count").stdout.split()[-1]) > last


def test_the_new_pod_gives_address_names_and_namespaces(cri: Cri, daemon: Containerd, torpor: Torpor) -> None:
    old = cri.pod("old")
    last = put_to_sleep(counter(old, daemon), torpor, "place")
    new = restored_pod(cri, "new", "place")
    target = counter(new, daemon)
    wakes(target, last)
    assert new.ip != old.ip
    assert f"inet {new.ip}/" in target.exec("ip", "-4", "address", "show", "eth0").stdout
    assert target.exec("cat", "/etc/hosts").stdout == new.hosts_path.read_text()
    assert target.exec("cat", "/etc/hostname", "/proc/sys/kernel/hostname").stdout.split() == ["new", "new"]
    assert command("nsenter", "--uts", "-t", str(new.pid), "hostname").stdout.strip() == "new"
    assert command("nsenter", "--uts", "-t", str(old.pid), "hostname").stdout.strip() == "old"
    for kind in ("uts", "ipc", "net"):
        assert inode(target.pid, kind) == inode(new.pid, kind), kind
        assert inode(target.pid, kind) != inode(old.pid, kind), kind
    for kind in ("pid", "mnt"):
        assert inode(target.pid, kind) not in {inode(new.pid, kind), inode(os.getpid(), kind)}, kind
    lines = Path(f"/proc/{target.pid}/cgroup").read_text().splitlines()
    groups = [line.split(":", 2)[2] for line in lines]
    parent = new.config.linux.cgroup_parent
    assert all(group.startswith(parent) or group == "/" for group in groups)


def test_exec_pause_and_exit_code_work_after_a_restore(cri: Cri, daemon: Containerd, torpor: Torpor) -> None:
    last = put_to_sleep(counter(cri.pod("old"), daemon), torpor, "verbs")
    target = counter(restored_pod(cri, "new", "verbs"), daemon)
    wakes(target, last)
    assert target.exec("sh", "-c", "exit 9").exit_code == 9
    daemon.ctr("task", "pause", target.id, namespace="k8s.io")
    reached = target.numbers()[-1]
    assert "PAUSED" in daemon.ctr("task", "ls", namespace="k8s.io").stdout
    daemon.ctr("task", "resume", target.id, namespace="k8s.io")
    assert target.until_number(reached + 5)
    listing = daemon.ctr("task", "ps", target.id, namespace="k8s.io").stdout
    assert str(target.pid) in listing
    target.stop(timeout_s=10)
    assert target.exit_code() == 42


def test_a_restored_container_can_be_killed(cri: Cri, daemon: Containerd, torpor: Torpor) -> None:
    last = put_to_sleep(counter(cri.pod("old"), daemon), torpor, "kill")
    target = counter(restored_pod(cri, "new", "kill"), daemon)
    wakes(target, last)
    target.stop()
    assert target.exit_code() == 137


def test_a_restored_container_sleeps_and_wakes_again(cri: Cri, daemon: Containerd, torpor: Torpor) -> None:
    first = put_to_sleep(counter(cri.pod("one"), daemon), torpor, "first")
    middle = counter(restored_pod(cri, "two", "first"), daemon)
    wakes(middle, first)
    middle.exec("sh", "-c", "echo second >/data/second")
    second = put_to_sleep(middle, torpor, "second")
    assert second > first
    last = counter(restored_pod(cri, "three", "second"), daemon)
    assert wakes(last, second)[0] > first
    assert last.exec("cat", "/data/second").stdout == "second\n"


def test_one_image_wakes_twice_at_once(cri: Cri, daemon: Containerd, torpor: Torpor) -> None:
    last = put_to_sleep(counter(cri.pod("old"), daemon), torpor, "clone")
    first = counter(restored_pod(cri, "a", "clone", use="clone"), daemon)
    second = counter(restored_pod(cri, "b", "clone", use="clone"), daemon)
    wakes(first, last)
    wakes(second, last)


def test_only_the_named_container_of_a_pod_is_restored(cri: Cri, daemon: Containerd, torpor: Torpor) -> None:
    image = daemon.image("busybox")
    old = cri.pod("old")
    side = counter(old, daemon, "side")
    last = put_to_sleep(counter(old, daemon, "main"), torpor, "two")
    assert side.until_number(1)

    new = restored_pod(cri, "new", "two")
    prepare = new.run("prepare", ["/bin/sh", "-c", "echo init 1; exit 0"], image=image)
    assert prepare.exit_code() == 0
    assert prepare.log() == ["init 1"]
    main = counter(new, daemon, "main")
    side = counter(new, daemon, "side")
    wakes(main, last)
    side.until_number(3)
    assert side.numbers()[0] == 1


def test_the_bare_annotation_means_the_recorded_container(
    cri: Cri, daemon: Containerd, torpor: Torpor
) -> None:
    last = put_to_sleep(counter(cri.pod("old"), daemon), torpor, "bare")
    new = cri.pod("new", annotations={"torpor.dev/restore-from": "bare"})
    side = counter(new, daemon, "side")
    main = counter(new, daemon, "main")
    wakes(main, last)
    side.until_number(3)
    assert side.numbers()[0] == 1


def test_a_shared_pid_namespace(cri: Cri, daemon: Containerd, torpor: Torpor) -> None:
    old = cri.pod("old", shared_pid=True)
    # So that its pids are higher than those that the other pod's pause container has taken by then.
    crowd(old, daemon, 60)
    source = counter(old, daemon)
    last = put_to_sleep(source, torpor, "shared")
    annotations = {"torpor.dev/restore-from.main": "shared"}
    new = cri.pod("new", shared_pid=True, annotations=annotations)
    target = counter(new, daemon)
    wakes(target, last)
    assert inode(target.pid, "pid") == inode(new.pid, "pid")
    assert "tick" in target.exec("ps").stdout
    assert new.info()[0].state == 0  # ready
    target.stop(timeout_s=10)
    assert target.exit_code() == 42


def test_a_container_with_a_terminal(cri: Cri, daemon: Containerd, torpor: Torpor) -> None:
    image = daemon.image("busybox")
    source = cri.pod("old").run("main", COUNTER, image=image, tty=True)
    assert source.exec("readlink", "/proc/1/fd/1").stdout.startswith("/dev/pts/")
    last = put_to_sleep(source, torpor, "tty")
    target = restored_pod(cri, "new", "tty").run("main", COUNTER, image=image, tty=True)
    wakes(target, last)
    assert target.exec("readlink", "/proc/1/fd/1").stdout.startswith("/dev/pts/")


def test_a_restored_container_outlives_a_restart_of_the_daemon(
    cri: Cri, daemon: Containerd, torpor: Torpor
) -> None:
    last = put_to_sleep(counter(cri.pod("old"), daemon), torpor, "outlive")
    target = counter(restored_pod(cri, "new", "outlive"), daemon)
    wakes(target, last)
    daemon.restart()
    until(lambda: target.state == "RUNNING", what="the container is known again")
    target.until_number(target.numbers()[-1] + 5)
    assert target.exec("sh", "-c", "exit 4").exit_code == 4
