"""The leak checker sees what it is there to see."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path

import pytest

from tests.support import leaks
from tests.support.containers import command, tool

pytestmark = pytest.mark.engine


def test_every_kind_of_leak_is_found_and_forgotten(tmp_path: Path) -> None:
    tag = f"torpor-{secrets.token_hex(4)}"
    staging = tmp_path / "staging"
    staging.mkdir()
    watch = leaks.Watch(tag, gone=[f"{staging}/*"])
    assert watch.leaks(timeout_s=0) == []

    group = next(iter(leaks.hierarchies())) / tag / "left"
    mounted = tmp_path / tag
    marked = {**os.environ, leaks.TAG_VARIABLE: tag}
    sleeper = subprocess.Popen(["unshare", "--net", "sleep", "60"], env=marked)
    try:
        group.mkdir(parents=True)
        mounted.mkdir()
        command("mount", "-t", "tmpfs", "none", mounted)
        (staging / "half").mkdir()
        while os.readlink(f"/proc/{sleeper.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            assert sleeper.poll() is None
        command("nsenter", "--net", "-t", str(sleeper.pid), tool("nft"), "add table inet CRIU-left")
        found = "\n".join(watch.leaks(timeout_s=0))
    finally:
        sleeper.kill()
        sleeper.wait()
        command("umount", mounted, check=False)
        leaks.remove_cgroups(tag)
    for kind in ("process", "mount", "cgroup", "network lock", "file"):
        assert f"{kind}: " in found, found
    (staging / "half").rmdir()
    assert watch.leaks() == []
