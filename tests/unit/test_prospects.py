"""What the shim asks the verdict: this node, an image's origin, and what a node's configuration overrules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compat import profile
from compat.rules.cpu import PICKED_BY_GLIBC
from shim import prospects
from shim.config import Config
from tests.support.containers import make_spec
from tests.support.verdicts import image


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        runtime_path=Path("/bin/true"),
        state_path=tmp_path / "state",
        store_path=tmp_path / "store",
        tools_path=tmp_path,
    )


def test_the_profile_is_kept_from_the_first_time_on_and_memory_read_each_time(config: Config):
    assert not config.state_path.exists()  # as on a node that has restored nothing yet
    found = prospects.now(config, config.state_path)
    assert (found.memory_available_bytes or 0) > 0
    assert prospects.stable(config).memory_available_bytes is None
    assert (config.state_path / prospects.PROFILE).is_file()


def test_a_node_may_overrule_what_concerns_the_processor(config: Config, tmp_path: Path):
    here = profile.load(None)
    missing = sorted(PICKED_BY_GLIBC - set(here.cpu_flags))[0]
    manifest: Any = SimpleNamespace(
        host=replace(here, cpu_flags=(*here.cpu_flags, missing)),
        security=SimpleNamespace(seccomp_digest=""),
    )
    needs = image(tasks=(), arch=here.arch, namespaces={"network": "own", "mount": "own", "pid": "own"})

    def severity(config: Config) -> list[tuple[str, bool]]:
        found = prospects.examine(config, make_spec(["a"]), needs, manifest, bundle_path=tmp_path)
        return [(one.severity, "overruled" in one.message) for one in found if one.rule == "cpu.features"]

    assert severity(config) == [("refuse", False)]
    assert severity(replace(config, overruled=("cpu.features",))) == [("warn", True)]
