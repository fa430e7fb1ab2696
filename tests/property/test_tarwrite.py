"""What the fast writer writes is what tarfile reads."""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from shim.images.tarball import mtime_ns
from shim.images.tarwrite import DIRECTORY, HARD_LINK, SYMBOLIC_LINK, TarWriter

PARTS = st.binary(min_size=1, max_size=120).filter(
    lambda part: b"/" not in part and b"\0" not in part and part not in {b".", b".."}
)
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(b"/".join)


def status(mode: int, uid: int, gid: int, moment: int, size: int) -> os.stat_result:
    """A stat result: the ten classic fields, three float times, three times in nanoseconds."""
    seconds = moment // 10**9
    fields = (mode, 1, 1, 1, uid, gid, size, seconds, seconds, seconds)
    return os.stat_result((*fields, 0.0, 0.0, 0.0, moment, moment, moment, 4096, size // 512 + 8, 0))


@settings(max_examples=300, deadline=None)
@given(
    name=NAMES,
    link=NAMES,
    kind=st.sampled_from([DIRECTORY, SYMBOLIC_LINK, HARD_LINK]),
    mode=st.integers(0, 0o7777),
    uid=st.integers(0, 2**32 - 2),
    gid=st.integers(0, 2**32 - 2),
    moment=st.integers(-(2**60), 2**60),
    xattrs=st.dictionaries(
        st.sampled_from([b"user.a", b"user.caf\xc3\xa9", b"security.capability"]), st.binary(max_size=80)
    ),
    content=st.binary(max_size=2000),
)
def test_members_read_back(
    name: bytes,
    link: bytes,
    kind: bytes,
    mode: int,
    uid: int,
    gid: int,
    moment: int,
    xattrs: dict[bytes, bytes],
    content: bytes,
) -> None:
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as source:
        source.write(content)
        source.flush()
        writer = TarWriter(file.fileno())
        writer.add(name, status(mode, uid, gid, moment, 0), kind, link=link, xattrs=xattrs)
        own = status(mode | stat.S_IFREG, uid, gid, moment, len(content))
        writer.add_file(b"file", own, source.fileno(), xattrs=xattrs)
        writer.finish()
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
            first, second = tar.getmembers()
            extracted = tar.extractfile(second)
            assert extracted is not None
            assert extracted.read() == content
    assert os.fsencode(first.name) == name
    assert first.type == kind
    assert os.fsencode(first.linkname) == link if kind != DIRECTORY else first.isdir()
    for member in (first, second):
        assert (member.mode, member.uid, member.gid) == (mode, uid, gid)
        assert mtime_ns(member) == moment
        found = {key: value for key, value in member.pax_headers.items() if key.startswith("SCHILY.xattr.")}
        assert {
            key.removeprefix("SCHILY.xattr.").encode(): value.encode("utf-8", "surrogateescape")
            for key, value in found.items()
        } == xattrs


def test_gnu_tar_reads_it_too(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    with open(source / "sparse", "wb") as file:
        file.truncate(9 << 30)  # more than the octal field holds
        os.pwrite(file.fileno(), b"abc", 8 << 30)
    (source / ("n" * 200)).write_text("long")
    with open(tmp_path / "a.tar", "wb") as file:
        writer = TarWriter(file.fileno())
        for path in sorted(source.iterdir()):
            fd = os.open(path, os.O_RDONLY)
            writer.add_file(os.fsencode(path.name), os.fstat(fd), fd)
            os.close(fd)
        writer.finish()
    assert (tmp_path / "a.tar").stat().st_size < 1 << 20
    subprocess.run(["tar", "xf", str(tmp_path / "a.tar"), "-C", str(target)], check=True)
    assert (target / ("n" * 200)).read_text() == "long"
    assert (target / "sparse").stat().st_size == 9 << 30
    assert (target / "sparse").stat().st_blocks < 2048
    assert (target / "sparse").stat().st_mtime_ns == (source / "sparse").stat().st_mtime_ns
    with open(target / "sparse", "rb") as file:
        file.seek(8 << 30)
        assert file.read(4) == b"abc\0"
