"""What a sandbox's processes hold of the node's files, from what runsc says of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from engines.api import FileNeed
from engines.elf import build_id
from engines.gvisor import held
from engines.gvisor.births import parse


def told(*opened: str, **more: Any) -> str:
    """A process, as `runsc trace procfs` prints it."""
    document: dict[str, Any] = {
        "exe": "/bin/app",
        "cwd": "/",
        "fdlist": [{"number": number, "path": path} for number, path in enumerate(opened)],
        "clone_ts": 1,
        "status": {"pid": 1, "comm": "app"},
        "stat": {"sid": 1},
        "maps": [{"pathname": "/lib/so"}, {"pathname": "[heap]"}, {}],
    }
    return "PROCFS DUMP\n" + json.dumps({**document, **more})


def needs(root: Path, text: str, mounts: dict[str, dict[str, Any]] | None = None) -> dict[str, FileNeed]:
    return {need.path: need for need in held.files(parse(text), root, mounts or {})}


def test_what_lies_on_the_node_is_needed_and_nothing_else(tmp_path: Path):
    root, volume = tmp_path / "root", tmp_path / "volume"
    for folder in (root / "bin", root / "lib", root / "data", volume):
        folder.mkdir(parents=True)
    for path in (root / "bin/app", root / "lib/so", root / "data/table", volume / "log"):
        path.write_bytes(b"12345")
    os.mkfifo(volume / "fifo")
    (root / "tmp").mkdir()
    (root / "tmp/under").touch()
    mounts: dict[str, dict[str, Any]] = {
        "/vol": {"type": "bind", "source": str(volume)},
        "/tmp": {"type": "tmpfs", "source": "tmpfs"},
        "/etc/name": {"source": str(volume / "log"), "options": ["rbind", "ro"]},
    }
    opened = ("/data/table", "/data/new", "/vol/log", "/vol/fifo", "/tmp/under", "/etc/name", "host:[1]")
    (root / "data/below").touch()
    (volume / "gone").touch()
    deleted = ("/vol/gone (deleted)", "/data/below (deleted)", "/data/made (deleted)")
    found = needs(root, told(*opened, *deleted, cwd="/data"), mounts)
    assert found.keys() == {
        *("/bin/app", "/lib/so", "/data", "/data/table", "/vol/log", "/vol/fifo", "/etc/name"),
        "/data/below",  # deleted in the overlay only
    }
    assert {path: (need.kind, need.use) for path, need in found.items() if need.kind != "file"} == {
        "/data": ("directory", "working-directory"),
        "/vol/fifo": ("fifo", "open"),
    }
    sizes = {path for path, need in found.items() if need.size_bytes == 5}
    assert sizes == {"/bin/app", "/lib/so", "/data/table"}, "a volume's files may grow"


def test_no_told_path_leads_out_of_the_container(tmp_path: Path):
    root, volume = tmp_path / "root", tmp_path / "volume"
    for folder in (root / "bin", volume, tmp_path / "outside"):
        folder.mkdir(parents=True)
    (tmp_path / "outside/secret").write_text("123")
    for folder in (root, volume):
        (folder / "link").symlink_to(tmp_path / "outside")
        (folder / "up").symlink_to("../outside")
    (root / "way").symlink_to("/vol")
    (volume / "log").touch()
    ways = ("/link/secret", "/up/secret", "/../outside/secret", "/vol/link/secret", "/vol/up/secret")
    opened = (*ways, "/vol/../../outside/secret", "/way/log", "/way/gone (deleted)", "/vol/a\0b")
    (volume / "gone").touch()
    found = needs(root, told(*opened), {"/vol": {"type": "bind", "source": str(volume)}})
    assert found.keys() == {"/", "/way/log"}
    assert found["/way/log"].size_bytes == -1, "it is a volume's"


def test_a_library_is_known_by_its_build(tmp_path: Path):
    (tmp_path / "lib").mkdir()
    own = Path(sys.executable).resolve()
    (tmp_path / "lib/so").write_bytes(own.read_bytes())
    found = needs(tmp_path, told("/lib/so"))
    assert set(found) == {"/", "/lib/so"}
    with own.open("rb") as file:
        wanted = build_id(file.fileno())
    assert (found["/lib/so"].size_bytes, found["/lib/so"].build_id) == (own.stat().st_size, wanted)
