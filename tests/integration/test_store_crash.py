"""The store when its writer is killed and when the disk is full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.api import ImageError, Needs
from shim.errors import UnknownImage
from shim.images.archive import import_archive, open_archive
from shim.images.documents import encode_needs
from shim.images.layout import Reference
from shim.images.manifest import Program, Rootfs, Source, build_manifest
from shim.images.store import Store

WEB = Reference(namespace="shop", name="web")
NEEDS = Needs(engine="criu", image_version="2", tasks=(), namespaces={})
N_KILLS = 30
PAGES_BYTES = 12 << 20

# Commits an image of one repeated byte, then says so. It replaces what is there.
WRITER = """
import sys
from pathlib import Path
from shim.images.store import Store
from tests.integration.test_store_crash import put
put(Store(Path(sys.argv[1])), bytes([int(sys.argv[2])]), replace=True)
"""


def put(store: Store, fill: bytes, *, replace: bool = False, n_bytes: int = PAGES_BYTES) -> None:
    manifest = build_manifest(
        spec_data=b"{}",
        source=Source(container_id="c"),
        engine=Program(name="criu"),
        runtime=Program(name="runc"),
        torpor_version="0",
        leave_running=False,
        rootfs=Rootfs(kind="none"),
        host=None,
    )
    with store.staging() as staged:
        (staged / "checkpoint").mkdir()
        for number in range(3):
            with open(staged / "checkpoint" / f"pages-{number}.img", "wb") as file:
                for _ in range(n_bytes // 3 >> 16):
                    file.write(fill * (1 << 16))
        (staged / "needs.json").write_bytes(encode_needs(NEEDS))
        store.commit(staged, WEB, manifest=manifest, replace=replace)


def test_killed_writer_leaves_a_whole_image_or_none(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    command = [sys.executable, "-c", WRITER, str(store.path)]
    root = Path(__file__).parents[2]
    started = time.monotonic()
    subprocess.run([*command, "1"], check=True, cwd=root)
    whole_s = time.monotonic() - started
    outcomes: set[str] = set()
    for number in range(N_KILLS + 1):
        if number % 2:
            store.remove(WEB)
        before = digest(store)
        with subprocess.Popen([*command, str(number + 2)], cwd=root) as writer:
            # Spread the kills over the whole run: start of the interpreter, writing, hashing, renaming.
            try:
                writer.wait(None if number == N_KILLS else whole_s * number / N_KILLS)
            except subprocess.TimeoutExpired:
                writer.send_signal(signal.SIGKILL)
        after = digest(store)
        store.recover()
        assert list((store.path / "staging").iterdir()) == []
        assert digest(store) == after
        outcomes.add("as before" if after == before else "new")
        if after is None:
            put(store, b"\0")
    assert outcomes == {"as before", "new"}


def digest(store: Store) -> str | None:
    try:
        image = store.resolve(WEB)
    except UnknownImage:
        return None
    store.verify(image, pages=True)
    return image.digest


def test_writer_is_not_disturbed_by_another_that_cleans_up(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.ensure()
    command = [sys.executable, "-c", WRITER, str(store.path), "7"]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as writer:
        while writer.poll() is None:
            store.recover()
    assert writer.returncode == 0
    store.verify(store.resolve(WEB), pages=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "torpor-test", str(path)], check=True)
    yield path
    subprocess.run(["umount", str(path)], check=True)


def used_bytes(path: Path) -> int:
    space = os.statvfs(path)
    return (space.f_blocks - space.f_bfree) * space.f_frsize


@pytest.mark.engine
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, needs root")
def test_full_disk_leaves_the_store_as_it_was(small_disk: Path) -> None:
    store = Store(small_disk / "store")
    put(store, b"a", n_bytes=1 << 20)
    before, used = store.resolve(WEB).digest, used_bytes(small_disk)
    with pytest.raises((ImageError, OSError), match="No space left"):
        put(store, b"b", replace=True)
    assert used_bytes(small_disk) == used
    assert store.resolve(WEB).digest == before
    store.verify(store.resolve(WEB), pages=True)


@pytest.mark.engine
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, needs root")
def test_full_disk_at_every_point_of_sealing(small_disk: Path) -> None:
    store = Store(small_disk / "store")
    put(store, b"a", n_bytes=1 << 20)
    before, used = store.resolve(WEB).digest, used_bytes(small_disk)
    filler = small_disk / "filler"
    # Less and less room: pages, then small files, then directories and the manifest no longer fit.
    for n_free in range(0, 2 << 20, 64 << 10):
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, (8 << 20) - used - n_free - (64 << 10))
        try:
            put(store, b"b", replace=True, n_bytes=1 << 20)
        except (ImageError, OSError) as error:
            assert "No space left" in str(error)
            assert store.resolve(WEB).digest == before
        else:
            break
        finally:
            filler.unlink()
        assert used_bytes(small_disk) == used
    assert store.resolve(WEB).digest != before


@pytest.mark.engine
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, needs root")
def test_import_onto_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/inventory.img").write_bytes(b"i")
    (tmp_path / "checkpoint/pages-1.img").write_bytes(bytes(16 << 20))
    subprocess.run(["tar", "cf", "a.tar", "checkpoint"], check=True, cwd=tmp_path)
    store = Store(small_disk / "store")
    store.ensure()
    used = used_bytes(small_disk)
    with open_archive(tmp_path / "a.tar") as file, pytest.raises(ImageError, match="torpor images rm"):
        import_archive(file, store, WEB, inspect=lambda engine, path: NEEDS, torpor_version="0")
    assert used_bytes(small_disk) <= used + 4096  # the lock file
    assert list((store.path / "staging").iterdir()) == []
    assert store.list() == ()
