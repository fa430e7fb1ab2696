"""Another tool's annotation that names a checkpoint archive (off unless runtime.conf says FOREIGN=1).

Such a path comes from the pod. So it must lie under a directory that only root may write, no link is followed
on the way, and the archive is copied into the store, and verified there, before anything of it is used. It
must have been taken in the pod's own namespace: nobody else says to whom it belongs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from functools import partial
from pathlib import Path

from engines.api import ImageExists
from shim.config import Config
from shim.errors import AdmissionRefused, UnknownImage
from shim.images.archive import Inspect, import_archive
from shim.images.beneath import open_plain
from shim.images.layout import Reference
from shim.images.manifest import Manifest
from shim.images.store import Image, Store
from shim.version import VERSION


def take(config: Config, store: Store, path: Path, *, namespace: str, inspect: Inspect) -> Image:
    """The image that an archive holds, imported into the store on its first use.

    path: as the annotation gives it. namespace: the pod's, which must be the archive's too. Raises
    AdmissionRefused, ImageError, ShimError.
    """
    root = next((place for place in config.archive_roots if path.is_relative_to(place)), None)
    if root is None:
        raise AdmissionRefused(
            f"could not use archive '{path}': it lies under none of the allowed directories "
            f"({', '.join(map(str, config.archive_roots))}); see archive_roots in config.toml"
        )
    inside = path.relative_to(root)
    try:
        for place in (root, *(root / parent for parent in reversed(inside.parents)), path):
            _refuse_writable(path, place, place.stat(follow_symlinks=False))
        descriptor = open_plain(root, str(inside))
    except OSError as error:
        raise AdmissionRefused(f"could not use archive '{path}': {error.strerror}; check the path") from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        _refuse_writable(path, path, found)
        identity = f"{path}\0{found.st_dev}\0{found.st_ino}\0{found.st_mtime_ns}\0{found.st_size}"
        name = f"archive-{hashlib.sha256(os.fsencode(identity)).hexdigest()[:32]}"
        reference = Reference(namespace=namespace, name=name)
        judge = partial(_refuse_others, path, namespace)
        with contextlib.suppress(UnknownImage):
            image = store.resolve(reference)
            judge(image.manifest)
            return image
        with contextlib.suppress(ImageExists):  # another container of the pod was faster
            import_archive(file, store, reference, inspect=inspect, torpor_version=VERSION, judge=judge)
        return store.resolve(reference)


def _refuse_others(path: Path, namespace: str, manifest: Manifest) -> None:
    taken = manifest.source.pod_namespace
    if taken != namespace:
        raise AdmissionRefused(
            f"could not use archive '{path}': it was taken in namespace '{taken}', and the pod is of "
            f"'{namespace}'; if that is meant, let root import it with torpor images import --namespace"
        )


def _refuse_writable(path: Path, place: Path, status: os.stat_result) -> None:
    """What others than root may write can hold, or become, whatever they like."""
    writable = status.st_mode & 0o022 and not stat.S_ISLNK(status.st_mode)
    if status.st_uid != 0 or writable:
        raise AdmissionRefused(
            f"could not use archive '{path}': {place} is writable by others than root; chown root {place} "
            f"and chmod go-w {place}"
        )
