"""Checkpoint archives of other tools, well-formed and hostile."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import zstandard

from engines.api import ImageCorrupt, ImageError, ImageExists, Needs, NotSupported
from engines.criu import extras
from engines.cuda import records
from shim.images.archive import Import, import_archive, open_archive
from shim.images.layout import Reference
from shim.images.manifest import Program, Rootfs, Source, build_manifest
from shim.images.seal import flatten, seal
from shim.images.store import Store

NEEDS = Needs(engine="criu", image_version="2", tasks=(), namespaces={"network": "external"})
WEB = Reference(namespace="shop", name="web")
SPEC = {
    "process": {"args": ["x"]},
    "annotations": {"io.kubernetes.cri.container-name": "web", "io.kubernetes.cri.sandbox-namespace": "evil"},
}
CONFIG = {
    "id": "abc",
    "name": "web",
    "rootfsImageName": "docker.io/library/web:1",
    "runtime": "runc",
    "checkpointedTime": "2026-11-29T18:00:00.5Z",
    "more": {"unknown": 1},
}
Members = Mapping[str, bytes | None]  # None: a directory


def tar_of(members: Members) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            if data is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data or b""))
    return buffer.getvalue()


def common() -> dict[str, bytes | None]:
    return {
        "checkpoint/": None,
        "checkpoint/inventory.img": b"inventory",
        "checkpoint/pages-1.img": b"p" * 10_000,
        "config.dump": json.dumps(CONFIG).encode(),
        "spec.dump": json.dumps(SPEC).encode(),
        "dump.log": b"log",
        "stats-dump": b"stats",
    }


def containerd() -> dict[str, bytes | None]:
    diff = gzip.compress(tar_of({"etc/": None, "etc/new": b"new", "etc/.wh.old": b""}))
    return {
        **common(),
        "rootfs-diff.tar": diff,
        "status.dump": b"{}",
        "status": b"x",
        "container.log": b"output with secrets",
    }


def podman() -> dict[str, bytes | None]:
    return {
        **{f"./{name}": data for name, data in common().items()},
        "rootfs-diff.tar": tar_of({"etc/new": b"new"}),
        "deleted.files": b'["/etc/old"]',
        "network.status": b"{}",
        "ctr.log": b"output",
        "artifacts/": None,
        "devshm-checkpoint.tar": tar_of({"./": None}),
        "volumes/": None,
        "volumes/data.tar": b"volume",
    }


def crio() -> dict[str, bytes | None]:
    return {
        **common(),
        "rootfs-diff.tar": tar_of({"etc/new": b"new"}),
        "deleted.files": b"[]",
        "bind.mounts": b"[]",
        "io.kubernetes.cri-o.LogPath": b"output",
    }


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def inspect(engine: str, path: Path) -> Needs:
    assert (path / "inventory.img").read_bytes() == b"inventory"
    assert engine == "criu"
    return NEEDS


def load(store: Store, data: bytes, **options: object) -> Import:
    arguments: dict[str, object] = {"inspect": inspect, "torpor_version": "0", **options}
    return import_archive(io.BytesIO(data), store, WEB, **arguments)  # type: ignore[arg-type]


def nothing_left(store: Store) -> bool:
    kept = {"lock", "images", "staging", "replaced", "consumed"}
    return [path for path in store.path.rglob("*") if path.name not in kept] == []


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, zstandard.ZstdCompressor().compress], ids=["plain", "gzip", "zstd"]
)
@pytest.mark.parametrize(
    ("members", "kind", "whiteouts"),
    [
        (containerd(), "containerd", "oci"),
        (podman(), "podman", "deleted.files"),
        (crio(), "cri-o", "deleted.files"),
    ],
    ids=["containerd", "podman", "cri-o"],
)
def test_archive_of_each_caller(
    store: Store, members: Members, kind: str, whiteouts: str, pack: Callable[[bytes], bytes]
) -> None:
    done = load(store, pack(tar_of(members)))
    image, manifest = done.image, done.image.manifest
    store.verify(image, pages=True)
    assert image.reference.namespace == "shop"
    assert image.needs == NEEDS
    assert manifest.engine.name == "criu"
    assert manifest.imported is not None
    assert manifest.imported.archive == kind
    assert manifest.created == "2026-11-29T18:00:00.5Z"
    assert manifest.source.container_id == "abc"
    assert manifest.source.container_name == "web"
    assert manifest.rootfs.whiteouts == whiteouts
    assert manifest.effective_use == "clone"
    assert {"rootfs-diff.tar", "config.dump", "spec.dump", "needs.json"} <= set(manifest.files)
    assert all((image.path / name).is_file() for name in ("dump.log", "stats-dump"))
    assert not {"container.log", "ctr.log", "status", "devshm-checkpoint.tar"} & set(manifest.files)
    assert len(done.warnings) == (1 if kind == "podman" else 0)


def test_namespace_is_the_importers(store: Store) -> None:
    assert load(store, tar_of(containerd())).image.manifest.source.pod_namespace == "evil"
    assert [str(image.path.relative_to(store.path)) for image in store.list()] == ["images/shop/web"]
    assert store.list("evil") == ()


ENGINES_NOTES = (extras.NAME, records.IN_IMAGE)


def torpor(tmp_path: Path, **changes: object) -> dict[str, bytes | None]:
    """An archive that containerd made of a directory in which torpor left its files."""
    checkpoint_path = tmp_path / "image"
    extras_path = checkpoint_path / "torpor"
    extras_path.mkdir(parents=True)
    (checkpoint_path / "inventory.img").write_bytes(b"inventory")
    (checkpoint_path / "pages-1.img").write_bytes(b"pages")
    for name in ENGINES_NOTES:
        (checkpoint_path / name).write_text(name)
    (extras_path / "rootfs-diff.tar").write_bytes(tar_of({"etc/frozen": b"frozen"}))
    (extras_path / "deleted.files").write_bytes(b'["/etc/gone"]')
    (extras_path / "needs.json").write_bytes(b"{}")
    manifest = build_manifest(
        spec_data=b"{}",
        source=Source(container_id="c"),
        engine=Program(name="criu", version="4.2.1"),
        runtime=Program(name="runc"),
        torpor_version="0",
        leave_running=False,
        rootfs=Rootfs(kind="overlay"),
        host=None,
        **changes,  # type: ignore[arg-type]
    )
    flatten(checkpoint_path)
    seal(manifest, checkpoint_path=checkpoint_path, extras_path=checkpoint_path)
    (checkpoint_path / "torpor-timings.json").write_bytes(b"{}")
    found = {
        f"checkpoint/{path.relative_to(checkpoint_path)}": path.read_bytes()
        for path in sorted(checkpoint_path.rglob("*"))
        if path.is_file()
    }
    outer = {name: data for name, data in containerd().items() if not name.startswith("checkpoint/")}
    return {**found, **outer}


def test_torpors_own_files_win_and_are_checked(store: Store, tmp_path: Path) -> None:
    members = torpor(tmp_path)
    image = load(store, tar_of(members)).image
    store.verify(image, pages=True)
    assert image.manifest.engine.version == "4.2.1"
    assert image.manifest.effective_use == "move"
    assert image.manifest.imported is not None
    assert image.manifest.imported.manifest_digest.startswith("sha256:")
    assert (image.path / "rootfs-diff.tar").read_bytes() == members["checkpoint/torpor-rootfs-diff.tar"]
    assert (image.path / "deleted.files").read_bytes() == b'["/etc/gone"]'
    assert not (image.checkpoint_path / "torpor").exists()
    assert image.needs == NEEDS
    assert (
        load(store, tar_of(members), use="clone", replace_existing=True).image.manifest.effective_use
        == "clone"
    )


def test_what_an_engine_notes_beside_its_images_stays_there(store: Store, tmp_path: Path) -> None:
    image = load(store, tar_of(torpor(tmp_path))).image
    store.verify(image, pages=True)
    for name in ENGINES_NOTES:
        assert (image.checkpoint_path / name).read_text() == name


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint/pages-1.img",
        "checkpoint/inventory.img",
        "checkpoint/torpor-rootfs-diff.tar",
        "checkpoint/torpor-deleted.files",
        "checkpoint/torpor-needs.json",
    ],
)
def test_changed_file_of_torpors_archive_is_refused(store: Store, tmp_path: Path, name: str) -> None:
    for number, change in enumerate((lambda data: data + b"x", lambda data: b"X" + data[1:], lambda _: None)):
        members = torpor(tmp_path / str(number))
        changed = change(members[name])
        if changed is None:
            del members[name]
        else:
            members[name] = changed
        with pytest.raises(ImageCorrupt):
            load(store, tar_of(members))
    assert nothing_left(store)


def without(name: str) -> dict[str, bytes | None]:
    return {key: data for key, data in containerd().items() if key != name}


@pytest.mark.parametrize(
    ("members", "cause"),
    [
        (without("checkpoint/inventory.img"), "neither an image of CRIU"),
        ({**containerd(), "checkpoint/checkpoint.img": b""}, "or both"),
        (without("spec.dump"), "holds no spec.dump"),
        (without("config.dump"), "holds no config.dump"),
        ({**containerd(), "spec.dump": b"{"}, "spec.dump"),
        ({**containerd(), "spec.dump": b"[" * 100_000}, "spec.dump"),
        ({**containerd(), "config.dump": b'{"id":3}'}, "config.dump"),
        ({**containerd(), "rootfs-diff.tar": b"no tar"}, "rootfs difference"),
        ({**containerd(), "rootfs-diff.tar": tar_of({"../x": b""})}, "leads out"),
        ({**containerd(), "deleted.files": b'["../../x"]'}, "deleted files"),
        ({**containerd(), "../x": b""}, "leads out"),
        ({**containerd(), "/x": b""}, "absolute"),
        ({**containerd(), "checkpoint/../../x": b""}, "leads out"),
        ({**containerd(), "checkpoint/a/b": b""}, "no file that an engine writes"),
        ({**containerd(), "checkpoint/torpor": b""}, "no file that an engine writes"),
        ({**containerd(), "checkpoint/torpor-needs.json": b"{}"}, "not its manifest"),
        ({**containerd(), "checkpoint/torpor/a/b": b""}, "no file that an engine writes"),
        ({**containerd(), "./spec.dump": b"{}"}, "twice"),
        ({**containerd(), "pre-checkpoint/inventory.img": b""}, "pre-checkpoint"),
        ({**containerd(), "checkpoint/torpor-manifest.json": b"{}"}, "manifest in the archive"),
        ({**containerd(), "checkpoint/torpor-manifest.json": b'{"schema":9}'}, "schema is 9"),
        ({}, "neither"),
    ],
)
def test_archive_that_is_not_acceptable(store: Store, tmp_path: Path, members: Members, cause: str) -> None:
    with pytest.raises(ImageCorrupt, match=cause):
        load(store, tar_of(members))
    assert nothing_left(store)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize(
    "name", ["checkpoint/x.img", "spec.dump", "anything", "ctr.log", "checkpoint/parent"]
)
@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
)
def test_link_device_and_fifo_are_refused_everywhere(store: Store, name: str, kind: bytes) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(ImageCorrupt, match=r"only files and directories|incremental"):
        load(store, buffer.getvalue())
    assert nothing_left(store)


def test_shared_memory_is_refused_not_dropped(store: Store) -> None:
    members = {**podman(), "devshm-checkpoint.tar": tar_of({"./": None, "./ring": b"x"})}
    with pytest.raises(NotSupported, match="ring"):
        load(store, tar_of(members))
    assert nothing_left(store)


def test_limit_holds_for_plain_and_compressed(store: Store) -> None:
    data = tar_of({**containerd(), "checkpoint/pages-2.img": bytes(4 << 20)})
    for packed in (data, gzip.compress(data), zstandard.ZstdCompressor().compress(data)):
        with pytest.raises(ImageCorrupt, match="larger than the limit"):
            load(store, packed, max_bytes=1 << 20)
    assert nothing_left(store)


def test_cut_off_archive_is_refused(store: Store) -> None:
    data = tar_of(common())
    whole = data.rstrip(b"\0")
    for n_bytes in range(0, len(whole), 777):
        with pytest.raises(ImageError):
            load(store, data[:n_bytes])
    for packed in (gzip.compress(data), zstandard.ZstdCompressor().compress(data)):
        with pytest.raises(ImageError):
            load(store, packed[: len(packed) // 2])
    assert nothing_left(store)


def test_existing_image_is_said_before_anything_is_read(store: Store) -> None:
    load(store, tar_of(containerd()))
    with pytest.raises(ImageExists):
        load(store, b"not even an archive")
    load(store, tar_of(crio()), replace_existing=True)


def test_engine_that_cannot_read_its_image_leaves_nothing(store: Store) -> None:
    def refuse(engine: str, path: Path) -> Needs:
        raise ImageCorrupt(f"could not read image '{path}': bad magic; make it again")

    with pytest.raises(ImageCorrupt, match="bad magic"):
        load(store, tar_of(containerd()), inspect=refuse)
    assert nothing_left(store)


def test_only_a_regular_file_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/null")):
        with pytest.raises(ImageError, match="not a regular file"):
            open_archive(path)
    with pytest.raises(ImageError, match="No such file"):
        open_archive(tmp_path / "none")


def test_progress_counts_the_archive(store: Store) -> None:
    seen: list[int] = []
    data = tar_of(containerd())
    load(store, data, on_bytes=seen.append)
    assert 0 < sum(seen) <= len(data)
