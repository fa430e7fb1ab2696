"""The rule against io_uring: added where there is none, never a favour where there is one."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from shim.checkpointable import ENOSYS, IO_URING, without_io_uring

RULE = {"names": list(IO_URING), "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}
ALLOW = "SCMP_ACT_ALLOW"


def section(default: str = "SCMP_ACT_ERRNO", *rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"linux": {"seccomp": {"defaultAction": default, "syscalls": list(rules), **more}}}


def rules_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return without_io_uring(spec)["linux"]["seccomp"]["syscalls"]


@pytest.mark.parametrize("spec", [{}, {"linux": {}}, {"linux": {"seccomp": None}}])
def test_no_profile_gets_one_that_allows_everything_else(spec: dict[str, Any]):
    made = without_io_uring(spec, machine="x86_64")["linux"]["seccomp"]
    assert made["defaultAction"] == ALLOW
    assert made["syscalls"] == [RULE]
    assert made["architectures"] == ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"]
    assert "architectures" not in without_io_uring(spec, machine="riscv64")["linux"]["seccomp"]


def test_the_original_is_left_alone():
    spec = section(ALLOW, {"names": ["io_uring_setup"], "action": ALLOW})
    kept = copy.deepcopy(spec)
    without_io_uring(spec)
    assert spec == kept


def test_twice_is_once():
    for spec in ({}, section("SCMP_ACT_ERRNO", {"names": ["read", *IO_URING], "action": ALLOW})):
        once = without_io_uring(spec)
        assert without_io_uring(once) == once


def test_names_leave_the_rules_that_allow_them():
    both = {"names": ["read", "io_uring_setup"], "action": ALLOW, "args": []}
    only = {"names": list(IO_URING), "action": ALLOW}
    assert rules_of(section("SCMP_ACT_ERRNO", both, only)) == [{**both, "names": ["read"]}, RULE]


@pytest.mark.parametrize(
    "action", [ALLOW, "SCMP_ACT_LOG", "SCMP_ACT_TRACE", "SCMP_ACT_NOTIFY", "SCMP_ACT_ERRNO"]
)
def test_softer_answers_are_replaced(action: str):
    conditional = {"names": ["io_uring_enter"], "action": action, "args": [{"index": 0, "value": 1}]}
    assert rules_of(section("SCMP_ACT_ERRNO", conditional)) == [RULE]


@pytest.mark.parametrize(
    "action", ["SCMP_ACT_KILL", "SCMP_ACT_KILL_THREAD", "SCMP_ACT_KILL_PROCESS", "SCMP_ACT_TRAP"]
)
def test_harsher_answers_stay(action: str):
    harsh = {"names": ["io_uring_setup"], "action": action}
    assert rules_of(section(ALLOW, harsh)) == [harsh, {**RULE, "names": list(IO_URING[1:])}]
    assert rules_of(section(action)) == []
    allowed = {"names": ["io_uring_setup"], "action": ALLOW}
    assert rules_of(section(action, allowed)) == [{**RULE, "names": ["io_uring_setup"]}]


def test_a_default_that_is_the_same_answer_needs_no_rule():
    allowed = {"names": ["read", "io_uring_setup"], "action": ALLOW}
    assert rules_of(section("SCMP_ACT_ERRNO", allowed, defaultErrnoRet=ENOSYS)) == [
        {**allowed, "names": ["read"]}
    ]


def test_the_rest_of_the_profile_is_kept():
    spec = section(ALLOW, flags=["SECCOMP_FILTER_FLAG_LOG"], architectures=["SCMP_ARCH_X86_64"])
    made = without_io_uring(spec)["linux"]["seccomp"]
    assert (made["flags"], made["architectures"]) == (["SECCOMP_FILTER_FLAG_LOG"], ["SCMP_ARCH_X86_64"])
