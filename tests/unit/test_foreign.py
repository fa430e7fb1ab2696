"""An archive that a pod's annotation names: only from root's directories, over no link, copied first."""

import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from engines.api import ImageCorrupt, Needs
from shim.config import Config
from shim.errors import AdmissionRefused
from shim.foreign import take
from shim.images.archive import Inspect
from shim.images.store import Image, Store


def inspect(engine: str, path: Path) -> Needs:
    raise AssertionError(f"nothing of {path} may be read by {engine}")


def attempt(tmp_path: Path, path: Path, inspect: Inspect = inspect) -> Image:
    config = Config(runtime_path=Path("/bin/true"), archive_roots=(tmp_path / "allowed",))
    return take(config, Store(tmp_path / "store"), path, namespace="team", inspect=inspect)


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    path = tmp_path / "allowed"
    path.mkdir(mode=0o755)
    return path


def test_other_directories_are_refused(tmp_path: Path, allowed: Path) -> None:
    with pytest.raises(AdmissionRefused, match="lies under none of the allowed directories"):
        attempt(tmp_path, tmp_path / "x.tar")


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, allowed: Path) -> None:
    inner = allowed / "a" / "b"
    inner.mkdir(parents=True)
    archive = inner / "x.tar"
    archive.write_text("no archive")
    archive.chmod(0o644)
    with pytest.raises(ImageCorrupt):
        attempt(tmp_path, archive)
    for place in (allowed, inner.parent, inner, archive):
        mode = place.stat().st_mode & 0o777
        for wider in (0o020, 0o002):
            place.chmod(mode | wider)
            with pytest.raises(AdmissionRefused, match=f"{place} is writable by others than root"):
                attempt(tmp_path, archive)
        place.chmod(mode)
        os.chown(place, 1000, 0)
        with pytest.raises(AdmissionRefused, match=f"{place} is writable by others than root"):
            attempt(tmp_path, archive)
        os.chown(place, 0, 0)


def test_no_link_is_followed(tmp_path: Path, allowed: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (allowed / "x.tar").symlink_to(tmp_path / "secret")
    (allowed / "d").symlink_to(tmp_path)
    for path in (allowed / "x.tar", allowed / "d" / "secret", allowed / "absent.tar"):
        with pytest.raises(AdmissionRefused, match="check the path"):
            attempt(tmp_path, path)


def archive_of(namespace: str) -> bytes:
    """What containerd writes for a container of a pod in this namespace."""
    notes = {
        "io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.container-name": "app",
        "io.kubernetes.cri.sandbox-namespace": namespace,
    }
    files = {
        "checkpoint/inventory.img": b"inventory",
        "config.dump": b"{}",
        "spec.dump": json.dumps({"annotations": notes}).encode(),
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def read(engine: str, path: Path) -> Needs:
    return Needs(engine=engine, image_version="2", tasks=(), namespaces={})


def test_an_archive_of_another_namespace_is_refused(tmp_path: Path, allowed: Path) -> None:
    path = allowed / "x.tar"
    path.write_bytes(archive_of("victim"))
    with pytest.raises(AdmissionRefused, match="taken in namespace 'victim', and the pod is of 'team'"):
        attempt(tmp_path, path)
    assert Store(tmp_path / "store").list() == ()


def test_an_archive_of_the_pods_own_namespace_is_imported_once(tmp_path: Path, allowed: Path) -> None:
    path = allowed / "x.tar"
    path.write_bytes(archive_of("team"))
    first = attempt(tmp_path, path, inspect=read)
    assert first.reference.namespace == "team"
    assert attempt(tmp_path, path).digest == first.digest


def test_what_is_no_archive_leaves_nothing_in_the_store(tmp_path: Path, allowed: Path) -> None:
    (allowed / "x.tar").write_text("no archive")
    with pytest.raises(ImageCorrupt):
        attempt(tmp_path, allowed / "x.tar")
    assert not list((tmp_path / "store").glob("images/*/*"))
    assert not list((tmp_path / "store").glob("staging/*"))
