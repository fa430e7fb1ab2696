from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engines.api import ImageCorrupt, ImageError, ImageExists, Needs
from shim.errors import AdmissionRefused, ShimError, UnknownImage, UsageError
from shim.images.documents import encode_needs
from shim.images.layout import PENDING, Reference, parse_reference
from shim.images.manifest import Manifest, Program, Rootfs, Source, build_manifest
from shim.images.store import BrokenImage, Image, Store

NEEDS = Needs(engine="criu", image_version="2", tasks=(), namespaces={})
WEB = Reference(namespace="shop", name="web")


def manifest(**changes: object) -> Manifest:
    return build_manifest(
        spec_data=b"{}",
        source=Source(container_id="c"),
        engine=Program(name="criu"),
        runtime=Program(name="runc"),
        torpor_version="0",
        leave_running=False,
        rootfs=Rootfs(kind="none"),
        host=None,
        created="2026-01-01T00:00:00Z",
        **changes,  # type: ignore[arg-type]
    )


def put(store: Store, reference: Reference = WEB, pages: bytes = b"pages", *, replace: bool = False) -> Image:
    with store.staging() as staged:
        (staged / "checkpoint").mkdir(mode=0o755)
        (staged / "checkpoint" / "pages-1.img").write_bytes(pages)
        (staged / "checkpoint" / "inventory.img").write_bytes(b"inventory")
        (staged / "needs.json").write_bytes(encode_needs(NEEDS))
        return store.commit(staged, reference, manifest=manifest(), replace=replace)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_image_is_found_by_name_and_digest(store: Store) -> None:
    made = put(store)
    found = store.resolve(WEB)
    assert found == made
    assert store.resolve(WEB.with_digest(made.digest)).path == made.path
    assert found.needs == NEEDS
    assert found.reference.digest == made.digest
    assert [image.reference.name for image in store.list("shop")] == ["web"]
    assert store.list("other") == ()
    store.verify(found, pages=True)
    with pytest.raises(UnknownImage, match=made.digest):
        store.resolve(WEB.with_digest("sha256:" + "0" * 64))
    with pytest.raises(UnknownImage, match="images ls"):
        store.resolve(Reference(namespace="", name="web"))


def test_images_that_go_meanwhile_are_left_out(store: Store) -> None:
    """As when two remove, each the last image of its namespace."""
    put(store)
    other = store.path / "images" / "other" / "x"

    def churn() -> None:
        for _ in range(500):
            other.mkdir(mode=0o700, parents=True)
            other.rmdir()
            other.parent.rmdir()

    process = multiprocessing.get_context("fork").Process(target=churn)
    process.start()
    while process.is_alive():
        assert [image.reference.name for image in store.list()] == ["web"]
        assert store.unsettled() == []
    assert process.exitcode == 0


@pytest.mark.parametrize("ask", [lambda store: list(store.entries()), Store.unsettled])
def test_an_image_that_goes_as_it_is_read_is_not_told_of(
    store: Store, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Store], Sequence[object]]
) -> None:
    (put(store).path / PENDING).write_bytes(b"{}")
    load = Store._load

    def gone(self: Store, path: Path, reference: Reference) -> Image:
        shutil.rmtree(path)
        return load(self, path, reference)

    monkeypatch.setattr(Store, "_load", gone)
    assert ask(store) == []


def test_a_file_among_the_namespaces_is_no_obstacle(store: Store) -> None:
    put(store)
    (store.path / "images" / "notes.txt").write_text("of an operator")
    assert [image.reference.name for image in store.list()] == ["web"]
    assert store.unsettled() == []


@pytest.mark.parametrize("ask", [lambda store: list(store.entries()), Store.unsettled])
def test_a_listing_that_fails_is_no_empty_store(
    store: Store, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Store], Sequence[object]]
) -> None:
    """Else the addresses of images that sleep would be freed, and a moved one restored twice."""
    put(store)
    iterdir = Path.iterdir

    def fail(path: Path) -> Iterator[Path]:
        if path.parent.name == "images":
            raise OSError(errno.EMFILE, "Too many open files")
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", fail)
    with pytest.raises(OSError, match="Too many"):
        ask(store)


def test_everything_is_for_root_alone_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        put(Store(tmp_path / "store"))
    finally:
        os.umask(old)
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode & 0o077 == 0, path
        if path.is_file() and path.name != "lock":
            assert mode == 0o400, path


def test_existing_name_is_kept_unless_replaced(store: Store) -> None:
    first = put(store)
    with pytest.raises(ImageExists, match="choose another name"):
        put(store, pages=b"other")
    assert store.resolve(WEB).digest == first.digest
    second = put(store, pages=b"other", replace=True)
    assert store.resolve(WEB).digest == second.digest != first.digest
    store.verify(second, pages=True)
    assert list((store.path / "staging").iterdir()) == []


def test_same_content_under_two_names(store: Store) -> None:
    one = put(store)
    other = put(store, Reference(namespace="", name="copy"))
    assert one.digest == other.digest
    store.remove(WEB)
    assert store.resolve(other.reference).digest == one.digest


def damage(path: Path, data: bytes) -> None:
    path.chmod(0o600)
    path.write_bytes(data)


def test_verify_sees_every_change(store: Store) -> None:
    image = put(store)
    pages, inventory = image.checkpoint_path / "pages-1.img", image.checkpoint_path / "inventory.img"
    damage(pages, b"PAGES")
    store.verify(image, pages=False)
    with pytest.raises(ImageCorrupt, match=r"content of 'checkpoint/pages-1.img' was changed"):
        store.verify(image, pages=True)
    damage(pages, b"page")
    with pytest.raises(ImageCorrupt, match="has 4 bytes, not 5"):
        store.verify(image, pages=False)
    damage(pages, b"pages")
    damage(inventory, b"INVENTORY")
    with pytest.raises(ImageCorrupt, match=r"inventory.img' was changed"):
        store.verify(image, pages=False)
    inventory.unlink()
    with pytest.raises(ImageCorrupt, match="is missing"):
        store.verify(image, pages=False)
    damage_free = put(store, replace=True)
    (damage_free.path / "extra").touch()
    with pytest.raises(ImageCorrupt, match="'extra' is not in its manifest"):
        store.verify(damage_free, pages=False)
    (damage_free.path / "extra").unlink()
    (damage_free.path / "timings.json").touch()
    store.verify(damage_free, pages=True)
    (damage_free.path / "needs.json").unlink()
    (damage_free.path / "needs.json").symlink_to("/etc/passwd")
    with pytest.raises(ImageCorrupt, match=r"needs.json"):
        store.verify(damage_free, pages=False)
    with pytest.raises(ImageCorrupt, match="symbolic links"):
        _ = damage_free.needs


def test_damaged_manifest_is_listed_and_can_be_removed(store: Store) -> None:
    image = put(store)
    damage(image.path / "manifest.json", b"{")
    with pytest.raises(ImageCorrupt, match="could not read manifest of image 'shop/web'"):
        store.resolve(WEB)
    assert store.list() == ()
    assert [type(entry) for entry in store.entries()] == [BrokenImage]
    store.remove(WEB)
    assert list(store.entries()) == []
    assert list((store.path / "staging").iterdir()) == []


def test_link_or_device_is_never_sealed(store: Store) -> None:
    for make in (
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: os.mkfifo(path),
    ):
        with store.staging() as staged:
            (staged / "checkpoint").mkdir()
            make(staged / "checkpoint" / "parent")
            with pytest.raises(ImageError, match="make a full checkpoint"):
                store.commit(staged, WEB, manifest=manifest())
    assert store.list() == ()


def test_sealed_image_must_be_whole_at_commit(store: Store) -> None:
    image = put(store)
    with store.staging() as staged:
        subprocess.run(["cp", "-a", f"{image.path}/.", str(staged)], check=True)
        (staged / "more").touch()
        with pytest.raises(ImageCorrupt, match="not those of its manifest"):
            store.commit(staged, Reference(namespace="", name="copy"))
        (staged / "more").unlink()
        copy = store.commit(staged, Reference(namespace="", name="copy"))
    assert copy.digest == image.digest


def test_move_image_is_used_once(store: Store) -> None:
    image = put(store)
    assert store.consumed_by(image) is None
    store.consume(image, "c1")
    store.consume(image, "c1")
    assert store.consumed_by(image) == "c1"
    with pytest.raises(AdmissionRefused, match="container 'c1' has it"):
        store.consume(image, "c2")
    # The record is of the content, so another name for it does not help.
    copy = put(store, Reference(namespace="shop", name="copy"))
    assert store.consumed_by(copy) == "c1"
    store.remove(WEB)
    assert store.consumed_by(copy) == "c1"
    store.remove(copy.reference)
    assert store.consumed_by(put(store)) is None


def test_unreadable_record_of_use_does_not_count_as_unused(store: Store) -> None:
    image = put(store)
    store.consume(image, "c1")
    damage(store.path / "consumed" / image.digest.removeprefix("sha256:"), b"")
    with pytest.raises(ImageCorrupt, match="could not tell"):
        store.consumed_by(image)


def test_staging_is_cleaned_by_its_owner_and_after_a_death(store: Store) -> None:
    with pytest.raises(RuntimeError), store.staging() as staged:
        (staged / "file").touch()
        assert store.recover() == 0
        assert staged.is_dir()
        raise RuntimeError
    assert list((store.path / "staging").iterdir()) == []
    (store.path / "staging" / "stale").mkdir(mode=0o700)
    assert store.recover() == 1
    assert list((store.path / "staging").iterdir()) == []


def test_an_archive_does_not_say_whose_checkpoint_an_image_is(store: Store) -> None:
    """The next call would undo what is named there."""
    with store.staging() as staged:
        (staged / "checkpoint").mkdir()
        (staged / "needs.json").write_bytes(encode_needs(NEEDS))
        (staged / PENDING).write_text("{}")
        store.commit(staged, WEB, manifest=manifest())
    assert store.resolve(WEB)
    assert not store.unsettled()


@pytest.mark.parametrize(
    ("there", "replaced", "left"),
    [
        ("settled", "settled", "new"),
        ("settled", "pending", "new"),  # killed when it was to take the name, or to give it back
        ("pending", "settled", "both"),
        ("gone", "settled", "old"),
        ("gone", "pending", "none"),
    ],
)
def test_what_a_killed_call_left_of_a_replacement_is_cleared(
    store: Store, there: str, replaced: str, left: str
) -> None:
    old, path = put(store), store.path / "replaced" / "shop:web"
    old.path.rename(path)
    if replaced == "pending":
        (path / PENDING).touch()
    if there != "gone":
        new = put(store, pages=b"other")
        if there == "pending":
            (new.path / PENDING).touch()
    store.recover()
    assert path.exists() is (left == "both")
    assert [image.digest == old.digest for image in store.list()] == {"none": [], "old": [True]}.get(
        left, [False]
    )
    assert os.listdir(store.path / "staging") == []


def test_a_pending_image_is_removed_with_the_one_that_it_replaced(store: Store) -> None:
    put(store)
    with store.staging() as staged:
        (staged / "checkpoint").mkdir()
        (staged / "needs.json").write_bytes(encode_needs(NEEDS))
        store.commit(staged, WEB, manifest=manifest(), replace=True, pending=b"{}")
    store.remove(WEB)
    store.recover()
    assert not store.has(WEB)
    assert os.listdir(store.path / "replaced") == []


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701])
def test_store_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    store = Store(tmp_path / "store")
    put(store)
    store.path.chmod(mode)
    for attempt in (
        lambda: store.resolve(WEB),
        lambda: list(store.entries()),
        lambda: put(store, replace=True),
    ):
        with pytest.raises(ShimError, match="chmod"):
            attempt()


def test_store_that_is_a_link_or_anothers_is_refused(tmp_path: Path) -> None:
    put(Store(tmp_path / "real"))
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ShimError, match="not a directory"):
        Store(tmp_path / "link").resolve(WEB)
    if os.geteuid() == 0:
        os.chown(tmp_path / "real", 1, 1)
        with pytest.raises(ShimError, match="belongs to user 1"):
            Store(tmp_path / "real").resolve(WEB)


def test_image_directory_that_is_a_link_is_no_image(store: Store) -> None:
    image = put(store)
    (image.path.parent / "alias").symlink_to("web")
    with pytest.raises(UnknownImage):
        store.resolve(Reference(namespace="shop", name="alias"))


@pytest.mark.parametrize("name", ["../x", "a/b", "", "..", "-x"])
def test_name_is_checked_again_at_the_store(store: Store, name: str) -> None:
    reference = Reference(namespace="", name=name)
    for attempt in (store.resolve, store.remove, lambda wanted: put(store, wanted)):
        with pytest.raises(UsageError):
            attempt(reference)
    with pytest.raises(UsageError):
        put(store, Reference(namespace=name or "..", name="a"))


def test_empty_store_lists_nothing_and_finds_nothing(store: Store) -> None:
    assert store.list() == ()
    with pytest.raises(UnknownImage):
        store.resolve(parse_reference("a", namespace=""))
    assert not store.path.exists()
