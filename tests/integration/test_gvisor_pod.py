"""Pods of gVisor under containerd's CRI: one manifest for two runtime classes, and what runsc lacks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from cri_api.v1 import api_pb2 as api

from shim import state
from tests.support import leaks
from tests.support.containerd import Containerd
from tests.support.containers import Lab, command, lab, make_bundle, tool, until
from tests.support.counter import COUNTER, put_to_sleep, wakes
from tests.support.cri import Container, Cri, Pod
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine

GVISOR = "torpor-runsc"
SERVER = """
i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.05; done &
while :; do echo served | nc -l -p 7777; done
"""


def run(pod: Pod, daemon: Containerd, name: str = "main", *argv: str, **options: Any) -> Container:
    return pod.run(name, argv or COUNTER, image=daemon.image("busybox"), **options)


def root(daemon: Containerd) -> Path:
    """The --root that containerd's shim gives to the runtime for pods."""
    return daemon.runc_root / "k8s.io"


def remove_dead(pod: Pod, daemon: Containerd) -> None:
    """Remove a pod whose sandbox died: containerd leaves its empty shim then, whatever the runtime."""
    pod.remove()
    for pid, argv in list(leaks.processes(daemon.tag)):
        if pod.id in argv:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def refusal(pod: Pod, daemon: Containerd, name: str, **options: Any) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        run(pod, daemon, name, **options)
    return str(refused.value)


def answers(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, 7777), timeout=5) as connection:
        return connection.recv(100) == b"served\n"
    return False


@pytest.mark.parametrize("handler", ["torpor", "torpor-runsc-net"])
def test_one_manifest_sleeps_and_wakes_with_either_runtime(
    cri: Cri, daemon: Containerd, torpor: Torpor, handler: str
) -> None:
    def manifest(name: str, **annotations: str) -> tuple[Pod, Container]:
        pod = cri.pod(name, handler=handler, annotations=annotations)
        return pod, run(pod, daemon, "main", "/bin/sh", "-c", SERVER)

    old, source = manifest("old")
    assert source.exec("sh", "-c", "echo kept >/data/marker").exit_code == 0
    last = put_to_sleep(source, torpor, "pod")
    source.until_number(last + 5)  # it was left running
    old_ip = old.ip
    old.remove()
    new, target = manifest("new", **{"torpor.dev/restore-from": "pod"})
    wakes(target, last)
    assert target.exec("cat", "/data/marker").stdout == "kept\n"
    assert new.ip != old_ip
    until(lambda: answers(new.ip), what="the new address answers")
    target.stop()
    assert target.exit_code() == 137


def test_everyday_life_of_a_pod(cri: Cri, daemon: Containerd) -> None:
    pod = cri.pod("life", handler=GVISOR)
    first = run(pod, daemon, "first", "/bin/sh", "-c", "echo out 1; echo err 2 >&2; exit 3")
    assert first.exit_code() == 3
    assert sorted(first.log()) == ["err 2", "out 1"]
    main, side = run(pod, daemon), run(pod, daemon, "side", tty=True)
    assert main.pid != side.pid
    main.until_number(3)
    side.until_number(3)
    assert "gVisor" in main.exec("dmesg").stdout
    assert main.exec("sh", "-c", "echo no >&2; exit 9") == side.exec("sh", "-c", "echo no >&2; exit 9")
    side.stop()
    assert side.exit_code() == 137
    side.remove()
    run(pod, daemon, "side", attempt=1).until_number(3)
    main.until_number(main.numbers()[-1] + 3)
    main.stop(timeout_s=10)
    assert main.exit_code() == 42

    # Whoever kills what stands for a container on the node ends the container.
    victim = run(pod, daemon, "victim")
    assert list(root(daemon).glob(f"{victim.id}*"))
    os.kill(victim.pid, signal.SIGKILL)
    assert victim.exit_code() == 137
    until(lambda: not list(root(daemon).glob(f"{victim.id}*")), what="runsc knows it no more")
    last = run(pod, daemon, "last")
    os.kill(pod.pid, signal.SIGKILL)  # the sandbox
    assert last.exit_code() == 137
    remove_dead(pod, daemon)


def test_two_containers_sleep_and_wake_together(
    cri: Cri, daemon: Containerd, torpor: Torpor, tmp_path: Path
) -> None:
    old = cri.pod("old", handler=GVISOR)
    main, side = run(old, daemon), run(old, daemon, "side")
    main.until_number(3)
    side.until_number(3)
    torpor("checkpoint", main.id, "--root", root(daemon), "--name", "default/two", "--stop")
    assert main.exit_code() == side.exit_code() == 137
    last = {"main": main.numbers()[-1], "side": side.numbers()[-1]}
    remove_dead(old, daemon)

    plain = make_bundle(tmp_path / "plain", ["/bin/true"])
    said = torpor("restore", "default/two", "--bundle", plain, "--dry-run", check=False).stderr
    assert "a pod with main, side, which gVisor restores only as a pod" in said

    # Half a pod can be stopped; it ends as a whole, and has used up nothing.
    half = cri.pod("half", handler=GVISOR, annotations={"torpor.dev/restore-from": "two"})
    meek = api.LinuxContainerSecurityContext(capabilities=api.Capability(drop_capabilities=["ALL"]))
    assert "[privileges.capabilities]" in refusal(half, daemon, "main", security=meek)
    lonely = run(half, daemon, attempt=1)
    lonely.stop()
    assert lonely.exit_code() == 137
    remove_dead(half, daemon)

    new = cri.pod("new", handler=GVISOR, annotations={"torpor.dev/restore-from": "two"})
    said = refusal(new, daemon, "prepare")
    assert "starts no other container before main, side of the image" in said
    main, side = run(new, daemon), run(new, daemon, "side")
    wakes(main, last["main"])
    wakes(side, last["side"])
    with pytest.raises(grpc.RpcError, match="only the images of its own"):
        cri.pod(
            "other", namespace="x", handler=GVISOR, annotations={"torpor.dev/restore-from": "default/two"}
        )
    with pytest.raises(grpc.RpcError, match="has used it"):
        cri.pod("third", handler=GVISOR, annotations={"torpor.dev/restore-from": "two"})
    assert run(new, daemon, "late", "/bin/sh", "-c", "exit 4").exit_code() == 4
    side.stop()
    assert side.exit_code() == 137
    assert "gVisor restores a pod only once" in refusal(new, daemon, "side", attempt=1)
    main.stop(timeout_s=10)
    assert main.exit_code() == 42


def test_a_pod_whose_restore_dies_can_be_removed(cri: Cri, daemon: Containerd, torpor: Torpor) -> None:
    old = cri.pod("old", handler=GVISOR)
    main, _ = run(old, daemon), run(old, daemon, "side")
    torpor(
        "checkpoint", main.id, "--root", root(daemon), "--name", "default/dies", "--use", "clone", "--stop"
    )
    assert main.exit_code() == 137
    remove_dead(old, daemon)
    for victim, says in (("sandbox", "could not restore container"), ("start", ".")):
        pod = cri.pod("half", handler=GVISOR, annotations={"torpor.dev/restore-from": "dies"})
        run(pod, daemon)
        side, sandbox = pod.create("side", COUNTER, image=daemon.image("busybox")), pod.pid
        with ThreadPoolExecutor(1) as pool:
            started = pool.submit(side.start)
            at_work = until(lambda side=side: restoring(torpor, side), what="it is being restored")
            os.kill(sandbox if victim == "sandbox" else at_work, signal.SIGKILL)
            with pytest.raises(grpc.RpcError, match=says):
                started.result(60)
        remove_dead(pod, daemon)


def restoring(torpor: Torpor, container: Container) -> int:
    """The pid of the call that restores a container just now, 0 if there is none."""
    for directory in (torpor.state_path / "containers").glob(f"*/{container.id}"):
        found = state.load(directory)
        if found is not None and found.phase == "restoring" and (directory / "gvisor-call.json").exists():
            return int(((directory / state.LOCK).read_text().split() or ["0"])[0])
    return 0


def test_a_container_of_a_woken_pod_starts_anew_where_that_is_allowed(
    cri: Cri, daemon: Containerd, torpor: Torpor
) -> None:
    source = run(cri.pod("old", handler=GVISOR), daemon)
    last = source.until_number(20)
    torpor("checkpoint", source.id, "--root", root(daemon), "--name", "default/anew", "--use", "clone")
    wish = {"torpor.dev/restore-from.main": "anew", "torpor.dev/on-restore-failure": "cold-start"}
    new = cri.pod("new", handler=GVISOR, annotations=wish)
    target = run(new, daemon)
    wakes(target, last)
    target.stop()
    again = run(new, daemon, attempt=1)
    again.until_number(3)
    assert again.numbers()[0] == 1


def test_what_no_pod_of_gvisor_could_wake_up_from_is_refused(
    cri: Cri, daemon: Containerd, torpor: Torpor
) -> None:
    pod = cri.pod("busy", handler=GVISOR)
    main, side = run(pod, daemon), run(pod, daemon, "side")
    to = ("--root", root(daemon), "--name", "default/no")
    with subprocess.Popen(
        [
            tool("ctr"),
            "-a",
            daemon.socket,
            "-n",
            "k8s.io",
            "task",
            "exec",
            "--exec-id",
            "guest",
            side.id,
            "sleep",
            "1000",
        ],
        stdin=subprocess.DEVNULL,
    ) as session:
        until(lambda: "sleep 1000" in side.exec("ps").stdout, what="the session runs")
        said = torpor("checkpoint", main.id, *to, check=False).stderr
        session.kill()
    assert "an exec session runs in 'side' of its pod (sleep" in said
    assert "pause container of a pod" in torpor("checkpoint", pod.id, *to, check=False).stderr
    run(pod, daemon, "shell", tty=True)
    assert "'shell' of its pod has a terminal" in torpor("checkpoint", main.id, *to, check=False).stderr
    main.until_number(main.until_number(1) + 3)
    assert torpor.json("images", "ls") == []


# --- without a caller ------------------------------------------------------------------------------------


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Lab]:
    (tmp_path / "lab").mkdir()
    with lab(tmp_path / "lab") as inner:
        yield inner


def test_one_that_was_created_can_be_killed_and_deleted(box: Lab, tmp_path: Path) -> None:
    torpor = Torpor(tmp_path / "torpor")
    sandbox, container = box.new_id(), box.new_id()
    cri = "io.kubernetes.cri"

    def call(*words: str | Path, check: bool = True) -> int:
        program = [torpor.runtime_runsc, "--root", tmp_path / "root", *words]
        done = subprocess.run(program, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
        assert done.returncode == 0 or not check
        return done.returncode

    def state() -> str:
        return command(torpor.runtime_runsc, "--root", tmp_path / "root", "state", container).stdout

    for name, kind in ((sandbox, "sandbox"), (container, "container")):
        notes = {f"{cri}.container-type": kind, f"{cri}.sandbox-id": sandbox}
        bundle = box.bundle(
            name, ["/bin/sleep", "1000"], annotations={**notes, f"{cri}.container-name": kind}
        )
        call("create", "--bundle", bundle, "--pid-file", bundle / "pid", name)
        if name == sandbox:
            call("start", name)
    pid = int((tmp_path / "lab" / "bundles" / container / "pid").read_text())
    assert pid != int((tmp_path / "lab" / "bundles" / sandbox / "pid").read_text())
    assert '"created"' in state()
    assert call("exec", container, "/bin/true", check=False) == 255
    call("kill", container, "KILL")
    until(lambda: not Path(f"/proc/{pid}/fd").is_dir() or '"stopped"' in state(), what="it is killed")
    assert '"stopped"' in state()
    assert call("kill", container, "9", check=False) == 1
    call("delete", container)
    assert call("kill", container, "9", check=False) == 1
    call("kill", sandbox, "KILL")
    until(lambda: call("delete", sandbox, check=False) == 0, what="the sandbox is deleted")
    assert not list((torpor.state_path / "containers").glob("*/*"))
