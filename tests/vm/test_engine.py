"""The CRIU engine under Debian 13's kernel and pure cgroup v2: what a node has and this host may lack."""

from __future__ import annotations

import json

import pytest

from tests.vm.machine import Machine
from tests.vm.payload import guest_module

pytestmark = [pytest.mark.vm, pytest.mark.engine]


def scene(vm: Machine, name: str) -> str:
    return guest_module(vm, "tests.vm.guest.engine", name).out


def test_the_probe_refuses_nothing(vm: Machine) -> None:
    scene(vm, "probe")


def test_a_restored_container_is_held_by_the_v2_freezer_until_its_release(vm: Machine) -> None:
    scene(vm, "held")


def test_a_held_container_dies_of_sigkill_without_running(vm: Machine) -> None:
    scene(vm, "killed_while_held")


def test_a_dump_after_a_pre_dump_holds_only_what_changed(vm: Machine) -> None:
    before, after = json.loads(scene(vm, "pre_dump"))["pages_bytes"]
    assert 0 < after < before


def test_a_process_of_another_user_needs_no_user_namespace(vm: Machine) -> None:
    scene(vm, "non_root")
