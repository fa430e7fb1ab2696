"""What a failed restore may not leave unsaid."""

from __future__ import annotations

import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shim import restore
from shim.errors import NotUndone
from shim.images.rootfs import RootfsView


def test_a_plain_directory_that_was_changed_is_not_passed_off_as_new(tmp_path: Path) -> None:
    """It has no upper directory to go back to, so a cold start over it would see the dump's files."""
    (tmp_path / "image").mkdir()
    with tarfile.open(tmp_path / "image" / "rootfs-diff.tar", "w") as tar:
        tar.add(__file__, "changed")
    root = tmp_path / "root"
    root.mkdir()
    image = SimpleNamespace(
        path=tmp_path / "image", manifest=SimpleNamespace(rootfs=SimpleNamespace(whiteouts="deleted.files"))
    )
    view = RootfsView(path=root, kind="directory")
    with (
        pytest.raises(NotUndone, match=r"no memory; the root file system .* was changed: make it anew"),
        restore._applied(cast("Any", image), view, tmp_path / "upper"),
    ):
        assert (root / "changed").exists()
        raise RuntimeError("no memory")
