"""An archive that a pod's annotation names: only from root's directories, over no link, copied first."""

from pathlib import Path

import pytest

from engines.api import ImageCorrupt, Needs
from shim.config import Config
from shim.errors import AdmissionRefused
from shim.foreign import take
from shim.images.store import Store


def inspect(engine: str, path: Path) -> Needs:
    raise AssertionError(f"nothing of {path} may be read by {engine}")


def attempt(tmp_path: Path, path: Path) -> None:
    config = Config(runtime_path=Path("/bin/true"), archive_roots=(tmp_path / "allowed",))
    take(config, Store(tmp_path / "store"), path, namespace="team", inspect=inspect)


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    path = tmp_path / "allowed"
    path.mkdir(mode=0o755)
    return path


def test_other_directories_are_refused(tmp_path: Path, allowed: Path) -> None:
    with pytest.raises(AdmissionRefused, match="lies under none of the allowed directories"):
        attempt(tmp_path, tmp_path / "x.tar")


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, allowed: Path) -> None:
    allowed.chmod(0o777)
    (allowed / "x.tar").touch()
    with pytest.raises(AdmissionRefused, match="writable by others than root"):
        attempt(tmp_path, allowed / "x.tar")


def test_no_link_is_followed(tmp_path: Path, allowed: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (allowed / "x.tar").symlink_to(tmp_path / "secret")
    (allowed / "d").symlink_to(tmp_path)
    for path in (allowed / "x.tar", allowed / "d" / "secret", allowed / "absent.tar"):
        with pytest.raises(AdmissionRefused, match="check the path"):
            attempt(tmp_path, path)


def test_what_is_no_archive_leaves_nothing_in_the_store(tmp_path: Path, allowed: Path) -> None:
    (allowed / "x.tar").write_text("no archive")
    with pytest.raises(ImageCorrupt):
        attempt(tmp_path, allowed / "x.tar")
    assert not list((tmp_path / "store").glob("images/*/*"))
    assert not list((tmp_path / "store").glob("staging/*"))
