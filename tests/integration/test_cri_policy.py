"""What kubelet's own habits (new ids at every restart) and the pod's wishes make of a restore."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

import grpc
import pytest

from tests.support.containerd import Containerd
from tests.support.counter import COUNTER, crowd, put_to_sleep, threads, wakes
from tests.support.cri import Container, Cri, Pod
from tests.support.network import Lines
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine

FROM = "torpor.dev/restore-from.main"
USE = "torpor.dev/use"
ON_FAILURE = "torpor.dev/on-restore-failure"
SERVICE = ("/usr/bin/python3", "/workloads/service.py", "7000", "1")


def counter(pod: Pod, daemon: Containerd, attempt: int = 0) -> Container:
    return pod.run("main", COUNTER, image=daemon.image("busybox"), attempt=attempt)


def asleep(cri: Cri, daemon: Containerd, torpor: Torpor, name: str, *, namespace: str = "default") -> int:
    """An image `name` of a counter whose pod is gone; its last number. It has left marks on its disk."""
    pod = cri.pod("source", namespace=namespace)
    container = counter(pod, daemon)
    container.exec("sh", "-c", "echo old >/data/marker; rm /etc/group")
    last = put_to_sleep(container, torpor, name, namespace=namespace)
    pod.remove()
    return last


def crash(container: Container) -> None:
    os.kill(container.pid, signal.SIGKILL)
    assert container.exit_code() == 137


def starts_over(container: Container) -> None:
    container.until_number(3)
    assert container.numbers()[0] == 1


def stopped(cri: Cri, daemon: Containerd, torpor: Torpor, name: str) -> int:
    """An image `name` of a counter that torpor stopped with the checkpoint; its last number."""
    pod = cri.pod("source")
    container = counter(pod, daemon)
    container.until_number(5)
    torpor("checkpoint", container.id, "--root", daemon.runc_root / "k8s.io", "--name", name, "--stop")
    assert container.exit_code() == 137
    last = container.numbers()[-1]
    pod.remove()
    return last


def test_a_moved_job_is_not_rolled_back_when_it_crashes(cri: Cri, daemon: Containerd, torpor: Torpor) -> None:
    last = stopped(cri, daemon, torpor, "move")
    pod = cri.pod("job", annotations={FROM: "move"})
    first = counter(pod, daemon)
    wakes(first, last)
    crash(first)
    again = pod.create("main", COUNTER, image=daemon.image("busybox"), attempt=1)
    with pytest.raises(grpc.RpcError, match="move") as refused:
        again.start()
    assert "has used it" in str(refused.value.details())
    assert again.log() == []


def test_a_moved_job_starts_over_where_the_pod_says_so(cri: Cri, daemon: Containerd, torpor: Torpor) -> None:
    last = asleep(cri, daemon, torpor, "move")  # it ran on: only the pod's wish makes this a move
    pod = cri.pod("job", annotations={FROM: "move", USE: "move", ON_FAILURE: "cold-start"})
    first = counter(pod, daemon)
    wakes(first, last)
    crash(first)
    starts_over(counter(pod, daemon, attempt=1))


def test_a_clone_wakes_from_the_image_at_every_restart(cri: Cri, daemon: Containerd, torpor: Torpor) -> None:
    last = asleep(cri, daemon, torpor, "clone")
    pod = cri.pod("job", annotations={FROM: "clone", USE: "clone"})
    first = counter(pod, daemon)
    wakes(first, last)
    crash(first)
    wakes(counter(pod, daemon, attempt=1), last)


@pytest.mark.parametrize("annotation", ["org.criu.config", "org.criu.unknown"])
def test_no_pod_may_set_a_criu_annotation(
    cri: Cri, daemon: Containerd, torpor: Torpor, annotation: str
) -> None:
    evil = torpor.path / "evil.conf"
    evil.write_text(f"action-script /bin/touch {torpor.path}/was-run\n")
    with pytest.raises(grpc.RpcError, match="org\\.criu"):
        cri.pod("evil", annotations={annotation: str(evil)}, handler="torpor-wide")
    assert not (torpor.path / "was-run").exists()


@pytest.mark.parametrize("reference", ["theirs", "team-a/theirs"])
def test_an_image_of_another_namespace_is_out_of_reach(
    cri: Cri, daemon: Containerd, torpor: Torpor, reference: str
) -> None:
    asleep(cri, daemon, torpor, "theirs", namespace="team-a")
    pod = cri.pod("thief", namespace="team-b", annotations={FROM: reference})
    container = pod.create("main", COUNTER, image=daemon.image("busybox"))
    with pytest.raises(grpc.RpcError, match="theirs"):
        container.start()
    assert container.log() == []
    own = cri.pod("owner", namespace="team-a", annotations={FROM: "theirs"})
    counter(own, daemon).until_number(5)


def damage_missing(torpor: Torpor) -> None:
    torpor("images", "rm", "default/bad")


def damage_pages(torpor: Torpor) -> None:
    """Cut the memory in half: only the size tells, before CRIU reads it."""
    pages = next(torpor.image_path("bad", namespace="default").glob("checkpoint/pages-*.img"))
    os.truncate(pages, pages.stat().st_size // 2)


def damage_core(torpor: Torpor) -> None:
    """Flip a byte of a small file."""
    core = next(torpor.image_path("bad", namespace="default").glob("checkpoint/core-*.img"))
    content = bytearray(core.read_bytes())
    content[len(content) // 2] ^= 0xFF
    core.write_bytes(content)


DAMAGES = [damage_missing, damage_pages, damage_core]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_cold_start_after_a_failed_restore_is_clean(
    cri: Cri, daemon: Containerd, torpor: Torpor, damage: Callable[[Torpor], None]
) -> None:
    pod = cri.pod("source")
    source = pod.run("main", SERVICE, image=daemon.image("python"))
    source.until_number(1, word="ready")
    source.exec("sh", "-c", "echo old >/data/marker; rm /etc/group")
    archive = source.checkpoint(pod.path / "bad.tar")
    pod.remove()
    torpor.import_archive(archive, "bad", namespace="default")
    damage(torpor)

    new = cri.pod("new", annotations={FROM: "bad", ON_FAILURE: "cold-start"})
    target = new.run("main", SERVICE, image=daemon.image("python"))
    target.until_number(1, word="ready")
    assert target.log()[0] == "ready 1"
    assert target.exec("cat", "/data/marker").exit_code != 0
    assert target.exec("cat", "/etc/group").exit_code == 0
    client = Lines(new.ip, 7000)  # a network lock left behind would drop this
    assert [client.ask("count"), client.ask("count")] == ["1", "2"]
    client.close()


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_failed_restore_says_why_and_starts_nothing(
    cri: Cri, daemon: Containerd, torpor: Torpor, damage: Callable[[Torpor], None]
) -> None:
    asleep(cri, daemon, torpor, "bad")
    damage(torpor)
    pod = cri.pod("new", annotations={FROM: "bad"})
    container = pod.create("main", COUNTER, image=daemon.image("busybox"))
    with pytest.raises(grpc.RpcError, match="bad") as failed:
        container.start()
    assert "could not" in str(failed.value.details())
    assert container.log() == []


@pytest.mark.parametrize("take", [crowd, threads])
def test_a_cold_start_follows_when_pids_are_taken(
    cri: Cri, daemon: Containerd, torpor: Torpor, take: Callable[[Pod, Containerd, int], None]
) -> None:
    """In a shared pid namespace the old pids may be taken."""
    pod = cri.pod("source", shared_pid=True)
    # Its pid then lies in the midst of the other pod's crowd; at the edge the runtime's threads leave gaps.
    crowd(pod, daemon, 30)
    container = pod.run("main", SERVICE, image=daemon.image("python"))
    container.until_number(1, word="ready")
    container.exec("sh", "-c", "echo old >/data/marker")
    archive = container.checkpoint(pod.path / "taken.tar")
    pod.remove()
    torpor.import_archive(archive, "taken", namespace="default")

    new = cri.pod("new", shared_pid=True, annotations={FROM: "taken", ON_FAILURE: "cold-start"})
    take(new, daemon, 120)
    target = new.run("main", SERVICE, image=daemon.image("python"))
    target.until_number(1, word="ready")
    (failed,) = [line for line in torpor.audit() if line.get("container") == target.id]
    assert "[place.pids]" in failed["verdict"]
    assert target.exec("cat", "/data/marker").exit_code != 0
    client = Lines(new.ip, 7000)
    assert client.ask("count") == "1"
    client.close()


def outcome(annotations: Mapping[str, str], cri: Cri, daemon: Containerd) -> str:
    pod = cri.pod("new", annotations=annotations)
    container = pod.create("main", COUNTER, image=daemon.image("busybox"))
    with pytest.raises(grpc.RpcError) as failed:
        container.start()
    return str(failed.value.details())


def test_a_wish_that_torpor_does_not_know_is_refused(cri: Cri, daemon: Containerd) -> None:
    assert "perhaps" in outcome({FROM: "x", ON_FAILURE: "perhaps"}, cri, daemon)
    assert "borrow" in outcome({FROM: "x", USE: "borrow"}, cri, daemon)
