"""A node's profile: each probe finds it, says it is not there, or says why nobody knows."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from compat import profile
from compat.probes import (
    cgroups,
    gpus,
    kernel,
    machine,
    namespaces,
    netfilter,
    processor,
    resources,
    security,
    tools,
)
from compat.probes.base import Answer, System, probe
from compat.profile import ProfileError
from tests.support.gpu import Fabric


def write(root: Path, name: str, text: str = "") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def program(folder: Path, name: str, script: str) -> Path:
    path = write(folder, name, f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_probe_never_raises():
    @probe("it")
    def read(system: System) -> dict[str, Any]:
        raise RuntimeError("the disk\nis on fire")

    assert read(System()) == Answer(unknown={"it": "the disk is on fire"})


def test_processor_as_the_kernel_shows_it(tmp_path: Path):
    write(
        tmp_path,
        "proc/cpuinfo",
        "vendor_id\t: V\nmodel name\t: M 1\nflags\t: b a b\n\nflags\t: c\n",
    )
    found = machine.processor(System(root=tmp_path))
    assert found.values == {"cpu_vendor": "V", "cpu_model": "M 1", "cpu_flags": ("a", "b")}
    write(tmp_path, "proc/cpuinfo", "processor\t: 0\n")
    assert "cpu" in machine.processor(System(root=tmp_path)).unknown
    assert "cpu" in machine.processor(System(root=tmp_path / "none")).unknown


def test_level_and_state_size_agree_with_the_flags():
    flags = machine.processor(System()).values["cpu_flags"]
    found = processor.read(System()).values
    if os.uname().machine == "x86_64":
        assert (found["cpu_level"] >= 3) == ({"avx2", "bmi2", "movbe"} <= set(flags))
        size = processor.xsave(System()).values["xsave_bytes"]
        assert (size > 576) == ("avx" in flags)


@pytest.mark.parametrize(
    ("file", "mode"),
    [("cgroup.controllers", "v2"), ("unified/cgroup.controllers", "hybrid"), ("memory/tasks", "v1")],
)
def test_cgroups(tmp_path: Path, file: str, mode: str):
    assert cgroups.read(System(root=tmp_path)).unknown
    write(tmp_path, f"sys/fs/cgroup/{file}")
    assert cgroups.read(System(root=tmp_path)).values == {"cgroup_mode": mode}


def test_security_module(tmp_path: Path):
    assert security.read(System(root=tmp_path)).values == {"lsm": ""}
    write(tmp_path, "sys/module/apparmor/parameters/enabled", "Y\n")
    assert security.read(System(root=tmp_path)).values == {"lsm": "apparmor"}
    write(tmp_path, "sys/fs/selinux/enforce", "1")
    assert security.read(System(root=tmp_path)).values == {"lsm": "selinux"}


def test_user_namespaces_that_may_not_be_made_do_not_count(tmp_path: Path):
    for kind in ("user", "time", "time_for_children"):
        write(tmp_path, f"proc/self/ns/{kind}")
    assert namespaces.read(System(root=tmp_path)).values == {"namespaces": ("time",)}
    write(tmp_path, "proc/sys/user/max_user_namespaces", "100\n")
    assert namespaces.read(System(root=tmp_path)).values == {"namespaces": ("time", "user")}
    assert namespaces.read(System(root=tmp_path / "none")).unknown


def test_paths_of_the_kernel(tmp_path: Path):
    assert kernel.paths(System(root=tmp_path)).unknown
    write(tmp_path, "proc/self/x")
    write(tmp_path, "proc/kcore")
    assert kernel.paths(System(root=tmp_path)).values == {"kernel_paths": ("/proc/kcore",)}
    write(tmp_path, "sys/devices/system/cpu/cpu3/thermal_throttle/x")
    found = kernel.paths(System(root=tmp_path)).values["kernel_paths"]
    assert found == ("/proc/kcore", "/sys/devices/system/cpu/cpu3/thermal_throttle")
    assert all(map(kernel.maskable, found))
    assert not kernel.userfaultfd(System()).unknown


def test_packet_filter(tmp_path: Path):
    assert netfilter.read(System(search_path=str(tmp_path))).values == {"netfilter": ""}
    program(tmp_path, "iptables-restore", "")
    assert netfilter.read(System(search_path=str(tmp_path))).values == {"netfilter": "iptables"}
    program(tmp_path, "nft", "")
    assert netfilter.read(System(search_path=str(tmp_path))).values == {"netfilter": "nftables"}


def test_memory_and_disk(tmp_path: Path):
    write(tmp_path, "proc/meminfo", "MemTotal:  100 kB\nMemAvailable:  40 kB\n")
    found = resources.memory(System(root=tmp_path)).values
    assert found == {"memory_bytes": 102400, "memory_available_bytes": 40960}
    write(tmp_path, "proc/meminfo", "MemTotal:  100 kB\n")
    assert "memory" in resources.memory(System(root=tmp_path)).unknown
    for free, reserved, left in ((3, 0, 3), (3, 2, 1), (3, 4, 0)):
        write(tmp_path, "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", f"{free}\n")
        write(tmp_path, "sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", f"{reserved}\n")
        assert resources.hugepages(System(root=tmp_path)).values == {"hugepages": {"2097152": left}}
    write(tmp_path, "proc/sys/kernel/pid_max", "32768\n")
    assert resources.pid_max(System(root=tmp_path)).values == {"pid_max": 32768}
    assert resources.pid_max(System(root=tmp_path / "none")).unknown
    absent = tmp_path / "not/yet/there"
    assert resources.disk(System(store_path=absent, bundle_path=absent)).values["store_free_bytes"] > 0
    write(
        tmp_path,
        "proc/self/mountinfo",
        "1 2 0:1 / / rw - ext4 /d rw\n3 1 0:2 / /s rw shared:1 - nfs4 s:/ rw\n",
    )
    assert resources.storage(System(root=tmp_path)).values == {"storage": {"ext4": 1, "nfs4": 1}}


def test_versions_of_tools(tmp_path: Path):
    good = program(tmp_path, "criu", "echo 'Version: 4.2.1'")
    bad = program(tmp_path, "runc", "echo 'no such library' >&2; exit 127")
    mute = program(tmp_path, "runsc", "echo hello")
    found = tools.versions(System(tools={"criu": good, "runc": bad, "runsc": mute}))
    assert found.values == {"tools": {"criu": "4.2.1"}}
    assert set(found.unknown) == {"tools.runc", "tools.runsc"}
    assert "no such library" in found.unknown["tools.runc"]


_CRIU = """
case "$*" in
check) exit {status} ;;
"check --help") printf '  --feature FEAT   only check, one of:\\n   mnt_id, \\n  rare\\n\\nnext\\n' ;;
"check --feature mnt_id") ;;
*) echo no >&2; exit 1 ;;
esac
"""


def test_features_of_criu(tmp_path: Path):
    criu = program(tmp_path, "criu", _CRIU.format(status=0))
    found = tools.criu_features(System(tools={"criu": criu}))
    assert found == Answer(values={"criu_works": True, "criu_features": ("mnt_id",)})
    criu = program(tmp_path, "criu", _CRIU.format(status=1))
    found = tools.criu_features(System(tools={"criu": criu}))
    assert found.values["criu_works"] is False
    assert tools.criu_features(System()).unknown


def test_gpus(tmp_path: Path):
    assert gpus.read(System(root=tmp_path)).values == {"gpu_driver": "", "gpus": ()}
    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX  580.65.06  Release\n")
    assert "NVML does not answer" in gpus.read(System(root=tmp_path)).unknown["gpus"]
    write(
        tmp_path,
        "proc/driver/nvidia/gpus/0/information",
        "Model: H\nGPU UUID: GPU-1\nDevice Minor: 0\n",
    )
    found = gpus.read(System(root=tmp_path)).values
    assert found == {"gpu_driver": "580.65.06", "gpus": [{"uuid": "GPU-1", "model": "H", "minor": 0}]}


def test_gpus_by_the_management_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX  580.65.06  Release\n")
    fabric = Fabric(tmp_path / "fabric", models=["H100", "L4"])
    for name, value in fabric.environment.items():
        monkeypatch.setenv(name, value)
    found = gpus.read(System(root=tmp_path))
    assert not found.unknown
    assert [gpu["model"] for gpu in found.values["gpus"]] == ["NVIDIA H100", "NVIDIA L4"]
    assert all(gpu["memory_bytes"] > 0 and gpu["mig"] is False for gpu in found.values["gpus"])


def test_a_profile_is_read_as_it_was_written():
    found = profile.full(System())
    assert profile.read(msgspec.json.encode(found), what="it") == found
    assert found.unknown["criu_features"] == "there is no criu"


def test_a_profile_of_another_schema_is_refused():
    data = msgspec.json.encode(profile.load(None))
    with pytest.raises(ProfileError, match="its schema is 9"):
        profile.read(data.replace(b'"schema":2', b'"schema":9'), what="it")
    for damaged in (b"{}", b"no", b"{" * 3, data[:-9], b" " * (2 << 20)):
        with pytest.raises(ProfileError):
            profile.read(damaged, what="it")


def test_the_cache_is_made_anew_when_a_tool_is_replaced(tmp_path: Path):
    cache_path = tmp_path / "profile.json"
    criu = program(tmp_path, "criu", "echo 'Version: 4.1'")
    system = System(tools={"criu": criu})
    assert profile.load(cache_path, system).tools == {"criu": "4.1"}
    criu.unlink()
    program(tmp_path, "criu", "echo 'Version: 4.2.1'")
    assert profile.load(cache_path).tools == {"criu": "4.1"}  # nobody asks for tools
    assert profile.load(cache_path, system).tools == {"criu": "4.2.1"}


def test_a_probe_that_failed_is_asked_again_after_a_minute(tmp_path: Path):
    cache_path, words = tmp_path / "profile.json", tmp_path / "words"
    system = System(tools={"criu": program(tmp_path, "criu", f"cat {words}")})

    def found(age_s: float) -> str | None:
        """With a profile that is so old."""
        if cache_path.exists():
            then = time.time() - age_s
            os.utime(cache_path, (then, then))
        return profile.load(cache_path, system).tools.get("criu")

    assert found(0) is None
    words.write_text("Version: 4.1")
    assert found(30) is None, "each restore would pay for it"
    assert found(90) == "4.1"
    words.write_text("Version: 4.2")
    assert found(90) == "4.1", "nothing failed"


def test_what_changes_is_asked_each_time(tmp_path: Path):
    kept = profile.load(None)
    assert kept.memory_available_bytes is None
    assert (profile.now(kept, System()).memory_available_bytes or 0) > 0
