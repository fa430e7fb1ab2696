"""An image and what belongs to it as one file, to be woken up on another machine."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import msgspec

from shim.images.documents import decode_needs, encode_needs
from shim.images.manifest import Manifest
from tests.truth.place import Dumped
from tests.truth.scenario import Source

_IMAGE, _ROOTFS, _SPEC, _NEEDS, _MANIFEST = "image", "rootfs", "spec.json", "needs.json", "manifest.json"


def pack(dumped: Dumped, archive: Path, work: Path) -> None:
    """Write the file. work: an empty directory."""
    (work / _SPEC).write_text(json.dumps(dumped.spec))
    (work / _NEEDS).write_bytes(encode_needs(dumped.needs))
    (work / _MANIFEST).write_bytes(msgspec.json.encode(dumped.manifest))
    with tarfile.open(archive, "w") as tar:
        for name in (_SPEC, _NEEDS, _MANIFEST):
            tar.add(work / name, name)
        tar.add(dumped.image_path, _IMAGE)
        tar.add(dumped.rootfs_path, _ROOTFS)


def unpack(archive: Path, path: Path, source: Source) -> Dumped:
    """Read it into a directory."""
    with tarfile.open(archive) as tar:
        tar.extraction_filter = lambda member, _: member  # 3.12 warns without; the keyword is of 3.11.4
        tar.extractall(path)
    return Dumped(
        source=source,
        spec=json.loads((path / _SPEC).read_text()),
        rootfs_path=path / _ROOTFS,
        image_path=path / _IMAGE,
        needs=decode_needs((path / _NEEDS).read_bytes(), what=_NEEDS),
        manifest=msgspec.json.decode((path / _MANIFEST).read_bytes(), type=Manifest),
        ticks=0,
        network=None,
    )
