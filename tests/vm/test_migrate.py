"""Migrations with a kernel that tracks memory: what hardly changes travels before the freeze."""

from __future__ import annotations

import pytest

from tests.support import soak
from tests.vm.machine import Machine
from tests.vm.payload import guest_module

pytestmark = [pytest.mark.vm, pytest.mark.engine]


@pytest.mark.soak
@pytest.mark.skipif(not soak.SOAK, reason="long: see ./run soak")
def test_only_what_changed_travels_while_nobody_runs(vm: Machine) -> None:
    print(guest_module(vm, "tests.vm.guest.migrate").out)
