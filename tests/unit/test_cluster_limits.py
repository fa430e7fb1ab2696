"""Limits that were changed while a container ran travel with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.limits import as_it_is

SPEC: dict[str, Any] = {
    "ociVersion": "1.2.0",
    "linux": {
        "cgroupsPath": "/x",
        "resources": {
            "devices": [{"allow": False}],
            "memory": {"limit": 200, "disableOOMKiller": True},
            "pids": {"limit": 100},
        },
    },
}
UNCHANGED = {"path": "/x", "memory": 200, "pids_limit": 100, "cpu_weight": 59}
"""As runc notes the limits of SPEC in its state.json."""


def now(tmp_path: Path, spec: dict[str, Any], noted: object) -> bytes:
    (tmp_path / "web").mkdir(exist_ok=True)
    (tmp_path / "web" / "state.json").write_text(json.dumps(noted))
    (tmp_path / "config.json").write_text(json.dumps(spec))
    return as_it_is(tmp_path, str(tmp_path), "web")


def test_what_was_changed_is_in_the_specification_and_the_rest_as_it_was(tmp_path: Path) -> None:
    changed = {
        **UNCHANGED,
        "memory": 300,
        "memory_swap": -1,
        "pids_limit": 77,
        "cpu_quota": 20000,
        "cpuset_cpus": "0",
    }
    resources = json.loads(now(tmp_path, SPEC, {"config": {"cgroups": changed}}))["linux"]["resources"]
    assert resources == {
        "devices": [{"allow": False}],
        "memory": {"limit": 300, "swap": -1, "disableOOMKiller": True},
        "pids": {"limit": 77},
        "cpu": {"quota": 20000, "cpus": "0"},
    }


@pytest.mark.parametrize("spec", [{}, {"linux": None}, {"linux": {"resources": None}}])
def test_a_specification_without_limits_gets_them(tmp_path: Path, spec: dict[str, Any]) -> None:
    read = json.loads(now(tmp_path, spec, {"config": {"cgroups": {"pids_limit": 77}}}))
    assert read["linux"]["resources"] == {"pids": {"limit": 77}}


@pytest.mark.parametrize(
    "noted", [{"config": {"cgroups": UNCHANGED}}, {"config": {"cgroups": None}}, {}, [], None]
)
def test_without_a_change_not_a_byte_is_another(tmp_path: Path, noted: object) -> None:
    assert now(tmp_path, SPEC, noted) == json.dumps(SPEC).encode()
    (tmp_path / "config.json").write_bytes(b'{ "linux": {} }')
    assert as_it_is(tmp_path, str(tmp_path), "none") == b'{ "linux": {} }'
