"""`torpor images` with archives that Podman really wrote."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.containers import tool, until
from tests.support.counter import COUNTER
from tests.support.podman import Podman
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine

SECRET = "hunter2-in-the-environment"


@pytest.fixture
def archive(podman: Podman) -> Path:
    """Checkpoint of a container that changed its root file system, with a secret in its environment."""
    podman.run("exported", *COUNTER, options=[f"--env=PASSWORD={SECRET}"])
    until(lambda: podman.numbers("exported"), what="the first tick")
    podman("exec", "exported", "sh", "-c", "echo kept > /kept; rm /etc/group; mkdir -m 2775 /odd")
    path = podman.path / "exported.tar"
    podman("container", "checkpoint", "--compress=none", "--export", path, "exported")
    return path


def test_import_show_verify_remove(torpor: Torpor, archive: Path) -> None:
    done = torpor.json("images", "import", archive, "--name", "job", "--namespace", "shop")
    assert done["image"] == "shop/job"
    listed = torpor.json("images", "ls", "--namespace", "shop")
    assert [(row["image"], row["state"], row["digest"]) for row in listed] == [
        ("shop/job", "ready", done["digest"])
    ]
    assert "shop/job" in torpor("images", "ls").stdout

    shown = torpor.json("images", "inspect", f"shop/job@{done['digest']}")
    assert shown["manifest"]["rootfs"]["kind"] == "overlay"
    assert shown["manifest"]["imported"]["archive"] == "podman"
    assert shown["manifest"]["imported"]["manifest_digest"]
    assert shown["manifest"]["host"]["page_size_bytes"] == os.sysconf("SC_PAGE_SIZE")
    assert shown["needs"]["tasks"]
    assert shown["process"]["env"]["PASSWORD"] == "(redacted)"
    text = torpor("images", "inspect", "job", "--namespace", "shop").stdout
    assert "PASSWORD" in text
    for output in (text, json.dumps(shown), torpor("images", "ls", "--json").stdout):
        assert SECRET not in output

    path = torpor.image_path("job", namespace="shop")
    assert "/etc/group" in json.loads((path / "deleted.files").read_text())
    names = subprocess.run(
        ["tar", "tf", str(path / "rootfs-diff.tar")], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert {"kept", "odd/"} <= set(names)
    for entry in [path, *path.rglob("*")]:
        assert stat.S_IMODE(entry.stat().st_mode) & 0o077 == 0

    assert torpor.json("images", "verify", "shop/job")[0]["ok"]
    pages = next(path.glob("checkpoint/pages-*.img"))
    with pages.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff\x00\xff")
    assert torpor("images", "verify", "--no-pages", "shop/job").returncode == 0
    failed = torpor("images", "verify", "shop/job", check=False)
    assert failed.returncode == 1
    assert pages.name in failed.stderr

    torpor("images", "rm", "shop/job")
    assert torpor.json("images", "ls", "--namespace", "shop") == []
    gone = torpor("images", "rm", "shop/job", check=False)
    assert gone.returncode == 1
    assert "could not find image 'shop/job'" in gone.stderr


def test_other_tools_read_what_the_store_keeps(torpor: Torpor, archive: Path, tmp_path: Path) -> None:
    torpor.import_archive(archive, "judged")
    copy = tmp_path / "copy.tar"
    subprocess.run(["tar", "cf", str(copy), "-C", str(torpor.image_path("judged")), "."], check=True)
    shown = subprocess.run(
        [str(tool("checkpointctl")), "inspect", "--ps-tree", str(copy)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "sh" in shown
    torpor("images", "rm", "judged")


@pytest.mark.parametrize("name", ["../x", "a/b", "-x", "x" * 300, "a:b"])
def test_name_that_is_none_is_refused(torpor: Torpor, tmp_path: Path, name: str) -> None:
    (tmp_path / "a.tar").touch()
    failed = torpor("images", "import", tmp_path / "a.tar", "--name", name, check=False)
    assert failed.returncode != 0
    assert "Traceback" not in failed.stderr


def test_refused_import_is_audited_and_leaves_nothing(torpor: Torpor, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/pages-1.img").symlink_to("/etc/shadow")
    path = tmp_path / "evil.tar"
    subprocess.run(["tar", "cf", str(path), "checkpoint"], check=True, cwd=tmp_path)
    failed = torpor("images", "import", path, "--name", "evil", check=False)
    assert failed.returncode == 1
    assert "'checkpoint/pages-1.img' is a symbolic link" in failed.stderr
    assert not torpor.image_path("evil").exists()
    assert list((torpor.store_path / "staging").iterdir()) == []
    last = torpor.audit()[-1]
    assert last["event"] == "import"
    assert last["verdict"].startswith("refused")
