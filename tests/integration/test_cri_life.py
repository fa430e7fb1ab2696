"""A pod's ordinary life, the same through runc and through torpor."""

from __future__ import annotations

import grpc
import pytest

from tests.support.containerd import Containerd
from tests.support.counter import COUNTER
from tests.support.cri import Cri, Mount
from tests.support.network import Lines

pytestmark = pytest.mark.engine

HANDLERS = pytest.mark.parametrize("handler", ["runc", "torpor"])


@HANDLERS
def test_a_pod_lives_and_dies(cri: Cri, daemon: Containerd, handler: str) -> None:
    pod = cri.pod("life", handler=handler, annotations={"torpor.dev/checkpointable": "false"})
    container = pod.run("main", COUNTER, image=daemon.image("busybox"), env={"COLOUR": "blue"})
    container.until_number(3)
    assert container.state == "RUNNING"
    done = container.exec("sh", "-c", "hostname; cat /etc/hosts; cat /proc/1/environ; exit 3")
    assert done.exit_code == 3
    assert done.stdout.splitlines()[0] == "life"
    assert pod.ip in done.stdout
    assert "COLOUR=blue" in done.stdout
    container.stop(timeout_s=10)
    assert container.exit_code() == 42


@HANDLERS
def test_a_command_that_is_not_there_fails_with_its_name(cri: Cri, daemon: Containerd, handler: str) -> None:
    pod = cri.pod("absent", handler=handler)
    container = pod.create("main", ["/bin/no-such-program"], image=daemon.image("busybox"))
    with pytest.raises(grpc.RpcError, match="no-such-program"):
        container.start()


@HANDLERS
def test_volumes_and_the_pod_network_work(cri: Cri, daemon: Containerd, handler: str) -> None:
    pod = cri.pod("net", handler=handler)
    (pod.path / "volume").mkdir()
    (pod.path / "volume" / "word").write_text("from the host")
    mounts = [Mount(container_path="/volume", host_path=pod.path / "volume")]
    argv = ["/usr/bin/python3", "/workloads/service.py", "7000", "1"]
    container = pod.run("main", argv, image=daemon.image("python"), mounts=mounts)
    container.until_number(1, word="ready")
    client = Lines(pod.ip, 7000)
    assert [client.ask("count"), client.ask("count"), client.ask("where")] == ["1", "2", "net"]
    client.close()
    assert container.exec("cat", "/volume/word").stdout == "from the host"


@HANDLERS
def test_containers_outlive_a_restart_of_the_daemon(cri: Cri, daemon: Containerd, handler: str) -> None:
    pod = cri.pod("restart", handler=handler)
    container = pod.run("main", COUNTER, image=daemon.image("busybox"))
    last = container.until_number(3)
    daemon.restart()
    assert container.state == "RUNNING"
    container.until_number(last + 5)
    assert container.exec("hostname").stdout.strip() == "restart"
