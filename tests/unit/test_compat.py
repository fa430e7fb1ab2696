"""The verdict: each rule with a yes, a no and, where nobody knows, an unknown."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compat import profile, verdict
from compat.profile import Profile
from engines.api import FileNeed, Finding, MountNeed, Needs
from tests.support.containers import make_spec

V3 = ("abm", "aes", "avx", "avx2", "bmi1", "bmi2", "erms", "fma", "movbe", "popcnt", "sse4_2", "xsave")
NODE = Profile(
    arch="x86_64",
    kernel="6.12.41+deb13-cloud-amd64",
    cpu_flags=V3,
    page_size_bytes=4096,
    cgroup_mode="v2",
    boot_id="b",
)


def mount(destination: str, fstype: str = "other", *, external: bool = True) -> MountNeed:
    return MountNeed(destination=destination, fstype=fstype, source="", external=external)


NEEDS = Needs(
    engine="criu",
    image_version="2",
    tasks=(),
    namespaces={"network": "own"},
    mounts=(
        mount("/"),
        *(
            mount(entry["destination"], entry["type"], external=False)
            for entry in make_spec(["app"])["mounts"]
        ),
    ),
    xsave=True,
)


def spec(edit: Callable[[dict[str, Any]], object] = lambda _: None) -> dict[str, Any]:
    document = make_spec(["app"])
    edit(document)
    return document


def judge(needs: Needs = NEEDS, new: dict[str, Any] | None = None, **more: Any) -> tuple[Finding, ...]:
    more.setdefault("dump_host", NODE)
    more.setdefault("node", NODE)
    more.setdefault("rootfs_path", Path("/nonexistent"))
    return verdict.judge(needs, new or spec(), **more)


def only(findings: tuple[Finding, ...], rule: str, severity: str = "refuse") -> Finding:
    assert [(finding.rule, finding.severity) for finding in findings] == [(rule, severity)]
    assert findings[0].remedy
    return findings[0]


def test_the_same_node_and_spec():
    assert judge() == ()


# --- processor and kernel ------------------------------------------------------------------------------


def test_architecture():
    only(judge(dump_host=replace(NODE, arch="aarch64", cpu_flags=("asimd",))), "cpu.architecture")


def test_xsave():
    old = replace(NODE, cpu_flags=("popcnt",))
    only(judge(node=old, dump_host=replace(old, cpu_flags=("popcnt",))), "cpu.xsave")
    without = replace(NEEDS, xsave=False)
    assert judge(without, node=old, dump_host=old) == ()
    assert judge(replace(NEEDS, xsave=None), node=old, dump_host=old) == ()


def without(*flags: str) -> Profile:
    return replace(NODE, cpu_flags=tuple(flag for flag in V3 if flag not in flags))


@pytest.mark.parametrize("flag", ["avx2", "popcnt", "bmi1", "movbe"])
def test_flags_that_the_c_library_picks(flag: str):
    found = only(judge(node=without(flag)), "cpu.features")
    assert flag in found.message
    assert f"glibc.cpu.hwcaps=-{flag.upper()}" in found.remedy


def test_glibc_has_its_own_name_for_lzcnt():
    assert "hwcaps=-LZCNT,-AVX2" in only(judge(node=without("abm", "avx2")), "cpu.features").remedy


def test_flags_that_a_program_may_use_only_warn():
    only(judge(node=without("aes")), "cpu.features", "warn")


def test_harmless_flags_and_more_flags_are_no_reason():
    assert judge(node=without("erms")) == ()
    assert judge(node=replace(NODE, cpu_flags=(*V3, "avx512f", "pku"))) == ()


def test_unrecorded_processor():
    only(judge(dump_host=None), "cpu.features", "unknown")


def test_page_size():
    only(judge(dump_host=replace(NODE, page_size_bytes=65536)), "kernel.page-size")


@pytest.mark.parametrize(
    ("kernel", "severity"),
    [
        ("6.1.0-35-amd64", "refuse"),
        ("5.15.0", "refuse"),
        ("6.11.0", ""),
        ("6.18.44", ""),
        ("weird", "unknown"),
    ],
)
def test_droppable(kernel: str, severity: str):
    node = replace(NODE, kernel=kernel)
    found = judge(replace(NEEDS, droppable_mappings=True), node=node)
    assert [finding.severity for finding in found] == ([severity] if severity else [])
    assert judge(node=node) == ()


def with_mounts(*more: MountNeed) -> Needs:
    return replace(NEEDS, mounts=(*NEEDS.mounts, *more))


def test_kernel_paths():
    only(judge(with_mounts(mount("/proc/of-another-kernel", "proc", external=False))), "kernel.paths")
    assert judge(with_mounts(mount("/proc/sys", "proc", external=False))) == ()


def test_cgroup_mode():
    hybrid = replace(NODE, cgroup_mode="hybrid")
    assert judge(dump_host=hybrid) == ()
    needs = with_mounts(mount("/sys/fs/cgroup", "cgroup", external=False))
    only(judge(needs, dump_host=hybrid), "cgroup.mode")
    assert judge(needs) == ()
    assert [f.rule for f in judge(needs, dump_host=None)] == ["cgroup.mode", "cpu.features"]


# --- the spec ------------------------------------------------------------------------------------------


def test_terminal():
    wanting = spec(lambda document: document["process"].update(terminal=True))
    only(judge(new=wanting), "spec.terminal")
    only(judge(replace(NEEDS, terminal=True)), "spec.terminal")
    assert judge(replace(NEEDS, terminal=True), wanting) == ()


@pytest.mark.parametrize("had", ["own", "external", "host"])
@pytest.mark.parametrize("wants", ["own", "external", "host"])
def test_network_kind(had: Any, wants: str, tmp_path: Path):
    path = tmp_path / "netns"
    path.touch()

    def edit(document: dict[str, Any]) -> None:
        kept = [entry for entry in document["linux"]["namespaces"] if entry["type"] != "network"]
        given = {
            "own": [{"type": "network"}],
            "external": [{"type": "network", "path": str(path)}],
            "host": [],
        }
        document["linux"]["namespaces"] = kept + given[wants]

    found = judge(replace(NEEDS, namespaces={"network": had}), spec(edit))
    assert [finding.rule for finding in found] == ([] if had == wants else ["spec.network"])


def test_network_by_the_hosts_own_path():
    def edit(document: dict[str, Any]) -> None:
        for entry in document["linux"]["namespaces"]:
            if entry["type"] == "network":
                entry["path"] = "/proc/self/ns/net"

    assert judge(replace(NEEDS, namespaces={"network": "host"}), spec(edit)) == ()


def bound(*destinations: str, kind: str = "bind") -> dict[str, Any]:
    entries = [
        {
            "destination": path,
            "type": kind,
            "source": "/",
            "options": ["rbind"] if kind == "bind" else [],
        }
        for path in destinations
    ]
    return spec(lambda document: document["mounts"].extend(entries))


def test_mounts():
    needs = with_mounts(mount("/data"))
    assert judge(needs, bound("/data")) == ()
    assert "names no source" in only(judge(needs), "mounts.missing").message
    only(judge(new=bound("/data")), "mounts.added")
    only(judge(with_mounts(mount("/data", "tmpfs", external=False)), bound("/data")), "mounts.kind")
    # A tmpfs that the image has is nothing that CRIU has to be given; one that only the spec has is not made.
    assert judge(with_mounts(mount("/t", "tmpfs", external=False)), bound("/t", kind="tmpfs")) == ()
    only(judge(new=bound("/u", kind="tmpfs")), "mounts.added")


def test_mounts_that_the_runtime_itself_makes():
    needs = with_mounts(mount("/proc/keys", "tmpfs"), mount("/dev/null", "devtmpfs"))
    assert judge(needs) == ()


def test_mounts_behind_links(tmp_path: Path):
    """Kubernetes mounts on /var/run/secrets, which is /run/secrets in most container images."""
    (tmp_path / "run").mkdir()
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("/run")
    needs = with_mounts(mount("/run/secrets/token"))
    assert judge(needs, bound("/var/run/secrets/token"), rootfs_path=tmp_path) == ()
    found = judge(needs, bound("/var/run/secrets/token"), rootfs_path=None)
    assert [(f.rule, f.severity) for f in found] == [
        ("mounts.missing", "unknown"),
        ("mounts.added", "unknown"),
    ]


# --- files ---------------------------------------------------------------------------------------------


def opened(path: str, size: int = 3, mode: int = 0o644) -> Needs:
    need = FileNeed(path=path, size_bytes=size, mode=mode)
    return replace(with_mounts(mount("/vol")), files=(need,))


def rule_names(findings: tuple[Finding, ...]) -> list[str]:
    return [finding.rule for finding in findings]


@pytest.mark.parametrize("where", ["rootfs", "volume"])
def test_files(tmp_path: Path, where: str):
    root, volume = tmp_path / "root", tmp_path / "vol"
    root.mkdir()
    volume.mkdir()
    entry = {"destination": "/vol", "type": "bind", "source": str(volume), "options": ["bind"]}
    new = spec(lambda document: document["mounts"].append(entry))
    file = (volume if where == "volume" else root) / "log"
    path = "/vol/log" if where == "volume" else "/log"

    def found(needs: Needs) -> list[str]:
        return rule_names(verdict.judge_files(needs, new, root))

    assert found(opened(path)) == ["files.missing"]
    file.write_text("abc")
    file.chmod(0o644)
    assert found(opened(path)) == []
    assert found(opened(path, size=4)) == ["files.size"]
    assert found(opened(path, mode=0o600)) == ["files.mode"]
    assert found(opened(path, size=-1, mode=-1)) == []
    # Before the image's changes are applied only volumes can be judged.
    before = rule_names(judge(opened(path, size=4), new, rootfs_path=root))
    assert before == (["files.size"] if where == "volume" else [])
    file.unlink()
    file.mkdir()
    assert found(opened(path)) == ["files.missing"]


def library(build: bytes, *, wide: bool = True, notes: int = 2) -> bytes:
    """An ELF file that is nothing but notes: one of another kind, then the build id."""
    other = struct.pack("<III4sI", 4, 4, 1, b"GNU\0", 0)
    own = struct.pack("<III4s", 4, len(build), 3, b"GNU\0") + build
    body = b"".join((other, own)[:notes])
    if wide:
        head = b"\x7fELF\2\1\1".ljust(32, b"\0") + struct.pack("<QQIHHHHHH", 64, 0, 0, 64, 56, 1, 0, 0, 0)
        table = struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(body), len(body), 4)
    else:
        head = b"\x7fELF\1\1\1".ljust(28, b"\0") + struct.pack("<IIIHHHHHH", 52, 0, 0, 52, 32, 1, 0, 0, 0)
        table = struct.pack("<IIIIIIII", 4, 84, 0, 0, len(body), len(body), 4, 4)
    return head + table + body


@pytest.mark.parametrize("wide", [True, False])
def test_builds(tmp_path: Path, wide: bool):
    file = tmp_path / "lib"
    need = FileNeed(path="/lib", size_bytes=-1, mode=-1, build_id="01" * 20)
    needs = replace(NEEDS, files=(need,))

    def found(content: bytes) -> list[str]:
        file.write_bytes(content)
        return rule_names(verdict.judge_files(needs, spec(), tmp_path))

    assert found(library(b"\1" * 20, wide=wide)) == []
    other = library(b"\2" * 20, wide=wide)
    assert found(other) == ["files.build-id"]
    assert found(library(b"", wide=wide, notes=1)) == [], "one that does not say"
    assert found(b"no program at all") == []
    for length in range(len(other)):  # cut short anywhere, it is never an error
        assert found(other[:length]) in ([], ["files.build-id"])
    damaged = bytes(255 if 28 <= place < 64 else byte for place, byte in enumerate(other))
    assert found(damaged) == []


# --- profiles ------------------------------------------------------------------------------------------


def test_profile_of_this_node(tmp_path: Path):
    cache = tmp_path / "profile.json"
    found = profile.load(cache)
    assert (found.arch, found.kernel) == (os.uname().machine, os.uname().release)
    assert {"fpu", "fp"} & set(found.cpu_flags)
    assert found.cgroup_mode in {"v1", "hybrid", "v2"}
    assert profile.load(None) == profile.load(cache) == found


def test_profile_is_kept_until_the_next_boot(tmp_path: Path):
    cache = tmp_path / "profile.json"
    found = profile.load(cache)
    kept = cache.read_text().replace(found.kernel, "9.9.9")
    cache.write_text(kept)
    assert profile.load(cache).kernel == "9.9.9"
    cache.write_text(kept.replace(found.boot_id, "another"))
    assert profile.load(cache) == found
    assert profile.load(cache) == found


@pytest.mark.parametrize("content", ["", "{", '{"arch": 1}', '{"schema": 99}'])
def test_damaged_cache_is_only_slower(tmp_path: Path, content: str):
    cache = tmp_path / "profile.json"
    cache.write_text(content)
    assert profile.load(cache) == profile.load(None)
    assert profile.load(tmp_path / "absent" / "profile.json") == profile.load(None)
