"""What an enemy may write into a root file system difference."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import zstandard

from engines.api import ImageCorrupt, ImageError
from shim.images.apply import apply, check_diff
from shim.images.manifest import Whiteouts

Member = tuple[str, bytes, dict[str, object]]


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> Member:
    return name, kind, fields


def archive(members: Sequence[Member]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, fields in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.uid, info.gid = os.geteuid(), os.getegid()
            info.mode = 0o644
            data = b""
            for key, value in fields.items():
                if key == "data":
                    assert isinstance(value, bytes)
                    data = value
                    info.size = len(data)
                else:
                    setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    for directory in ("etc", "usr/lib", "run", "var"):
        (path / directory).mkdir(parents=True)
    (path / "lib").symlink_to("usr/lib")
    (path / "var/run").symlink_to("/run")
    (path / "out").symlink_to(tmp_path / "victim")
    (path / "up").symlink_to("../../../../../../" + str(tmp_path / "victim"))
    (path / "etc/passwd").write_text("inside")
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("precious")
    return path


def listing(path: Path) -> dict[str, object]:
    return {
        str(p.relative_to(path)): (p.lstat().st_mode, p.lstat().st_ino, p.lstat().st_mtime_ns)
        for p in sorted(path.rglob("*"))
    }


def run(
    root: Path,
    members: Sequence[Member] = (),
    deleted: object = (),
    whiteouts: Whiteouts = "deleted.files",
    pack: Callable[[bytes], bytes] = bytes,
) -> None:
    apply(root, io.BytesIO(pack(archive(members))), json.dumps(deleted).encode(), whiteouts=whiteouts)


FILE, LINK, HARD, DIR = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize(
    "members",
    [
        [member("../victim/file", data=b"x")],
        [member("/etc/passwd", data=b"x")],
        [member("a/../../victim/file", data=b"x")],
        [member("x", LINK, linkname="/etc"), member("x/passwd", data=b"x")],
        [member("x", LINK, linkname="../victim"), member("x/y/file", data=b"x")],
        [member("x/y", data=b"x"), member("x", LINK, linkname="/")],
        [member("x", data=b"1"), member("x", LINK, linkname="/")],
        [member("x", DIR), member("x", LINK, linkname="/")],
        [member("x", LINK, linkname="/"), member("x", DIR)],
        [member("x", tarfile.CHRTYPE, devmajor=1, devminor=3)],
        [member("x", tarfile.BLKTYPE, devmajor=8, devminor=0)],
        [member("x", tarfile.CHRTYPE, devmajor=0, devminor=0)],
        [member("x", HARD, linkname="../victim/file")],
        [member("x", HARD, linkname="/etc/passwd")],
        [member("x", HARD, linkname="x")],
        [member("d", DIR), member("x", HARD, linkname="d")],
        [member("x", LINK, linkname="")],
        [member("x" * 300, data=b"")],
        [member("x/" * 3000 + "y", data=b"")],
        [member("x", b"V")],
        [member("x", pax_headers={"mtime": "9" * 30})],
        [member("x", pax_headers={"mtime": "soon"})],
        [member("x", pax_headers={"uid": str(2**33)})],
        [member(".", LINK, linkname="/")],
    ],
)
def test_hostile_member_is_refused_and_nothing_is_touched(root: Path, members: list[Member]) -> None:
    before = listing(root.parent)
    with pytest.raises(ImageCorrupt, match="could not read the rootfs difference"):
        run(root, [member("innocent", data=b"x"), *members])
    assert listing(root.parent) == before


@pytest.mark.parametrize(
    "deleted",
    [
        ["../victim/file"],
        ["/../victim/file"],
        ["etc/../../victim/file"],
        ["/"],
        [""],
        ["."],
        ["a\0b"],
        [3],
        {"a": 1},
        "etc",
        ["x" * 300],
    ],
)
def test_hostile_list_of_deleted_files_is_refused(root: Path, deleted: object) -> None:
    before = listing(root.parent)
    with pytest.raises(ImageCorrupt, match="could not read the list of deleted files"):
        run(root, [member("innocent", data=b"x")], deleted)
    assert listing(root.parent) == before


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b'["a"'])
def test_damaged_list_of_deleted_files_is_refused(root: Path, data: bytes) -> None:
    with pytest.raises(ImageCorrupt, match="deleted files"):
        apply(root, io.BytesIO(archive([])), data)


def test_links_of_the_container_image_lead_inside(root: Path) -> None:
    run(
        root,
        [member("lib/new.so", data=b"so"), member("var/run/pid", data=b"1")],
        ["/out/file", "/up/file", "/var/run/none"],
    )
    assert (root / "usr/lib/new.so").read_bytes() == b"so"
    assert (root / "run/pid").read_bytes() == b"1"
    assert (root.parent / "victim/file").read_text() == "precious"


def test_writing_through_a_link_out_of_the_root_stays_inside(root: Path) -> None:
    for name in ("out/file", "up/file"):
        with pytest.raises(ImageError):
            run(root, [member(name, data=b"x")])
    assert (root.parent / "victim/file").read_text() == "precious"


def test_existing_link_is_replaced_not_followed(root: Path) -> None:
    (root / "etc/link").symlink_to(root.parent / "victim/file")
    (root / "etc/also").symlink_to(root.parent / "victim")
    run(root, [member("etc/link", data=b"new"), member("etc/also", DIR, mode=0o700)], ["out"])
    assert (root / "etc/link").read_bytes() == b"new"
    assert not (root / "etc/link").is_symlink()
    assert stat.S_ISDIR((root / "etc/also").lstat().st_mode)
    assert not os.path.lexists(root / "out")
    assert [path.name for path in (root.parent / "victim").iterdir()] == ["file"]


def test_hard_link_is_never_made_to_a_link(root: Path) -> None:
    with pytest.raises(ImageError):
        run(root, [member("x", HARD, linkname="out")])
    with pytest.raises(ImageError):
        run(root, [member("x", HARD, linkname="out/file")])
    run(
        root,
        [member("a", data=b"1"), member("b", HARD, linkname="a"), member("c", HARD, linkname="etc/passwd")],
    )
    assert (root / "a").stat().st_ino == (root / "b").stat().st_ino
    assert (root / "c").read_text() == "inside"


def test_directory_and_file_change_places(root: Path) -> None:
    (root / "tree/deep").mkdir(parents=True)
    (root / "tree/deep/file").touch()
    (root / "tree/out").symlink_to(root.parent / "victim")
    run(root, [member("tree", data=b"f"), member("etc/passwd", DIR, mode=0o750)], ["/usr"])
    assert (root / "tree").read_bytes() == b"f"
    assert (root / "etc/passwd").is_dir()
    assert not (root / "usr").exists()
    assert (root.parent / "victim/file").exists()


@pytest.mark.parametrize("umask", [0, 0o022, 0o077, 0o777])
def test_modes_are_exact_whatever_the_umask(root: Path, umask: int) -> None:
    modes = {"a": 0o664, "b": 0o4755, "c": 0o2711, "d": 0o000, "e": 0o666}
    members = [member(name, mode=mode, data=b"x") for name, mode in modes.items()]
    members += [member("dir", DIR, mode=0o3775), member("dir/in", mode=0o640, data=b"")]
    old = os.umask(umask)
    try:
        run(root, members)
    finally:
        os.umask(old)
    for name, mode in {**modes, "dir": 0o3775, "dir/in": 0o640}.items():
        assert stat.S_IMODE((root / name).lstat().st_mode) == mode, name


def test_times_are_exact_to_the_nanosecond(root: Path) -> None:
    moment, old = {"mtime": "1234567890.123456789"}, {"mtime": "-1.5"}
    run(
        root,
        [
            member("d", DIR, mode=0o755, pax_headers=moment),
            member("d/f", pax_headers=old),
            member("d/l", LINK, linkname="x", pax_headers=moment),
        ],
    )
    assert (root / "d").stat().st_mtime_ns == 1234567890123456789
    assert (root / "d/f").stat().st_mtime_ns == -1500000000
    assert (root / "d/l").lstat().st_mtime_ns == 1234567890123456789


def test_marks_of_the_overlay_and_labels_are_not_set(root: Path) -> None:
    headers = {
        "SCHILY.xattr.user.good": "1",
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "SCHILY.xattr.security.selinux": "system_u",
    }
    run(root, [member("f", pax_headers=headers)])
    assert os.listxattr(root / "f") == ["user.good"]


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, zstandard.ZstdCompressor().compress], ids=["plain", "gzip", "zstd"]
)
def test_oci_whiteouts(root: Path, pack: Callable[[bytes], bytes]) -> None:
    (root / "data/old").mkdir(parents=True)
    (root / "data/file").touch()
    members = [
        member("data", DIR, mode=0o755),
        member("data/new", data=b"n"),
        member("data/.wh..wh..opq", data=b""),
        member("etc/.wh.passwd", data=b""),
        member("nowhere/.wh.thing", data=b""),
    ]
    run(root, members, whiteouts="oci", pack=pack)
    assert os.listdir(root / "data") == ["new"]
    assert not (root / "etc/passwd").exists()


@pytest.mark.parametrize("name", [".wh.", ".wh...", ".wh..", "a/.wh..."])
def test_hostile_whiteout_is_refused(root: Path, name: str) -> None:
    before = listing(root.parent)
    with pytest.raises(ImageCorrupt, match="deleted"):
        run(root, [member(name, data=b"")], whiteouts="oci")
    assert listing(root.parent) == before


def test_whiteout_names_are_plain_names_in_our_own_archives(root: Path) -> None:
    run(root, [member("etc/.wh.passwd", data=b"x")])
    assert (root / "etc/.wh.passwd").read_bytes() == b"x"
    assert (root / "etc/passwd").exists()


def test_missing_parents_are_made_but_not_through_a_dangling_link(root: Path) -> None:
    run(root, [member("new/deep/file", data=b"x")])
    assert (root / "new/deep/file").read_bytes() == b"x"
    (root / "dangling").symlink_to("nowhere")
    with pytest.raises(ImageError):
        run(root, [member("dangling/file", data=b"x")])
    assert not (root / "nowhere").exists()


@pytest.mark.parametrize("cut", [1, 511, 512, 700, 1500])
def test_archive_that_is_cut_off_is_refused(root: Path, cut: int) -> None:
    data = archive([member("a", data=b"x" * 2000), member("b", data=b"y" * 900)])
    end = 512 + 2048 + 512 + 1024
    for pack in (bytes, gzip.compress):
        with pytest.raises(ImageCorrupt):
            apply(root, io.BytesIO(pack(data[: end - cut])), b"[]")
    assert not (root / "a").exists()


def test_damaged_header_in_the_middle_is_not_the_end(root: Path) -> None:
    data = bytearray(archive([member("a", data=b"x"), member("b", data=b"y")]))
    data[1024 + 10] ^= 0xFF
    with pytest.raises(ImageCorrupt, match="damaged"):
        apply(root, io.BytesIO(bytes(data)), b"[]")
    assert not (root / "a").exists()


def test_extended_header_that_claims_gigabytes_is_refused(root: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 8 << 30
    with pytest.raises(ImageCorrupt, match="extended header"):
        apply(root, io.BytesIO(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)), b"[]")


def test_compressed_bomb_is_stopped() -> None:
    data = gzip.compress(archive([member("zeros", data=bytes(8 << 20))]))
    assert len(data) < 64 << 10
    with pytest.raises(ImageCorrupt, match="larger than the limit"):
        check_diff(io.BytesIO(data), b"[]", whiteouts="oci", max_bytes=1 << 20)


def test_holes_that_overlap_are_refused(root: Path) -> None:
    table = b"2\n0\n8\n4\n8\n".ljust(512, b"\0")
    headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "s",
        "GNU.sparse.realsize": "100",
    }
    with pytest.raises(ImageCorrupt, match="overlap"):
        run(root, [member("GNUSparseFile.0/s", data=table + b"x" * 16, pax_headers=headers)])


def test_sparse_name_cannot_lead_out(root: Path) -> None:
    headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "../victim/file",
        "GNU.sparse.realsize": "100",
    }
    before = listing(root.parent)
    with pytest.raises(ImageCorrupt):
        run(root, [member("s", data=b"0\n".ljust(512, b"\0"), pax_headers=headers)])
    assert listing(root.parent) == before
