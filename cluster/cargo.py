"""What travels: the root file system beforehand, and the image while nobody runs."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import threading
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from cluster.channel import Channel, OnChunk
from cluster.messages import Send
from engines.api import printable
from shim import bundle
from shim.errors import ShimError
from shim.images import layout
from shim.images.layout import is_page_file
from shim.images.manifest import FileDigest, Manifest
from shim.images.rootfs import RootfsView, device_nodes, find_rootfs, write_diff
from shim.images.seal import list_files, locate, write_file

_PART_BYTES = 1 << 20
_LOOK_S = 0.005
_N_NAMED = 3
LOWER = "lower"
"""In the directory for what is made on the way: where lower layers are put together."""


def root_of(bundle_path: Path) -> RootfsView:
    """The root file system of a bundle. Raises ImageError, ShimError."""
    spec = bundle.read_spec(bundle_path)
    return find_rootfs(bundle_path, str(bundle.rootfs_path(Path(), spec)))


def left_behind(bundle_path: Path, spec: bundle.Spec, *, changed: bool) -> tuple[str, ...]:
    """A sentence if the root file system has device nodes: what they lead to is another node's own.

    changed: the lower layers are there already. Raises ImageError, ShimError, OSError.
    """
    points = [str(mount.get("destination")) for mount in spec.get("mounts") or ()]
    nodes = device_nodes(root_of(bundle_path), mount_points=points, changed=changed)
    if not nodes:
        return ()
    more = f" and {len(nodes) - _N_NAMED} more" if len(nodes) > _N_NAMED else ""
    count = "1 device node does" if len(nodes) == 1 else f"{len(nodes)} device nodes do"
    named = ", ".join(map(printable, nodes[:_N_NAMED])) + more
    words = f"{count} not come along with its root file system: {named}; make there what is needed (mknod)"
    return (words,)


def send_base(channel: Channel, view: RootfsView, scratch: Path) -> None:
    """Send the lower layers of an overlay as one archive; of a plain directory the image will hold all.

    scratch: a directory for what is made on the way. Raises Lost, ImageError, ShimError, OSError.
    """
    if view.kind != "overlay":
        return
    out = scratch / "base"
    out.mkdir()
    with _merged(view, scratch / LOWER) as lower:
        write_diff(RootfsView(path=lower, kind="directory"), out, full_copy=True)
    send(channel, "base", layout.ROOTFS_DIFF, out / layout.ROOTFS_DIFF)
    shutil.rmtree(out)


def send_memory(
    channel: Channel, image_path: Path, dumped: threading.Event, before: Mapping[str, FileDigest]
) -> dict[str, FileDigest]:
    """Send what the engine writes into an image; digests by name. before: of what was sent already.

    Pages go while it still writes them, for it only ever adds to those; all else when it has dumped. Nothing
    is forced to this node's disk: the image is the target's. Raises Lost, ImageError, OSError.
    """
    checkpoint_path = image_path / layout.CHECKPOINT
    sent: dict[str, int] = {}
    complete = False
    while not complete:
        complete = dumped.is_set()
        for path in checkpoint_path.iterdir():
            name = f"{layout.CHECKPOINT}/{path.name}"
            offset = sent.get(name, 0)
            enough = offset + (1 if complete else _PART_BYTES)
            if is_page_file(name) and path.stat().st_size >= enough:
                sent[name] = send(channel, "image", name, path, offset=offset)
        dumped.wait(_LOOK_S)
    # The channel vouches for them, and the image is used once: hashing takes as long as sending.
    digests = {name: FileDigest(sha256="", size_bytes=size_bytes) for name, size_bytes in sent.items()}
    digests |= before
    _send_all(channel, image_path, f"{layout.CHECKPOINT}/", digests)
    return digests


def send_rest(
    channel: Channel, image_path: Path, manifest: Manifest, digests: Mapping[str, FileDigest]
) -> int:
    """Send what is missing of an image and last its manifest, with the digests; bytes of it all.

    digests: of what was sent. Raises Lost, ImageError, OSError.
    """
    found = dict(digests)
    _send_all(channel, image_path, "", found)
    path = image_path / layout.MANIFEST
    write_file(path, replace(manifest, files=found).to_bytes())
    send(channel, "image", layout.MANIFEST, path)
    return sum(file.size_bytes for file in found.values())


def _send_all(channel: Channel, image_path: Path, prefix: str, digests: dict[str, FileDigest]) -> None:
    """Send the files whose names begin so and that were not sent, and note their digests."""
    checkpoint_path = image_path / layout.CHECKPOINT
    sizes = list_files(checkpoint_path=checkpoint_path, extras_path=image_path)
    for name, size_bytes in sizes.items():
        if not name.startswith(prefix) or name in digests:
            continue
        directory, below = locate(name, checkpoint_path=checkpoint_path, extras_path=image_path)
        digest = hashlib.sha256()
        send(channel, "image", name, directory / below, digest.update, more=True)
        digests[name] = FileDigest(sha256=digest.hexdigest(), size_bytes=size_bytes)
    channel.flush()


def send(
    channel: Channel,
    place: Literal["base", "image"],
    name: str,
    path: Path,
    on_chunk: OnChunk | None = None,
    *,
    offset: int = 0,
    more: bool = False,
) -> int:
    """Send one file, from `offset` on; its size in bytes. on_chunk: called with each piece of it.

    more: see `Channel.send_file`. Raises Lost, OSError.
    """
    size_bytes = path.stat().st_size
    said = Send(place=place, name=name, size_bytes=size_bytes - offset, offset=offset)
    channel.send(said, more=more or said.size_bytes > 0)
    channel.send_file(path, said.size_bytes, on_chunk, offset=offset, more=more)
    return size_bytes


@contextlib.contextmanager
def _merged(view: RootfsView, point: Path) -> Generator[Path]:
    """The lower layers of an overlay as one directory."""
    if len(view.lower_paths) == 1:
        yield view.lower_paths[0]
        return
    point.mkdir()
    layers = ":".join(map(str, view.lower_paths))
    try:
        run("mount", "-t", "overlay", "-o", f"ro,lowerdir={layers}", "overlay", str(point))
        yield point
    finally:
        unmerge(point)
        point.rmdir()


def unmerge(point: Path) -> None:
    """Unmount what `send_base` has put together there, if it was killed before it could. Raises ShimError."""
    if point.is_mount():
        run("umount", "--lazy", str(point))


def run(*argv: str) -> None:
    """Run a short program. Raises ShimError with what it said."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ShimError(f"could not {argv[0]} {argv[-1]}: {done.stderr.strip()}")
