"""Pods of gVisor under containerd's CRI: one manifest, two runtime classes; what runsc does not do, torpor does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.containerd import Containerd
from tests.support.counter import COUNTER, put_to_sleep, wakes
from tests.support.cri import Container, Cri, Pod
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine

GVISOR = "torpor-runsc"


def counter(pod: Pod, daemon: Containerd, name: str = "main", attempt: int = 0) -> Container:
    return pod.run(name, COUNTER, image=daemon.image("busybox"), attempt=attempt)


def shell(pod: Pod, daemon: Containerd, script: str, name: str = "main", **options: Any) -> Container:
    return pod.run(name, ["/bin/sh", "-c", script], image=daemon.image("busybox"), **options)


def root(daemon: Containerd) -> Path:
    """The --root that containerd's shim gives to the runtime for pods."""
    return daemon.runc_root / "k8s.io"


@pytest.mark.parametrize("handler", ["torpor", GVISOR])
def test_one_manifest_sleeps_and_wakes_with_either_runtime(
    cri: Cri, daemon: Containerd, torpor: Torpor, handler: str
) -> None:
    old = cri.pod("old", handler=handler)
    source = counter(old, daemon)
    assert source.exec("sh", "-c", "echo kept >/data/marker").exit_code == 0
    last = put_to_sleep(source, torpor, "pod")
    source.until_number(last + 5)  # it was left running
    old_ip = old.ip
    old.remove()
    new = cri.pod("new", handler=handler, annotations={"torpor.dev/restore-from.main": "pod"})
    target = counter(new, daemon)
    wakes(target, last)
    assert target.exec("cat", "/data/marker").stdout == "kept\n"
    assert target.state == "RUNNING"
    assert new.ip != old_ip
    target.stop(timeout_s=10)
    assert target.exit_code() == 42


def test_everyday_life_of_a_pod(cri: Cri, daemon: Containerd) -> None:
    pod = cri.pod("life", handler=GVISOR)
    prepare = shell(pod, daemon, "echo out 1; echo err 2 >&2; exit 3", "prepare")
    assert prepare.exit_code() == 3
    assert sorted(prepare.log()) == ["err 2", "out 1"]
    main, side = counter(pod, daemon), counter(pod, daemon, "side")
    main.until_number(3)
    side.until_number(3)
    assert "gVisor" in main.exec("dmesg").stdout
    assert main.exec("sh", "-c", "echo no >&2; exit 9").exit_code == 9
    assert main.pid != side.pid
    side.stop()
    assert side.exit_code() == 137
    side.remove()
    again = counter(pod, daemon, "side", attempt=1)
    again.until_number(3)
    main.until_number(main.numbers()[-1] + 3)
    main.stop(timeout_s=10)
    assert main.exit_code() == 42
    assert again.state == "RUNNING"
