"""The kernel's table of mounts, with the names that people and containers choose."""

from __future__ import annotations

import os
import re

from hypothesis import given
from hypothesis import strategies as st

from engines.mountinfo import mounts, parse

NAMES = st.binary(min_size=1).map(lambda name: name.replace(b"\0", b"x"))


@given(points=st.lists(NAMES, max_size=4), roots=NAMES)
def test_names_are_read_as_they_are(points: list[bytes], roots: bytes) -> None:
    def written(name: bytes) -> bytes:
        return re.sub(rb"[ \t\n\\]", lambda found: b"\\%03o" % ord(found[0]), b"/" + name)

    rows = [
        b"36 35 0:33 %b %b rw,noexec shared:1 - tmpfs tmpfs rw,size=1\n" % (written(roots), written(point))
        for point in points
    ]
    found = list(parse(b"".join(rows)))
    assert [mount.point for mount in found] == [os.fsdecode(b"/" + point) for point in points]
    assert all(mount.root == os.fsdecode(b"/" + roots) for mount in found)
    assert all((mount.id, mount.device, mount.kind) == ("36", "0:33", "tmpfs") for mount in found)
    assert all("noexec" in mount.options and "size=1" in mount.super_options for mount in found)


def test_the_kernels_own_table_is_read() -> None:
    assert "/proc" in {mount.point for mount in mounts() if mount.kind == "proc"}
