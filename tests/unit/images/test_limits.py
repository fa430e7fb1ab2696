"""What a small archive may cost in memory, and that a checkpoint makes none that a restore refuses."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import tracemalloc
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.api import ImageCorrupt, NotSupported
from shim.images import tarwrite
from shim.images.apply import apply, check_diff
from shim.images.archive import import_archive
from shim.images.layout import Reference
from shim.images.rootfs import RootfsView, write_diff
from shim.images.store import Store
from shim.images.tarball import open_tar
from shim.images.tarwrite import MAX_DEPTH, data_pieces

MIB = 1 << 20
END = bytes(1024)


def block(name: str, kind: bytes, data: bytes = b"", **fields: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    info.uid, info.gid, info.mode = os.geteuid(), os.getegid(), 0o755
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def record(key: str, value: str) -> bytes:
    n_bytes = len(key) + len(value) + 3
    total = n_bytes + len(str(n_bytes))
    return f"{n_bytes + len(str(total))} {key}={value}\n".encode()


def peak_bytes(data: bytes, message: str) -> int:
    """Memory that it takes to refuse an archive."""
    file = io.BytesIO(data)
    tracemalloc.start()
    try:
        with pytest.raises(ImageCorrupt, match=message):
            check_diff(file, b"[]", whiteouts="oci")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def many(members: Iterable[bytes]) -> bytes:
    return b"".join(members) + END


REGULAR, DIRECTORY = tarfile.REGTYPE, tarfile.DIRTYPE
ATTRIBUTE = block("x", tarfile.XHDTYPE, record("SCHILY.xattr.user.a", "v" * 9000))


@pytest.mark.parametrize(
    "members",
    [
        (block(f"{i}/" + "ab/" * (MAX_DEPTH - 2) + "x", REGULAR) for i in range(3)),
        (block(f"{i}", DIRECTORY) for i in range(250)),
        (block(f"{i}", REGULAR) for i in range(1000)),
        (block(f"{i}" + "\U0001f600" + "n" * 90, REGULAR) for i in range(400)),
        (block("a", DIRECTORY) for _ in range(250)),
        (ATTRIBUTE + block(f"{i}", DIRECTORY) for i in range(20)),
    ],
    ids=["deep", "directories", "files", "long-names", "repeated", "attributes"],
)
def test_names_and_attributes_stay_within_the_limit(
    members: Iterable[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_bytes = 100_000
    monkeypatch.setattr("shim.images.apply.MAX_KEPT_BYTES", limit_bytes)
    # One member, of up to 9 kB here, is more than once in memory while it is read.
    assert peak_bytes(many(members), "larger than the limit") < limit_bytes + 100_000


def test_deep_names_share_what_they_have_in_common() -> None:
    data = many(block("ab/" * (MAX_DEPTH - 1) + f"{i}", REGULAR) for i in range(50))
    tracemalloc.start()
    try:
        check_diff(io.BytesIO(data), b"[]", whiteouts="oci")
        assert tracemalloc.get_traced_memory()[1] < MIB // 4
    finally:
        tracemalloc.stop()


SPARSE = record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0")
OLD_SPARSE = bytearray(block("s", b"S"))
OLD_SPARSE[482] = 1  # the list of holes goes on
OLD_SPARSE[148:156] = b"%06o\0 " % (sum(OLD_SPARSE[:148]) + 8 * 32 + sum(OLD_SPARSE[156:512]))
PIECES = (b"%011o\0" % 1 + b"%011o\0" % 1) * 21 + b"\1" + bytes(7)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([block("g", b"g", record(f"k{i}", "v" * 9000)) for i in range(300)], "global headers"),
        ([block("g", b"g", record("a", "v"))] * 2000, "global headers"),
        ([block("x", b"x", record("a", "v" * 9000))] * 300, "a header is larger"),
        ([block("x", b"L", b"n" * 9000)] * 300, "a header is larger"),
        ([bytes(OLD_SPARSE), *[PIECES] * 4000], "a header is larger"),
        ([block("x", b"x", SPARSE), block("s", REGULAR, b"900000\n" + b"300\n" * 200_000)], "a header is"),
    ],
    ids=["global", "global-chain", "chain", "names", "old-holes", "holes"],
)
def test_headers_stay_within_the_limit(
    members: list[bytes], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_bytes = 32 << 10
    monkeypatch.setattr("shim.images.tarball._MAX_HEADERS_BYTES", limit_bytes)
    # A hole takes 8 bytes of an archive and about 200 in Python.
    assert peak_bytes(many(members), message) < 30 * limit_bytes


def test_global_header_of_a_usual_size_is_read() -> None:
    data = many([block("g", b"g", record("comment", "c" * 40)), block("a", DIRECTORY)])
    check_diff(io.BytesIO(data), b"[]", whiteouts="oci")


@pytest.mark.parametrize("error", [MemoryError(), RecursionError()])
def test_end_of_memory_or_stack_is_told_in_a_sentence(error: Exception) -> None:
    with (
        pytest.raises(ImageCorrupt, match="could not read it: it takes more memory"),
        open_tar(io.BytesIO(END), what="it", max_bytes=MIB),
    ):
        raise error


def test_deepest_name_is_made_without_its_parents(tmp_path: Path) -> None:
    name = "d/" * (MAX_DEPTH - 1) + "x"
    apply(tmp_path, io.BytesIO(many([block(name, REGULAR, b"deep")])), b"[]")
    assert (tmp_path / name).read_bytes() == b"deep"


@pytest.mark.parametrize("deleted", [False, True])
def test_deeper_name_is_refused_and_nothing_is_touched(tmp_path: Path, deleted: bool) -> None:
    name = "d/" * MAX_DEPTH + "x"
    members = [block("a", REGULAR), *([] if deleted else [block(name, REGULAR)])]
    with pytest.raises(ImageCorrupt, match="deeper than 256 levels"):
        apply(tmp_path, io.BytesIO(many(members)), f'["{name}"]'.encode() if deleted else b"[]")
    assert list(tmp_path.iterdir()) == []


def test_list_of_deleted_names_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shim.images.apply._MAX_DELETED", 10)
    with pytest.raises(ImageCorrupt, match="deleted files: it is larger"):
        check_diff(io.BytesIO(END), b'["a"' + b',"a"' * 11 + b"]", whiteouts="oci")


def test_attribute_with_a_nul_byte_in_its_name_is_refused() -> None:
    data = many([block("x", b"x", record("SCHILY.xattr.user.a\0b", "v")), block("a", REGULAR)])
    with pytest.raises(ImageCorrupt, match="without a valid name"):
        check_diff(io.BytesIO(data), b"[]", whiteouts="oci")


def test_size_beyond_the_kernels_numbers_is_refused() -> None:
    headers = SPARSE + record("GNU.sparse.realsize", str(1 << 63)) + record("GNU.sparse.name", "s")
    data = many([block("x", b"x", headers), block("s", REGULAR, b"0\n".ljust(512, b"\0"))])
    with pytest.raises(ImageCorrupt, match="claims 9223372036854775808 bytes"):
        check_diff(io.BytesIO(data), b"[]", whiteouts="oci")


def test_holes_are_read_from_a_compressed_archive(tmp_path: Path) -> None:
    headers = SPARSE + record("GNU.sparse.realsize", "40000") + record("GNU.sparse.name", "s")
    content = b"2\n100\n5\n30000\n5\n".ljust(512, b"\0") + b"aaaaabbbbb"
    data = many([block("x", b"x", headers), block("s", REGULAR, content)])
    apply(tmp_path, io.BytesIO(gzip.compress(data)), b"[]")
    whole = (tmp_path / "s").read_bytes()
    assert whole == bytes(100) + b"aaaaa" + bytes(29895) + b"bbbbb" + bytes(9995)


def test_names_of_an_imported_archive_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shim.images.archive._MAX_NAMES_BYTES", 1000)
    data = many(block(f"volumes/{i:090}", DIRECTORY) for i in range(11))
    with pytest.raises(ImageCorrupt, match="too many members"):
        import_archive(
            io.BytesIO(data),
            Store(tmp_path),
            Reference(namespace="", name="x"),
            inspect=lambda engine, path: pytest.fail("never asked"),
            torpor_version="0",
        )


@pytest.fixture
def tree(tmp_path: Path) -> RootfsView:
    (tmp_path / "out").mkdir()
    (tmp_path / "tree").mkdir()
    return RootfsView(path=tmp_path / "tree", kind="directory")


def test_what_a_checkpoint_takes_a_restore_takes(tree: RootfsView, tmp_path: Path) -> None:
    deepest = tree.path / ("d/" * (MAX_DEPTH - 1))
    deepest.mkdir(parents=True)
    (deepest / "file").write_text("deep")
    write_diff(tree, tmp_path / "out", full_copy=True)
    (tmp_path / "new").mkdir()
    with (tmp_path / "out/rootfs-diff.tar").open("rb") as diff:
        apply(tmp_path / "new", diff, b"[]")
    assert (tmp_path / "new" / deepest.relative_to(tree.path) / "file").read_text() == "deep"


@pytest.mark.parametrize("case", ["depth", "attributes", "memory"])
def test_checkpoint_refuses_what_no_restore_takes(
    case: str, tree: RootfsView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "depth":
        (tree.path / ("d/" * MAX_DEPTH)).mkdir(parents=True)
        cause = r"directory '/d/d/.*\.\.\. lies deeper than 255 levels"
    elif case == "attributes":
        monkeypatch.setattr("shim.images.rootfs.MAX_HEADER_BYTES", 65 << 10)
        (tree.path / "file").touch()
        os.setxattr(tree.path / "file", "user.a", b"v" * 2000)
        cause = "the extended attributes of '/file' are too large"
    else:
        monkeypatch.setattr("shim.images.rootfs.MAX_KEPT_BYTES", 1000)
        for name in ("a", "b", "c"):
            (tree.path / name).mkdir()
        cause = "it holds more than 1 changed files and directories"
    with pytest.raises(NotSupported, match=f"could not keep rootfs .*: {cause}; remove what") as caught:
        write_diff(tree, tmp_path / "out", full_copy=True)
    assert caught.value.after == "running"
    assert list((tmp_path / "out").iterdir()) == []


@settings(max_examples=50)
@given(
    gaps=st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**4)), min_size=1, max_size=60),
    most=st.integers(2, 20),
)
def test_smallest_holes_are_filled_where_there_are_too_many(gaps: list[tuple[int, int]], most: int) -> None:
    pieces: list[tuple[int, int]] = []
    end = 0
    for hole, length in gaps:
        pieces.append((end + hole, length))
        end += hole + length
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tarwrite, "MAX_PIECES", most)
        found = tarwrite._fewer(pieces)
    assert len(found) < most or found == pieces
    assert all(one + length < other for (one, length), (other, _) in pairwise(found))
    assert all(any(o <= start and start + n <= o + length for o, length in found) for start, n in pieces)
    assert sum(found[-1]) == end
    assert found[0][0] == pieces[0][0]


def test_file_of_many_holes_keeps_its_content(
    tree: RootfsView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tarwrite, "MAX_PIECES", 8)
    path = tree.path / "file"
    with path.open("wb") as file:
        file.truncate(4 * MIB)
        for offset in range(0, 4 * MIB, 128 << 10):
            os.pwrite(file.fileno(), b"data", offset)
    fd = os.open(path, os.O_RDONLY)
    try:
        pieces = data_pieces(fd, os.fstat(fd))
    finally:
        os.close(fd)
    assert pieces is not None
    assert len(pieces) <= 8
    write_diff(tree, tmp_path / "out", full_copy=True)
    (tmp_path / "new").mkdir()
    with (tmp_path / "out/rootfs-diff.tar").open("rb") as diff:
        apply(tmp_path / "new", diff, b"[]")
    assert (tmp_path / "new/file").read_bytes() == path.read_bytes()
