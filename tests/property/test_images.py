"""Whatever an archive holds, reading it ends in an image or in an error of ours, and touches nothing else."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import tempfile
from pathlib import Path

import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch

from engines.api import EngineError, ImageCorrupt, ImageError, Needs, NotSupported
from shim.errors import ShimError, UsageError
from shim.images.apply import apply, check_diff
from shim.images.archive import import_archive
from shim.images.layout import Reference, parse_reference
from shim.images.manifest import parse_manifest
from shim.images.rootfs import RootfsView, write_diff
from shim.images.store import Store

NEEDS = Needs(engine="criu", image_version="1", tasks=(), namespaces={})
KINDS = [
    tarfile.REGTYPE,
    tarfile.AREGTYPE,
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.FIFOTYPE,
    tarfile.CHRTYPE,
    tarfile.CONTTYPE,
    tarfile.GNUTYPE_SPARSE,
    b"V",
]
HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "comment",
            "mtime",
            "size",
            "path",
            "linkpath",
            "SCHILY.xattr.user.a",
            "SCHILY.xattr.user.\0",
            "GNU.sparse.major",
            "GNU.sparse.minor",
            "GNU.sparse.map",
            "GNU.sparse.realsize",
        ]
    ),
    st.sampled_from(["", "0", "1", "7", "0,1,4,2", "a/b", "-1.5", "9" * 40]),
    max_size=3,
)
PARTS = st.sampled_from(
    [
        "a",
        "b",
        "lib",
        "out",
        "..",
        ".",
        "",
        "/",
        "checkpoint",
        "torpor",
        "inventory.img",
        ".wh.a",
        ".wh..wh..opq",
        "é",
    ]
)
NAMES = st.one_of(
    st.lists(PARTS, min_size=1, max_size=4).map("/".join),
    st.text(min_size=1, max_size=12),
    st.integers(250, 2000).map(lambda depth: "d/" * depth + "x"),
    st.sampled_from(
        ["spec.dump", "config.dump", "rootfs-diff.tar", "deleted.files", "devshm-checkpoint.tar"]
    ),
)


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """A tar archive of odd members, perhaps compressed, perhaps damaged."""
    buffer = io.BytesIO()
    form, everywhere = draw(st.sampled_from([0, 1, 2])), draw(st.one_of(st.just({}), HEADERS))
    with tarfile.open(fileobj=buffer, mode="w", format=form, pax_headers=everywhere) as tar:
        for name in draw(st.lists(NAMES, max_size=6)):
            info = tarfile.TarInfo(name.replace("\0", "_") if draw(st.booleans()) else name)
            info.type = draw(st.sampled_from(KINDS))
            info.mode = draw(st.integers(0, 0o7777))
            info.linkname = draw(NAMES)
            info.pax_headers = draw(HEADERS)
            info.mtime = draw(st.sampled_from([0, 1.5, 2**33]))
            content = draw(st.binary(max_size=700)) if info.isreg() else b""
            info.size = len(content)
            try:
                tar.addfile(info, io.BytesIO(content))
            except (ValueError, UnicodeError):
                continue
    data = bytearray(buffer.getvalue())
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, min(len(data), 4096) - 1))] = draw(st.integers(0, 255))
    data = data[: draw(st.sampled_from([len(data), len(data), draw(st.integers(0, len(data)))]))]
    pack = draw(st.sampled_from([bytes, gzip.compress, zstandard.ZstdCompressor().compress]))
    packed = bytearray(pack(bytes(data)))
    if packed and draw(st.integers(0, 9)) == 0:
        packed[draw(st.integers(0, len(packed) - 1))] ^= 0x55
    return bytes(packed)


def outside(base: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(path): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in [base / "victim", *(base / "victim").rglob("*")]
    }


@settings(max_examples=400, deadline=None)
@given(data=st.one_of(archives(), st.binary(max_size=2048)))
def test_import_of_anything(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        (base / "victim").mkdir()
        (base / "victim/file").write_text("precious")
        before = outside(base)
        store = Store(base / "store")
        try:
            import_archive(
                io.BytesIO(data),
                store,
                Reference(namespace="", name="x"),
                inspect=lambda engine, path: NEEDS,
                torpor_version="0",
            )
        except (ImageError, ShimError, EngineError):
            assert store.list() == ()
        assert list((store.path / "staging").iterdir()) == []
        assert outside(base) == before
        assert sorted(path.name for path in base.iterdir()) == ["store", "victim"]


@settings(max_examples=400, deadline=None)
@given(
    data=archives(),
    deleted=st.one_of(st.lists(NAMES, max_size=4), st.integers(), st.none()),
    oci=st.booleans(),
)
def test_apply_of_anything(data: bytes, deleted: object, oci: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        (base / "victim").mkdir()
        (base / "victim/file").write_text("precious")
        root = base / "root"
        (root / "lib").mkdir(parents=True)
        (root / "out").symlink_to("../victim")
        (root / "b").symlink_to(base / "victim")
        before = outside(base)
        listed = json.dumps(deleted).encode()
        try:
            apply(root, io.BytesIO(data), listed, whiteouts="oci" if oci else "deleted.files")
        except ImageError:
            pass
        else:
            check_diff(io.BytesIO(data), listed, whiteouts="oci" if oci else "deleted.files")
        assert outside(base) == before
        assert sorted(path.name for path in base.iterdir()) == ["root", "victim"]
        os.chmod(root, 0o700)


@settings(max_examples=100, deadline=None)
@given(
    names=st.lists(st.lists(st.sampled_from(["a", "b", "é", "n" * 40]), min_size=1, max_size=6), max_size=8),
    most_bytes=st.integers(0, 20_000),
    most_depth=st.integers(1, 8),
)
def test_restore_takes_what_a_checkpoint_took(
    names: list[list[str]], most_bytes: int, most_depth: int
) -> None:
    with tempfile.TemporaryDirectory() as directory, MonkeyPatch.context() as patch:
        base = Path(directory)
        (base / "tree").mkdir()
        for parts in names:
            (base / "tree").joinpath(*parts).mkdir(parents=True, exist_ok=True)
            (base / "tree").joinpath(*parts, "file").touch()
        for module in ("rootfs", "apply"):
            patch.setattr(f"shim.images.{module}.MAX_KEPT_BYTES", most_bytes)
        for module in ("rootfs", "tarball"):
            patch.setattr(f"shim.images.{module}.MAX_DEPTH", most_depth)
        try:
            write_diff(RootfsView(path=base / "tree", kind="directory"), base, full_copy=True)
        except NotSupported:
            return
        with (base / "rootfs-diff.tar").open("rb") as diff:
            check_diff(diff, b"[]", whiteouts="deleted.files")


@given(text=st.text(max_size=40), namespace=st.sampled_from(["", "ns"]))
@example(text="a@sha256:", namespace="")
def test_reference_is_one_or_two_plain_components(text: str, namespace: str) -> None:
    try:
        found = parse_reference(text, namespace=namespace)
    except UsageError:
        return
    parts = found.directory.split("/")
    assert len(parts) == 2
    assert all(part not in {"", ".", ".."} and "\0" not in part for part in parts)
    assert parse_reference(str(found), namespace="") == found


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["schema", "files", "source"]), inner)
    ),
)


@given(data=st.one_of(st.binary(max_size=64), JSON.map(lambda plain: json.dumps(plain).encode())))
def test_manifest_of_anything(data: bytes) -> None:
    try:
        parse_manifest(data)
    except ImageCorrupt:
        return
