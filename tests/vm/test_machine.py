"""The machine is what the other tests of this folder take it for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.vm.machine import Machine, MachineError
from tests.vm.payload import CHECKOUT, PYTHON, toolchain_prefix

pytestmark = [pytest.mark.vm, pytest.mark.engine]


def test_debian_13_with_pure_cgroup_v2_and_all_capabilities(vm: Machine) -> None:
    assert vm.run("uname -r").out.startswith("6.12.")
    assert vm.get("/etc/os-release").count(b"trixie") >= 1
    kinds = {line.split()[2] for line in vm.get("/proc/self/mounts").decode().splitlines()}
    assert "cgroup2" in kinds
    assert "cgroup" not in kinds
    controllers = set(vm.get("/sys/fs/cgroup/cgroup.controllers").decode().split())
    assert {"cpu", "memory", "pids"} <= controllers
    assert vm.run("systemctl is-system-running --wait").out == "running\n"
    status = vm.get("/proc/self/status").decode()
    effective = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff")), 16)
    assert effective & 1 << 24, "CAP_SYS_RESOURCE"


def test_the_toolchain_finds_what_this_kernel_adds(vm: Machine) -> None:
    criu = toolchain_prefix() / "bin" / "criu"
    assert "supported" in vm.run([criu, "check", "--feature", "mem_dirty_track"]).out
    vm.run([criu, "check"])


def test_the_checkout_runs_with_the_hosts_python(vm: Machine) -> None:
    script = "import engines.api, msgspec, google.protobuf; print(engines.api.__file__)"
    out = vm.run([PYTHON, "-c", script]).out
    assert out.strip() == str(CHECKOUT / "engines/api.py")


def test_clones_are_machines_of_their_own(new_vm: Callable[[], Machine]) -> None:
    first, second = new_vm(), new_vm()
    first.run("touch /payload/mine /root/mine")
    assert second.run("ls /payload/mine /root/mine", check=False).status != 0
    random = "cat /proc/sys/kernel/random/uuid"
    assert first.run(random).out != second.run(random).out


def test_errors_are_told(vm: Machine) -> None:
    output = vm.run("echo here; echo there >&2; exit 3", check=False)
    assert (output.status, output.out, output.err) == (3, "here\n", "there\n")
    with pytest.raises(MachineError, match="timed out"):
        vm.run("sleep 300", timeout_s=1)
    with pytest.raises(MachineError, match="ended"):  # a panic ends the machine, and the waiting call
        vm.run("echo c > /proc/sysrq-trigger; sleep 300")
