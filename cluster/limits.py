"""Limits that were changed while a container ran, as by `runc update`: they are not in its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from shim import bundle

_NOTED = {
    "memory": {"limit": "memory", "reservation": "memory_reservation", "swap": "memory_swap"},
    "cpu": {
        "shares": "cpu_shares",
        "quota": "cpu_quota",
        "burst": "cpu_burst",
        "period": "cpu_period",
        "realtimeRuntime": "cpu_rt_quota",
        "realtimePeriod": "cpu_rt_period",
        "cpus": "cpuset_cpus",
        "mems": "cpuset_mems",
        "idle": "cpu_idle",
    },
    "pids": {"limit": "pids_limit"},
    "blockIO": {"weight": "blkio_weight"},
}
"""What `runc update` changes: its name below `linux.resources` of the specification, and in runc's state.json
(libcontainer's `cgroups.Resources`)."""


def as_it_is(bundle_path: Path, root: str, container_id: str) -> bytes:
    """A container's config.json with the limits that it has now.

    root: the runtime's --root. Of a runtime that keeps no notes like runc's it is as it was. Raises OSError.
    """
    spec = (bundle_path / bundle.CONFIG).read_bytes()
    noted = _noted(Path(root, container_id, "state.json"))
    document: dict[str, Any] = json.loads(spec)
    linux: dict[str, Any] = document.get("linux") or {}
    before: dict[str, Any] = linux.get("resources") or {}
    resources = dict(before)
    for section, keys in _NOTED.items():
        limits = {key: noted[name] for key, name in keys.items() if noted.get(name)}
        if limits:
            resources[section] = {**(resources.get(section) or {}), **limits}
    if resources == before:
        return spec
    return json.dumps({**document, "linux": {**linux, "resources": resources}}).encode()


def _noted(path: Path) -> Mapping[str, Any]:
    try:
        found: object = json.loads(path.read_bytes())["config"]["cgroups"]
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
