"""The root file system difference, between real overlay mounts."""

from __future__ import annotations

import itertools
import json
import os
import socket
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest

from engines.api import ImageCorrupt, ImageError, NotSupported
from shim.images import undo
from shim.images.apply import apply
from shim.images.rootfs import RootfsView, device_nodes, find_rootfs, write_diff
from shim.images.undo import forget, save_upper, undo_apply

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts overlays, needs root"),
]


class Overlays:
    """Mounts overlays below a directory of its own and unmounts them at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mounted: list[Path] = []

    def mount(self, name: str, lowers: list[Path], options: str = "", cwd: Path | None = None) -> RootfsView:
        bundle = self.path / name
        for part in ("rootfs", "upper", "work"):
            (bundle / part).mkdir(parents=True)
        text = ",".join(
            filter(
                None,
                [
                    "lowerdir=" + ":".join(map(str, lowers)),
                    f"upperdir={bundle / 'upper'}",
                    f"workdir={bundle / 'work'}",
                    options,
                ],
            )
        )
        subprocess.run(
            ["mount", "-t", "overlay", "-o", text, "torpor-test", str(bundle / "rootfs")], check=True, cwd=cwd
        )
        self.mounted.append(bundle / "rootfs")
        return find_rootfs(bundle)


@pytest.fixture
def overlays(tmp_path: Path) -> Iterator[Overlays]:
    made = Overlays(tmp_path)
    yield made
    for path in made.mounted:
        subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def lower(tmp_path: Path) -> Path:
    path = tmp_path / "lower"
    for directory in ("etc/conf.d", "usr/lib", "var/cache/deep", "data", "gone/inner"):
        (path / directory).mkdir(parents=True)
    (path / "lib").symlink_to("usr/lib")
    (path / "usr/lib/libx.so").write_text("x")
    (path / "etc/passwd").write_text("root")
    (path / "etc/old.conf").write_text("old")
    (path / "data/one").write_text("1")
    (path / "data/two").write_text("2")
    (path / "data/sub").mkdir()
    (path / "data/sub/deep").write_text("deep")
    (path / "gone/inner/file").write_text("g")
    (path / "var/cache/deep/keep").write_text("k")
    return path


def tree(path: Path) -> dict[str, tuple[object, ...]]:
    """Everything that must be the same after a round trip."""
    found: dict[str, tuple[object, ...]] = {}
    inodes: dict[int, list[str]] = {}
    for directory, subdirectories, files in os.walk(path):
        for name in subdirectories + files:
            full = Path(directory, name)
            status = full.lstat()
            if stat.S_ISSOCK(status.st_mode):
                continue
            content: object = None
            if stat.S_ISREG(status.st_mode):
                content = full.read_bytes() if status.st_size < 1 << 20 else status.st_size
                if status.st_nlink > 1:
                    inodes.setdefault(status.st_ino, []).append(str(full.relative_to(path)))
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(full)
            attributes = {
                key: os.getxattr(full, key, follow_symlinks=False)
                for key in os.listxattr(full, follow_symlinks=False)
                if not key.startswith("trusted.overlay")
            }
            found[str(full.relative_to(path))] = (
                oct(status.st_mode),
                status.st_uid,
                status.st_gid,
                status.st_mtime_ns,
                content,
                tuple(sorted(attributes.items())),
            )
    for names in inodes.values():
        for name in names:
            found[name] += (tuple(sorted(names)),)
    return found


def change(root: Path) -> None:
    """What a container may do to its root."""
    (root / "etc/passwd").write_text("root and more")
    (root / "etc/old.conf").unlink()
    (root / "lib/new.so").write_text("through a link")
    subprocess.run(["rm", "-r", str(root / "gone")], check=True)
    subprocess.run(["rm", "-r", str(root / "data")], check=True)
    (root / "data/sub").mkdir(parents=True)  # opaque now
    (root / "data/two").write_text("new two")
    tool = root / "usr/tool"
    tool.write_bytes(b"\x7fELF")
    os.chown(tool, 12, 34)
    tool.chmod(0o6711)
    os.setxattr(tool, "user.note", b"\xff\x00binary")
    os.setxattr(tool, "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))
    os.utime(tool, ns=(1, 1_234_567_890_123_456_789))
    os.link(tool, root / "usr/tool-again")
    odd = root / "odd"
    odd.mkdir()
    odd.chmod(0o2775)
    (odd / "file").write_text("odd")
    (odd / "file").chmod(0o664)
    (root / "empty-dir").mkdir(mode=0o700)
    (root / "dangling").symlink_to("/nowhere/../at all//")
    os.lchown(root / "dangling", 5, 6)
    os.mkfifo(root / "pipe", 0o640)
    (root / ".wh.legit").write_text("a real name")
    Path(os.fsdecode(bytes(root) + b"/caf\xe9")).write_text("latin1")
    (root / ("long" * 60)).write_text("long")
    (root / "einträge").mkdir()
    with open(root / "sparse", "wb") as file:
        file.truncate(1 << 30)
        os.pwrite(file.fileno(), b"abc", 512 << 20)
    with open(root / "hole", "wb") as file:
        file.truncate(5 << 20)
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(root / "s"))
    os.mknod(root / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))


def carry(source: RootfsView, target: RootfsView, out: Path) -> None:
    out.mkdir()
    write_diff(source, out)
    with open(out / "rootfs-diff.tar", "rb") as diff:
        apply(target.path, diff, (out / "deleted.files").read_bytes())


def test_everything_survives_a_round_trip(overlays: Overlays, lower: Path, tmp_path: Path) -> None:
    source = overlays.mount("a", [lower])
    change(source.path)
    old = os.umask(0o077)
    try:
        target = overlays.mount("b", [lower])
        out = tmp_path / "out"
        carry(source, target, out)
    finally:
        os.umask(old)
    wanted = tree(source.path)
    del wanted["device"]
    assert tree(target.path) == wanted
    with open(target.path / "sparse", "rb") as file:
        file.seek(512 << 20)
        assert file.read(4) == b"abc\0"
    assert (target.path / "sparse").stat().st_blocks * 512 < 1 << 20
    assert (out / "rootfs-diff.tar").stat().st_size < 1 << 20
    deleted = json.loads((out / "deleted.files").read_text())
    assert sorted(deleted) == ["/data/one", "/data/sub/deep", "/etc/old.conf", "/gone"]


def test_what_is_left_out_is_named(overlays: Overlays, lower: Path, tmp_path: Path) -> None:
    source = overlays.mount("a", [lower])
    change(source.path)
    (source.path / "etc/hosts").touch()
    (source.path / "etc/other").touch()
    result = write_diff(source, tmp_path, mount_points=("/etc/hosts",))
    assert result.rootfs.skipped == ("/device", "/s")
    names = subprocess.run(
        ["tar", "tf", str(tmp_path / "rootfs-diff.tar")], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert "etc/other" in names
    assert "etc/hosts" not in names


def test_four_generations_keep_every_file(overlays: Overlays, lower: Path, tmp_path: Path) -> None:
    view = overlays.mount("g0", [lower])
    for generation in range(1, 5):
        (view.path / f"made-{generation}").write_text(str(generation))
        fresh = overlays.mount(f"g{generation}", [lower])
        carry(view, fresh, tmp_path / f"out{generation}")
        view = fresh
    assert [(view.path / f"made-{n}").read_text() for n in range(1, 5)] == ["1", "2", "3", "4"]


def test_hidden_entries_are_those_that_several_layers_show(
    overlays: Overlays, lower: Path, tmp_path: Path
) -> None:
    first = overlays.mount("l", [lower])
    (first.path / "data/one").unlink()
    (first.path / "data/three").write_text("3")
    subprocess.run(["rm", "-r", str(first.path / "var/cache")], check=True)
    (first.path / "var/cache").mkdir()
    (first.path / "var/cache/other").write_text("o")
    middle = tmp_path / "l/upper"
    subprocess.run(["umount", str(first.path)], check=True)
    overlays.mounted.remove(first.path)
    # Layers named relative to a directory, as containerd does when there are many.
    source = overlays.mount("a", [Path("l/upper"), Path("lower")], cwd=tmp_path)
    assert source.lower_paths == (middle, lower)
    for name in ("data", "var/cache"):
        subprocess.run(["rm", "-r", str(source.path / name)], check=True)
        (source.path / name).mkdir()
    result = write_diff(source, tmp_path)
    assert result.deleted == ("/data/sub", "/data/three", "/data/two", "/var/cache/other")


def test_file_with_its_data_in_a_lower_layer_is_read_whole(
    overlays: Overlays, lower: Path, tmp_path: Path
) -> None:
    source = overlays.mount("a", [lower], "metacopy=on,redirect_dir=on")
    (source.path / "etc/passwd").chmod(0o604)
    target = overlays.mount("b", [lower])
    carry(source, target, tmp_path / "out")
    assert (target.path / "etc/passwd").read_text() == "root"
    assert stat.S_IMODE((target.path / "etc/passwd").stat().st_mode) == 0o604


def test_renamed_lower_directory_is_refused(overlays: Overlays, lower: Path, tmp_path: Path) -> None:
    source = overlays.mount("a", [lower], "redirect_dir=on")
    (source.path / "data").rename(source.path / "moved")
    with pytest.raises(NotSupported, match="redirect_dir=off"):
        write_diff(source, tmp_path)


def test_plain_directory_is_refused_or_copied_whole(tmp_path: Path, lower: Path) -> None:
    view = find_rootfs(tmp_path, "lower")
    with pytest.raises(NotSupported, match="plain directory"):
        write_diff(view, tmp_path)
    assert not (tmp_path / "rootfs-diff.tar").exists()
    write_diff(view, tmp_path, full_copy=True)
    target = tmp_path / "copy"
    target.mkdir()
    with open(tmp_path / "rootfs-diff.tar", "rb") as diff:
        apply(target, diff, b"[]")
    assert tree(target) == tree(lower)


def test_undo_leaves_the_upper_directory_as_it_was(overlays: Overlays, lower: Path, tmp_path: Path) -> None:
    source = overlays.mount("a", [lower])
    change(source.path)
    target = overlays.mount("b", [lower], "index=off")
    (target.path / "etc/passwd").write_text("made by the caller")
    (target.path / "data/one").unlink()
    before, layer, record = tree(target.path), tree(target.upper_path or tmp_path), tmp_path / "record.json"
    save_upper(target, record, timeout_s=60)
    carry(source, target, tmp_path / "out")
    assert tree(target.path) != before
    undo_apply(record)
    assert tree(target.path) == before
    assert tree(target.upper_path or tmp_path) == layer
    assert not left(tmp_path)
    (target.path / "etc/after").write_text("usable")
    again = find_rootfs(tmp_path / "b")
    assert again.mount is not None
    assert target.mount is not None
    assert (again.upper_path, again.lower_paths) == (target.upper_path, target.lower_paths)
    assert again.mount.options == target.mount.options


def left(path: Path) -> list[Path]:
    """What an undo has left behind."""
    return [*path.glob("*/.torpor-*"), *path.glob("record*")]


def test_undo_of_relative_layers(overlays: Overlays, lower: Path, tmp_path: Path) -> None:
    target = overlays.mount("b", [Path("lower")], cwd=tmp_path)
    save_upper(target, tmp_path / "record.json", timeout_s=60)
    (target.path / "new").touch()
    undo_apply(tmp_path / "record.json")
    assert not (target.path / "new").exists()
    assert (target.path / "data/one").read_text() == "1"


class Killed(BaseException):
    """Nothing of what is to be tested catches it."""


@contextmanager
def killed_at(n_lines: int) -> Generator[None]:
    """End what is called there in front of a line of `shim.images.undo`, as a kill does.

    n_lines: until then; of a loop two rounds count, and of what only looks, locks, or mounts once, no line.
    """
    untold = {"_read", "_is_mounted", "_locked", "_mount_again", "die_with_caller"}
    seen: Counter[tuple[str, int]] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        name = frame.f_code.co_name
        if frame.f_code.co_filename != undo.__file__ or name in untold:
            return None
        place = (name, frame.f_lineno)
        if event == "line" and seen[place] < 2:
            seen[place] += 1
            if seen.total() == n_lines:
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("step", ["save", "undo"])
def test_undo_killed_at_any_line_ends_the_same(
    step: str, overlays: Overlays, lower: Path, tmp_path: Path
) -> None:
    n_lines = 0
    target, record = overlays.mount("b", [lower]), tmp_path / "record.json"
    assert target.upper_path is not None
    (target.path / "etc/passwd").write_text("made by the caller")
    (target.path / "data/one").unlink()
    (target.path / "made").write_text("of the first life")
    target.upper_path.chmod(0o2751)
    before, layer = tree(target.path), tree(target.upper_path)
    for n_lines in itertools.count(1):
        if step == "undo":
            save_upper(target, record, timeout_s=60)
            (target.path / "made").unlink()
            (target.path / "new").write_text("of the image")
        try:
            with killed_at(n_lines):
                if step == "save":
                    save_upper(target, record, timeout_s=60)
                else:
                    undo_apply(record)
            break
        except Killed:
            undo_apply(record)
        where = f"killed at line {n_lines}"
        assert tree(target.upper_path) == layer, where
        assert tree(target.path) == before, where
        assert find_rootfs(tmp_path / "b").upper_path == target.upper_path, where
        assert target.upper_path.stat().st_mode & 0o7777 == 0o2751, where
        assert step == "save" or not left(tmp_path), where
    assert n_lines > 20
    undo_apply(record)
    assert not left(tmp_path)


def test_undo_of_what_its_caller_has_unmounted_mounts_nothing(
    overlays: Overlays, lower: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, record = overlays.mount("b", [lower]), tmp_path / "record.json"
    assert target.upper_path is not None
    save_upper(target, record, timeout_s=60)
    (target.path / "new").touch()
    subprocess.run(["umount", str(target.path)], check=True)
    overlays.mounted.clear()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(undo, "_copy", Mock(side_effect=Killed))
        undo_apply(record)
    undo_apply(record)
    assert not list(target.upper_path.iterdir())
    assert find_rootfs(tmp_path / "b").kind == "directory"
    assert not left(tmp_path)


def test_undo_empties_nothing_below_an_overlay_that_its_caller_has_mounted_again(
    overlays: Overlays, lower: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, record = overlays.mount("b", [lower]), tmp_path / "record.json"
    save_upper(target, record, timeout_s=60)
    (target.path / "new").touch()
    subprocess.run(["umount", str(target.path)], check=True)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("os.scandir", Mock(side_effect=Killed))
        undo_apply(record)
    layers = f"lowerdir={lower},upperdir={target.upper_path},workdir={tmp_path / 'b/work'}"
    subprocess.run(["mount", "-t", "overlay", "-o", layers, "torpor-test", str(target.path)], check=True)
    calls = Mock(wraps=undo._call)
    monkeypatch.setattr(undo, "_call", calls)
    undo_apply(record)
    assert [call.args[0] for call in calls.call_args_list] == ["umount2", "mount"]
    assert not (target.path / "new").exists()
    assert find_rootfs(tmp_path / "b").upper_path == target.upper_path
    assert not left(tmp_path)


def test_undo_below_an_overlay_that_syncs_nothing(overlays: Overlays, lower: Path, tmp_path: Path) -> None:
    """The kernel mounts none again beside the mark that it leaves."""
    target = overlays.mount("b", [lower], "volatile")
    save_upper(target, tmp_path / "record.json", timeout_s=60)
    (target.path / "new").touch()
    undo_apply(tmp_path / "record.json")
    assert not (target.path / "new").exists()
    assert find_rootfs(tmp_path / "b").upper_path == target.upper_path


def test_an_upper_directory_that_finds_no_room_is_left_alone(
    overlays: Overlays, lower: Path, tmp_path: Path
) -> None:
    """Its copy lies beside it: the node's memory is not for it."""
    small, record = tmp_path / "small", tmp_path / "record.json"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "torpor-test", str(small)], check=True)
    inner = Overlays(small)
    try:
        target = inner.mount("b", [lower])
        (target.path / "big").write_bytes(b"b" * (3 << 20))
        with pytest.raises(
            ImageError, match=r"cp: .*/\.torpor-upper-.*No space left on device; free some space$"
        ):
            save_upper(target, record, timeout_s=60)
        undo_apply(record)
        assert not left(small)
        assert (target.path / "big").stat().st_size == 3 << 20
        with pytest.raises(ImageError, match="longer than 0 s; set a longer restore_timeout_s"):
            save_upper(target, record, timeout_s=0)
        undo_apply(record)
        (target.path / "big").write_bytes(b"b" * (2 << 20))
        save_upper(target, record, timeout_s=60)
        assert record.stat().st_size < 4096
        assert next(small.glob("b/.torpor-upper-*/big")).stat().st_size == 2 << 20
        forget(record)
        assert not left(small)
        assert not left(tmp_path)
    finally:
        for path in (*inner.mounted, small):
            subprocess.run(["umount", str(path)], check=True)


def test_full_disk_is_said_before_anything_is_touched(
    overlays: Overlays, lower: Path, tmp_path: Path
) -> None:
    source = overlays.mount("a", [lower])
    (source.path / "big").write_bytes(b"b" * (4 << 20))
    out = tmp_path / "out"
    out.mkdir()
    write_diff(source, out)
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "torpor-test", str(small)], check=True)
    try:
        with open(out / "rootfs-diff.tar", "rb") as diff, pytest.raises(ImageError, match="free some space"):
            apply(small, diff, b"[]")
        assert list(small.iterdir()) == []
        with pytest.raises(ImageError, match="No space left"):
            write_diff(source, small)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_mount_below_the_root_is_not_entered(overlays: Overlays, lower: Path, tmp_path: Path) -> None:
    target = overlays.mount("b", [lower])
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("stays")
    subprocess.run(["mount", "--bind", str(victim), str(target.path / "gone/inner")], check=True)
    try:
        source = overlays.mount("a", [lower])
        subprocess.run(["rm", "-r", str(source.path / "gone")], check=True)
        with pytest.raises((ImageError, ImageCorrupt)):
            carry(source, target, tmp_path / "out")
    finally:
        subprocess.run(["umount", str(target.path / "gone/inner")], check=True)
    assert (victim / "file").read_text() == "stays"


def test_device_nodes_are_named_where_somebody_sees_them(tmp_path: Path, overlays: Overlays) -> None:
    lower = tmp_path / "lower"
    for name in ("dev", "data", "data/volume", "etc"):
        (lower / name).mkdir(parents=True)

    def node(path: Path, kind: int = stat.S_IFCHR) -> None:
        os.mknod(path, kind | 0o600, os.makedev(1, 3))

    for name in ("dev/null", "data/given", "data/gone", "data/volume/below", "etc/file"):
        node(lower / name)
    view = overlays.mount("one", [lower])
    node(view.path / "data" / "made", stat.S_IFBLK)
    os.mkfifo(view.path / "data" / "fifo")
    (view.path / "data" / "link").symlink_to("given")
    (view.path / "data" / "gone").unlink()  # a whiteout is a device, too
    points = ["/dev", "/data/volume/", "/etc/file"]
    assert device_nodes(view, mount_points=points) == ["/data/given", "/data/made"]
    assert device_nodes(view, mount_points=points, changed=True) == ["/data/made"]
    assert device_nodes(view)[:1] == ["/data/given"]
    assert len(device_nodes(view)) == 5
    plain = RootfsView(path=lower, kind="directory")
    assert device_nodes(plain, mount_points=points, changed=True) == ["/data/given", "/data/gone"]
    assert device_nodes(RootfsView(path=view.path, kind="overlay"), changed=True) == []
