"""`torpor net`, as a person or a script uses it, on real namespaces."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from netmig import hold
from netmig.census import in_use
from netmig.lease import HostLocal, Owner
from netmig.ns import Netns
from netmig.recover import hold_directory
from shim.cli.main import main
from tests.support.segment import Member, Segment, segment

pytestmark = pytest.mark.engine

OLD = Owner(container_id="f" * 64)


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Generator[Segment]:
    with segment(tmp_path_factory.mktemp("cli")) as made:
        yield made


@pytest.fixture(scope="module")
def pod(wire: Segment) -> Member:
    return wire.add("pod", 10)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    conf = tmp_path / "runtime.conf"
    conf.write_text(f"STATE={tmp_path / 'state'}\nSTORE={tmp_path / 'store'}\n")
    conf.chmod(0o600)
    monkeypatch.setenv("TORPOR_CONF", str(conf))
    return tmp_path / "state" / "net"


def _torpor(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["net", *map(str, args)])


def _json(*args: str | Path) -> Any:
    return json.loads(_torpor(*args, "--json").stdout)


def _refused(*args: str | Path) -> str:
    result = _torpor(*args)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: could not ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_show(pod: Member) -> None:
    text = _torpor("show", "--netns", pod.netns.path)
    assert text.exit_code == 0
    for word in ("eth0", "10.77.0.10/24", "fd77::a/64", pod.mac):
        assert word in text.stdout
    assert "held" not in text.stdout
    hold.lock(pod.netns, hold.table_name("x"))
    try:
        assert "held by table torpor-hold-x" in _torpor("show", "--netns", pod.netns.path).stdout
        document = _json("show", "--netns", pod.netns.path)
    finally:
        hold.unlock(pod.netns, hold.table_name("x"))
    assert document["held_by"] == ["torpor-hold-x"]
    assert {link["name"] for link in document["identity"]["links"]} == {"lo", "eth0"}


def test_questions_without_a_pod_are_refused(pod: Member) -> None:
    assert "it is none; name one that exists" in _refused("show", "--netns", "/etc/passwd")
    assert "it is none; name one that exists" in _refused("show", "--netns", "/tmp")
    assert "it is none; name one that exists" in _refused("show", "--netns", "/proc/self/ns/uts")
    assert "name one that exists" in _refused("show", "--netns", "/nowhere")
    assert "nocontainer" in _refused("show", "--container", "nocontainer")
    assert "give one of --image" in _refused("pin", "calico")
    assert "is not INTERFACE=NAME" in _refused(
        "pin", "multus", "--netns", pod.netns.path, "--attachment", "net1"
    )
    assert "no interface besides eth0" in _refused("pin", "multus", "--netns", pod.netns.path)
    assert _torpor("pin", "weave", "--netns", pod.netns.path).exit_code == 2


def test_pin(pod: Member) -> None:
    kept = _torpor("pin", "calico", "--netns", pod.netns.path)
    assert kept.exit_code == 0
    assert """cni.projectcalico.org/ipAddrs: '["10.77.0.10", "fd77::a"]'""" in kept.stdout
    cannot = _torpor("pin", "flannel", "--netns", pod.netns.path)
    assert cannot.exit_code == 1
    assert cannot.stdout.startswith("# flannel cannot keep the address.")
    assert _json("pin", "cilium", "--netns", pod.netns.path)["can_keep"] is False


def test_leases_are_told_apart_and_only_stale_ones_are_freed(tmp_path: Path, pod: Member) -> None:
    store = HostLocal("pods", tmp_path)
    store.reserve("10.99.77.1", OLD)
    store.reserve("10.99.77.2", Owner(container_id="torpor-sleeper"))
    store.reserve("10.99.77.3", Owner(container_id="coming"))
    store.reserve("127.0.0.1", Owner(container_id="without-a-process"))
    hour_ago = time.time() - 3600
    for ip in ("10.99.77.1", "10.99.77.2", "127.0.0.1"):
        os.utime(tmp_path / "pods" / ip, (hour_ago, hour_ago))
    rows = {row["address"]: row["state"] for row in _json("leases", "--data-dir", tmp_path)}
    assert rows == {
        "10.99.77.1": "stale",
        "10.99.77.2": "reserved",
        "10.99.77.3": "young",
        "127.0.0.1": "in use",
    }
    text = _torpor("leases", "pods", "--data-dir", tmp_path).stdout
    assert "fffffffffffff " in text
    assert "f" * 20 not in text
    assert _json("leases", "--free", "--data-dir", tmp_path)[0]["state"] == "freed"
    assert {lease.ip for lease in store.leases()} == set(rows) - {"10.99.77.1"}
    log = (tmp_path / "store" / "audit.log").read_text()
    assert "lease freed" in log
    assert "10.99.77.1" in log


def test_the_census_looks_into_every_namespace_once(pod: Member, tmp_path: Path) -> None:
    """A pin below /run/netns, and a process of a namespace that has nothing but its loopback device."""
    pinned = Path("/run/netns") / f"hold-census-{os.getpid()}"
    with Netns.create(pinned) as netns:
        try:
            with netns.ipr() as ipr:
                ipr.addr("add", index=1, address="10.99.78.1", prefixlen=32)
                ipr.addr("add", index=1, address="fd99::1", prefixlen=128)
            found = in_use(["10.99.78.1", "FD99:0::1", "10.99.78.2"])
        finally:
            Netns(pinned, -1).remove()
    assert found == {"10.99.78.1": pinned, "fd99::1": pinned}
    assert in_use([]) == {}
    # A pin that was cut off half way is a plain file.
    plain = pinned.with_name(f"{pinned.name}-plain")
    plain.touch()
    try:
        assert in_use(["10.99.78.1"]) == {}
    finally:
        plain.unlink()


def test_a_node_without_leases(tmp_path: Path) -> None:
    assert _json("leases", "--data-dir", tmp_path) == []
    assert "no leases of host-local" in _torpor("leases", "--data-dir", tmp_path).stdout
    assert "CNI allows letters" in _refused("leases", "../etc", "--data-dir", tmp_path)


def test_recover(pod: Member, state: Path) -> None:
    assert _torpor("recover").stdout == "nothing is left of any call\n"
    assert _json("recover") == []

    def leave() -> None:
        hold.lock(pod.netns, hold.table_name("web"), records=hold_directory(state), owner="web")
        os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=leave)
    child.start()
    child.join()
    look = _torpor("recover", "--dry-run")
    assert (look.exit_code, "would be released" in look.stdout) == (0, True)
    assert hold.tables(pod.netns) == ("torpor-hold-web",)
    [found] = _json("recover")
    assert (found["kind"], found["owner"], found["outcome"]) == ("hold", "web", "released")
    assert hold.tables(pod.netns) == ()
    (hold_directory(state) / "x.json").write_text("?")
    failed = _torpor("recover")
    assert failed.exit_code == 1
    assert "failed" in failed.stdout
