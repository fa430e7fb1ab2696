"""Another tool's annotation that names a checkpoint archive (off unless runtime.conf says FOREIGN=1).

Such a path comes from the pod. So it must lie under a directory that only root may write, no link is followed
on the way, and the archive is copied into the store, and verified there, before anything of it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from engines.api import ImageExists
from shim.config import Config
from shim.errors import AdmissionRefused, UnknownImage
from shim.images.archive import Inspect, import_archive
from shim.images.beneath import open_plain
from shim.images.layout import Reference
from shim.images.store import Image, Store
from shim.version import VERSION


def take(config: Config, store: Store, path: Path, *, namespace: str, inspect: Inspect) -> Image:
    """The image that an archive holds, imported into the store on its first use.

    path: as the annotation gives it. namespace: the pod's. Raises AdmissionRefused, ImageError, ShimError.
    """
    root = next((place for place in config.archive_roots if path.is_relative_to(place)), None)
    if root is None:
        raise AdmissionRefused(
            f"could not use archive '{path}': it lies under none of the allowed directories "
            f"({', '.join(map(str, config.archive_roots))}); see archive_roots in config.toml"
        )
    try:
        status = root.stat(follow_symlinks=False)
        if status.st_uid != 0 or status.st_mode & 0o022:
            raise AdmissionRefused(
                f"could not use archive '{path}': {root} is writable by others than root; chmod 755 {root}"
            )
        descriptor = open_plain(root, str(path.relative_to(root)))
    except OSError as error:
        raise AdmissionRefused(f"could not use archive '{path}': {error.strerror}; check the path") from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        identity = f"{path}\0{found.st_dev}\0{found.st_ino}\0{found.st_mtime_ns}\0{found.st_size}"
        name = f"archive-{hashlib.sha256(os.fsencode(identity)).hexdigest()[:32]}"
        reference = Reference(namespace=namespace, name=name)
        with contextlib.suppress(UnknownImage):
            return store.resolve(reference)
        with contextlib.suppress(ImageExists):  # another container of the pod was faster
            import_archive(file, store, reference, inspect=inspect, torpor_version=VERSION)
        return store.resolve(reference)
