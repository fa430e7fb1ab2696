"""`torpor restore` has no caller that would delete what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines.api import EngineSettings
from shim import restore, state
from shim.cli import restore as cli
from shim.cli.node import Node
from shim.errors import AdmissionRefused
from shim.state import ContainerState


@pytest.mark.parametrize("used_by", [None, "a of /r", "b of /r"])
def test_a_container_that_may_not_start_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used_by: str | None
) -> None:
    """But one that has used up its image does: it is all there is of the job, and may be running."""
    asked, runtime, bundle = tmp_path / "asked", tmp_path / "runc", tmp_path / "bundle"
    told = json.dumps({"id": "b", "status": "paused", "pid": 1, "bundle": str(bundle)})
    runtime.write_text(f"#!/bin/sh\necho \"$@\" >>{asked}\necho '{told}'\n")
    runtime.chmod(0o755)
    bundle.mkdir()
    (bundle / "config.json").write_text("{}")
    conf = tmp_path / "runtime.conf"
    conf.write_text(
        f"RUNTIME={runtime}\nSTATE={tmp_path}/run\nSTORE={tmp_path}/store\nCONFIG={tmp_path}/none\n"
    )

    def at_create(config: object, store: object, image: object, target: restore.Target, *_: object) -> object:
        found = ContainerState(
            container_id="b",
            root=target.root,
            bundle=str(target.bundle_path),
            phase="held",
            engine="criu",
            image="web",
            digest="",
            use="move",
            created="",
        )
        state.save(target.directory, found)
        return found, ()

    def refuse(config: object, name: str, directory: Path, settings: EngineSettings) -> bool:
        raise AdmissionRefused(f"could not use image 'web': container 'a' has it ({name})")

    image = SimpleNamespace(manifest=SimpleNamespace(engine=SimpleNamespace(name="criu"), terminal=False))
    monkeypatch.setattr(cli, "this_node", lambda: Node(conf))
    monkeypatch.setattr(cli, "settle", lambda *_: None)
    monkeypatch.setattr("shim.images.store.Store.resolve", lambda *_: image)
    monkeypatch.setattr("shim.images.store.Store.consumed_by", lambda *_: used_by)
    monkeypatch.setattr(restore, "at_create", at_create)
    monkeypatch.setattr(cli, "start", refuse)
    words = ["web", "--bundle", str(bundle), "--id", "b", "--root", "/r", "--detach"]
    with pytest.raises(AdmissionRefused, match="has it"):
        cli.command.main(words, standalone_mode=False)
    ended = "--root /r delete --force b" in asked.read_text().splitlines()
    left = list((tmp_path / "run").glob("containers/*/b/state.json"))
    assert (ended, bool(left)) == ((False, True) if used_by == "b of /r" else (True, False))
