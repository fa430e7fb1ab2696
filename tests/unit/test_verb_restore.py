"""The restore verb's choice of an engine: a document in the caller's directory does not make it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from engines.api import ImageCorrupt
from shim import argv, config
from shim.images.layout import EXTRAS_PREFIX, MANIFEST
from shim.images.manifest import FileDigest, Program, Rootfs, Source, build_manifest
from shim.verbs import restore
from shim.verbs.context import Context
from tests.support.containers import make_spec


def attempt(tmp_path: Path, *files: str, engine: str | None) -> None:
    """A restore of an image with these files, whose manifest names this engine."""
    image, bundle = tmp_path / "image", tmp_path / "bundle"
    for path in (image, bundle):
        path.mkdir()
    (bundle / "config.json").write_text(json.dumps(make_spec(["app"])))
    for name in files:
        (image / name).touch()
    if engine is not None:
        manifest = build_manifest(
            spec_data=b"{}",
            source=Source(container_id="c"),
            engine=Program(name=engine),
            runtime=Program(name="runc"),
            torpor_version="0",
            leave_running=True,
            rootfs=Rootfs(kind="none"),
            host=None,
        )
        empty = FileDigest(sha256=hashlib.sha256(b"").hexdigest(), size_bytes=0)
        manifest = replace(manifest, files={f"checkpoint/{name}": empty for name in files})
        (image / f"{EXTRAS_PREFIX}{MANIFEST}").write_bytes(manifest.to_bytes())
    settings = {
        "RUNTIME": "/bin/false",
        "STATE": str(tmp_path / "state"),
        "STORE": str(tmp_path / "store"),
        "CONFIG": str(tmp_path / "config.toml"),
    }
    words = ["restore", "--detach", "--image-path", str(image), "--bundle", str(bundle), "c"]
    call = argv.parse(words, "runc")
    restore.serve(Context(call=call, settings=settings, config=config.load(settings)))


@pytest.mark.parametrize("engine", ["fake", "gvisor", "none"])
def test_a_manifest_cannot_choose_who_judges(tmp_path: Path, engine: str) -> None:
    with pytest.raises(ImageCorrupt, match=f"its manifest names engine '{engine}', but criu wrote it"):
        attempt(tmp_path, "inventory.img", engine=engine)
    assert not (tmp_path / "state" / "containers").exists()


@pytest.mark.parametrize("engine", ["fake", None])
def test_a_directory_of_no_engine_is_no_image(tmp_path: Path, engine: str | None) -> None:
    with pytest.raises(ImageCorrupt, match="neither an image of CRIU"):
        attempt(tmp_path, "fake-memory.json", engine=engine)
