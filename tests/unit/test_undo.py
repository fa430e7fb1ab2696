"""What is left of an upper directory when its copy meets another's, a kill, or damage."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.api import ImageError
from engines.mountinfo import parse
from shim.images import undo
from shim.images.rootfs import RootfsView
from shim.images.undo import forget, save_upper, undo_apply
from tests.support.containers import until


def view_in(bundle: Path) -> RootfsView:
    """What looks like an overlay that its caller has unmounted."""
    upper = bundle / "upper"
    upper.mkdir(exist_ok=True)
    mount = next(parse(b"1 0 0:1 / /root rw - overlay none rw\n"))
    return RootfsView(path=bundle / "rootfs", kind="overlay", upper_path=upper, mount=mount)


def copies(bundle: Path) -> list[Path]:
    return list(bundle.glob(".torpor-*"))


def test_the_copy_of_another_restore_is_left_alone_and_named(tmp_path: Path) -> None:
    """It may be all that there is of what the directory held: its record may have gone with a reboot."""
    view, first, second = view_in(tmp_path), tmp_path / "first.json", tmp_path / "second.json"
    (tmp_path / "upper" / "old").touch()
    (tmp_path / ".torpor-upper-2-0123456789abcdef").mkdir()  # of a directory beside it
    save_upper(view, first, timeout_s=60)
    (kept,) = tmp_path.glob(".torpor-upper-*/old")
    (tmp_path / "upper" / "old").unlink()
    with pytest.raises(
        ImageError, match=rf"'{kept.parent}' is another restore's, .* and remove the copy$"
    ) as refused:
        save_upper(view, second, timeout_s=60)
    assert not refused.value.undone
    undo_apply(second)
    assert not second.exists()
    assert len(copies(tmp_path)) == 2
    undo_apply(first)
    assert (tmp_path / "upper" / "old").exists()
    save_upper(view, second, timeout_s=60)


@pytest.mark.parametrize("step", ["kept", "wiping", "moving"])
def test_a_copy_that_is_gone_is_not_taken_for_put_back(tmp_path: Path, step: str) -> None:
    view, record = view_in(tmp_path), tmp_path / "record.json"
    save_upper(view, record, timeout_s=60)
    record.write_text(record.read_text().replace('"kept"', f'"{step}"'))
    copies(tmp_path)[0].rmdir()
    (tmp_path / "upper" / "new").touch()
    with pytest.raises(ImageError, match=rf"its copy .* is gone; make the .* and remove '{record}'"):
        undo_apply(record)
    assert (tmp_path / "upper" / "new").exists()
    (tmp_path / "upper" / "new").unlink()
    (tmp_path / "upper").rmdir()  # its caller removes it all
    undo_apply(record)
    assert not record.exists()


@pytest.mark.parametrize("text", ["", "[]", '{"step": "kept"}', "\xff"])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    record = tmp_path / "record.json"
    record.write_text(text, encoding="latin-1")
    for call in (undo_apply, forget):
        with pytest.raises(ImageError, match=rf"could not read '{record}'.* damaged; .* remove the file$"):
            call(record)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in {"Z", "X"}
    except OSError:
        return False


def test_a_killed_call_takes_what_copies_with_it(tmp_path: Path) -> None:
    """Else it would go on writing into what the next call removes."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "cp"
    program.write_text(
        f"#!/bin/sh\necho $$ >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 60\n"
    )
    program.chmod(0o755)
    (tmp_path / "upper").mkdir()
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\nfrom types import SimpleNamespace as S\n"
        "from shim.images.undo import save_upper\n"
        f"path = Path({str(tmp_path)!r})\n"
        "mount = S(source='none', options=(), super_options=())\n"
        "view = S(path=path, upper_path=path / 'upper', mount=mount)\n"
        "save_upper(view, path / 'record.json', timeout_s=60)\n"
    )
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as caller:
        until((tmp_path / "pid").exists, what="it copies")
        caller.kill()
    pid = int((tmp_path / "pid").read_text())
    undo_apply(tmp_path / "record.json")  # waits until it has let go of its files
    try:
        assert not copies(tmp_path)
        until(lambda: not alive(pid), what="it is dead")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)


def test_what_still_copies_is_waited_for(tmp_path: Path) -> None:
    """The lock of a container is free a moment before what its killed call ran is dead."""
    record = tmp_path / "record.json"
    save_upper(view_in(tmp_path), record, timeout_s=60)
    (copy,) = copies(tmp_path)
    words = ["sh", "-c", f"sleep 0.2; mkdir -p {copy}/late"]
    with undo._locked(copy) as descriptor:
        process = subprocess.Popen(words, pass_fds=(descriptor,))
    with process:
        forget(record)
    assert not copies(tmp_path)
