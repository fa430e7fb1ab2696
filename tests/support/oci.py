"""OCI image layouts as tar files, as `ctr images import` reads them.

An image is a root filesystem of `rootfs` and the programs of tests/workloads, as /workloads.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.rootfs import CACHE, CHECKOUT, rootfs

WORKLOADS = CHECKOUT / "tests" / "workloads"

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# Reaps what is left to it in a shared pid namespace and ends at once on SIGTERM, as a pause container must.
PAUSE = ("/bin/sh", "-c", 'trap "exit 0" TERM INT; while :; do sleep 3600 & wait $!; done')
IMAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "pause": ("busybox", PAUSE),
    "busybox": ("busybox", ("/bin/sh",)),
    "python": ("python", ("/usr/bin/python3",)),
    "redis": ("redis", ("/usr/bin/redis-server",)),
}


def reference(name: str) -> str:
    """The full name under which image `name` is imported."""
    return f"docker.io/torpor-tests/{name}:1"


def layout(name: str) -> Path:
    """A tar of an OCI layout with one image, built if it is not cached."""
    base, argv = IMAGES[name]
    root = rootfs(base)
    programs = {path.name: path.read_bytes() for path in sorted(WORKLOADS.glob("*.py"))}
    key = hashlib.sha256(repr((root.name, argv, reference(name), programs)).encode()).hexdigest()[:16]
    target = CACHE / f"{name}-{key}.oci.tar"
    with (CACHE / "layout.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            scratch = target.with_suffix(f".{os.getpid()}")
            _write(scratch, root, argv, programs, reference(name))
            scratch.rename(target)
    return target


def _write(target: Path, root: Path, argv: Sequence[str], programs: Mapping[str, bytes], name: str) -> None:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in sorted(root.iterdir()):
            tar.add(entry, arcname=entry.name)
        for file, program in programs.items():
            _add(tar, f"workloads/{file}", program)
    content = layer.getvalue()
    config = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {"Cmd": list(argv), "Env": ["PATH=/usr/bin:/bin"], "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [_digest(content)]},
    }
    blobs: dict[str, bytes] = {_digest(content): content}
    layer_descriptor = _descriptor("application/vnd.oci.image.layer.v1.tar", content)
    config_bytes = _json(config)
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _descriptor("application/vnd.oci.image.config.v1+json", config_bytes),
        "layers": [layer_descriptor],
    }
    manifest_bytes = _json(manifest)
    blobs |= {_digest(config_bytes): config_bytes, _digest(manifest_bytes): manifest_bytes}
    entry = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest_bytes)
    entry["annotations"] = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": "1"}
    with tarfile.open(target, "w") as tar:
        _add(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(tar, "index.json", _json({"schemaVersion": 2, "manifests": [entry]}))
        for digest, blob in blobs.items():
            _add(tar, "blobs/" + digest.replace(":", "/"), blob)


def _descriptor(media_type: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(content), "size": len(content)}


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _json(document: object) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
