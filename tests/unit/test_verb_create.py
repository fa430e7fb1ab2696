"""The create verb: when a container that could not be restored may be started cold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shim import argv, config
from shim.errors import CalledOff
from shim.images.layout import Reference
from shim.promise import Plan, Promise
from shim.verbs import create
from shim.verbs.context import Context
from tests.support.containers import make_spec


def attempt(tmp_path: Path, network: str) -> int | None:
    """`create` of a pod's container whose image is not in the store; None is a cold start."""
    bundle = tmp_path / "bundle"
    bundle.mkdir(exist_ok=True)
    notes = {
        "io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.container-name": "main",
        "io.kubernetes.cri.sandbox-id": "pod",
        "io.kubernetes.cri.sandbox-namespace": "default",
        "torpor.dev/restore-from": "web",
        "torpor.dev/on-restore-failure": "cold-start",
        "torpor.dev/network": network,
    }
    netns_path = Path("/run/netns/absent")
    spec = make_spec(["app"], netns_path=netns_path, annotations=notes)
    (bundle / "config.json").write_text(json.dumps(spec))
    settings = {
        "RUNTIME": "/bin/false",
        "STATE": str(tmp_path / "state"),
        "STORE": str(tmp_path / "store"),
        "CONFIG": str(tmp_path / "config.toml"),
    }
    call = argv.parse(["create", "--bundle", str(bundle), "c"], "runc")
    return create.serve(Context(call=call, settings=settings, config=config.load(settings)))


def test_what_may_run_elsewhere_is_never_started_cold(tmp_path: Path) -> None:
    with pytest.raises(CalledOff, match="not started cold"):  # nobody has announced it yet
        attempt(tmp_path, "keep")
    (tmp_path / "store").mkdir(mode=0o700, exist_ok=True)
    promise = Promise.of(tmp_path / "store", Reference(namespace="default", name="web"))
    promise.make(Plan(migration="0" * 16, name="main"))
    promise.decide("0" * 16, "abort")
    with pytest.raises(CalledOff, match="called off"):
        attempt(tmp_path, "keep")
    promise.remove("0" * 16)
    with pytest.raises(CalledOff, match="not started cold"):  # the kubelet calls again
        attempt(tmp_path, "keep")


def test_what_keeps_no_connections_is_started_cold(tmp_path: Path) -> None:
    assert attempt(tmp_path, "new") is None
