"""Who may read an image that is restored into a user namespace."""

from __future__ import annotations

import os
from pathlib import Path

from engines.criu.mapped import admit

ACCESS = "system.posix_acl_access"


def test_the_parents_of_its_memory_are_opened_with_an_image(tmp_path: Path) -> None:
    image = tmp_path / "image"
    below = image / "parent" / "parent"
    below.mkdir(parents=True, mode=0o700)
    (below / "pages-1.img").write_bytes(b"x")
    (image / "core-1.img").write_bytes(b"x")
    admit(image, 0, "could not restore it")
    assert ACCESS not in os.listxattr(below)
    admit(image, 100000, "could not restore it")
    for path in (image, *image.rglob("*")):
        assert ACCESS in os.listxattr(path), path
    assert ACCESS not in os.listxattr(tmp_path)
