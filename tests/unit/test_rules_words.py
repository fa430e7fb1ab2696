"""Words and limits of a new specification that the runtime does not take, and neighbours that it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compat.rules import limits, words
from tests.support.verdicts import At, image, named, new, node

_KINDS = [{"type": kind} for kind in ("network", "pid", "mount", "ipc", "uts")]


def _said(spec: dict[str, Any], rule: str = "spec.words") -> str:
    found = At(image(memory_bytes=0), node(cgroup_mode="hybrid"), spec=spec, local=True).found()
    assert named(found, rule) in ([], ["refuse"])
    return "".join(one.message for one in found if one.rule == rule)


@pytest.mark.parametrize(
    ("process", "said"),
    [
        ({"cwd": "here"}, "working directory 'here'"),
        ({"args": []}, "no arguments"),
        ({"ioPriority": {"class": "IOPRIO_CLASS_BE", "priority": 8}}, "I/O priority 8"),
        ({"ioPriority": {"class": "BE", "priority": 1}}, "class 'BE'"),
        ({"ioPriority": {"class": "IOPRIO_CLASS_IDLE"}}, ""),
        ({"execCPUAffinity": {"initial": "0-1024"}}, "initial processors '0-1024'"),
        ({"execCPUAffinity": {"initial": "0-1, 1023,", "final": "3-2"}}, "final processors '3-2'"),
    ],
)
def test_words_of_the_process(process: dict[str, Any], said: str):
    found = _said(new(process=process))
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("linux", "said"),
    [
        ({"namespaces": [*_KINDS, {"type": "pid"}]}, "two namespaces of the kind 'pid'"),
        ({"namespaces": [*_KINDS, {"type": "bogus"}]}, "kind 'bogus'"),
        ({"timeOffsets": {"boottime": {"secs": 1}}}, "time offsets"),
        ({"personality": {"domain": "FOO"}}, "personality 'FOO'"),
        ({"personality": {"domain": "LINUX32"}}, ""),
        ({"rootfsPropagation": "sideways"}, "propagation 'sideways'"),
        ({"rootfsPropagation": "rslave"}, ""),
        ({"devices": [{"path": "/dev/x", "type": "q"}]}, "device of the kind 'q'"),
        ({"devices": [{"path": "/dev/x", "type": "p"}]}, ""),
        ({"resources": {"devices": [{"allow": True, "type": "z"}]}}, "devices of the kind 'z'"),
        ({"resources": {"devices": [{"allow": False}]}}, ""),
        ({"intelRdt": {"l3CacheSchema": "L3:0=f"}}, "l3CacheSchema"),
        ({"intelRdt": {"closID": "x"}}, ""),
        ({"sysctl": {"vm.swappiness": "5"}}, "vm.swappiness"),
        ({"sysctl": {"user.max_user_namespaces": "5"}}, ""),
        ({"sysctl": {"kernel.hostname": "x"}}, "kernel.hostname"),
        ({"sysctl": {"kernel/domainname": "x"}}, ""),
        ({"sysctl": {"kernel.msgmax": "1", "fs.mqueue.msg_max": "9"}}, ""),
        ({"sysctl": {"net.nonesuch": "5"}}, "net.nonesuch that is not there"),
        ({"sysctl": {"net.ipv4.number": "banana"}}, "with 'banana'"),
        ({"sysctl": {"net.ipv4.number": "0x1F"}}, ""),
        ({"sysctl": {"net.ipv4.word": "banana"}}, ""),
        ({"sysctl": {"net/ipv4/conf/eth0.5/forwarding": "1", "net.ipv4.conf.x.forwarding": "1"}}, ""),
    ],
)
def test_words_of_linux(linux: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "net/ipv4").mkdir(parents=True)
    (tmp_path / "net/ipv4/number").write_text("0\t10\n")
    (tmp_path / "net/ipv4/word").write_text("cubic\n")
    monkeypatch.setattr(words, "_SYSCTLS", tmp_path)
    monkeypatch.setattr(words, "_MOUNTS", tmp_path / "mounts")
    (tmp_path / "mounts").write_text("1 1 0:1 / /proc rw - proc proc rw\n")
    found = _said(new(linux={"namespaces": _KINDS, **linux}))
    assert said in found
    assert bool(found) == bool(said)


def test_sysctls_of_namespaces_of_the_host():
    def found(*without: str, **sysctl: str) -> str:
        kinds = [entry for entry in _KINDS if entry["type"] not in without]
        return _said(
            new(linux={"namespaces": kinds, "sysctl": {k.replace("_", "."): sysctl[k] for k in sysctl}})
        )

    assert "host's network" in found("network", net_core_somaxconn="1")
    assert "host's IPC" in found("ipc", kernel_msgmax="1")
    assert "kernel.domainname" in found("uts", kernel_domainname="x")
    assert found(kernel_domainname="x") == ""


def test_shares_of_the_processors_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "info/L3").mkdir(parents=True)
    (tmp_path / "mounts").write_text(f"1 1 0:1 / {tmp_path} rw - resctrl resctrl rw\n")
    monkeypatch.setattr(words, "_MOUNTS", tmp_path / "mounts")
    assert _said(new(linux={"intelRdt": {"l3CacheSchema": "L3:0=f"}})) == ""
    assert "memBwSchema" in _said(new(linux={"intelRdt": {"memBwSchema": "MB:0=20"}}))
    monkeypatch.setattr(words, "_MOUNTS", tmp_path / "none")
    assert _said(new(linux={"intelRdt": {"memBwSchema": "MB:0=20"}})) == ""


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"cpu": {"burst": 20000, "quota": 10000, "period": 10000}}, "a burst of 20000"),
        ({"cpu": {"burst": 10000, "quota": 10000, "period": 10000}}, ""),
        ({"cpu": {"burst": 10000, "quota": -1}}, ""),
        ({"cpu": {"shares": 1}}, "1 processor share"),
        ({"cpu": {"shares": 2}}, ""),
        ({"cpu": {"realtimeRuntime": 1000}}, "1000 µs of real time"),
        ({"memory": {"swappiness": 101}}, "swappiness of 101"),
        ({"memory": {"swappiness": 100}}, ""),
        ({"memory": {"swappiness": (1 << 64) - 1}}, ""),
        ({"blockIO": {"leafWeight": 500}}, "leaf weight"),
        ({"network": {"classID": 1}}, "class of network packets"),
        ({"rdma": {"mlx5_1": {"hcaHandles": 3}}}, "RDMA"),
    ],
)
def test_limits_of_cgroup_v1(
    resources: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "groups").write_text("1:cpu:/\n")
    monkeypatch.setattr(limits, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(limits, "_UNIFIED", tmp_path / "none")
    monkeypatch.setattr(limits, "_V1", tmp_path)
    spec = new(linux={"resources": resources, "cgroupsPath": "/above/it"})
    found = _said(spec, "spec.limits")
    assert said in found
    assert bool(found) == bool(said)
    later = At(image(memory_bytes=0), node(cgroup_mode="v2"), spec=spec, local=True).found()
    assert bool(named(later, "spec.limits")) == ("burst" in said)


def test_limits_that_cgroup_v1_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "groups").write_text("1:net_cls,rdma:/\n")
    (tmp_path / "cpu/above").mkdir(parents=True)
    (tmp_path / "cpu/above/cpu.rt_runtime_us").write_text("500000\n")
    (tmp_path / "cpu/above/cpu.rt_period_us").write_text("1000000\n")
    (tmp_path / "blkio").mkdir()
    (tmp_path / "blkio/blkio.leaf_weight").touch()
    monkeypatch.setattr(limits, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(limits, "_V1", tmp_path)
    resources: dict[str, Any] = {
        "cpu": {"realtimeRuntime": 500000},
        "blockIO": {"leafWeight": 500},
        "network": {"classID": 1},
        "rdma": {"mlx5_1": {}},
    }
    spec = new(linux={"resources": resources, "cgroupsPath": "/above/it"})
    assert _said(spec, "spec.limits") == ""
    resources["cpu"]["realtimeRuntime"] = 500001
    assert "real time" in _said(spec, "spec.limits")
