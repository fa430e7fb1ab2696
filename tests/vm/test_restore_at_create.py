"""Restore at create under Debian 13's kernel, systemd and pure cgroup v2: what nodes really have."""

from __future__ import annotations

import pytest

from tests.support import oci, soak
from tests.vm.machine import Machine
from tests.vm.payload import guest_module

pytestmark = [pytest.mark.vm, pytest.mark.engine]


@pytest.mark.soak
def test_a_counter_sleeps_and_wakes_under_containerd(vm: Machine) -> None:
    archive = "/root/busybox.tar"
    vm.put(archive, oci.layout("busybox").read_bytes())
    n_sleeps = 3 if soak.SOAK else 1
    guest_module(vm, "tests.vm.guest.callers", archive, str(n_sleeps))
