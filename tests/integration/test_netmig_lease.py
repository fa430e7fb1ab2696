"""Leases next to CNI's real plugins: bridge and host-local, as a runtime caller runs them."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from netmig.lease import AddressTaken, HostLocal, Owner, with_static_ipam
from netmig.ns import Netns
from shim.toolchain.find import find_tools

pytestmark = pytest.mark.engine

RESERVED = Owner(container_id="torpor-sleeper")


@dataclass
class Plugins:
    """A node's CNI: its namespace, its network, and the plugins."""

    node: Netns
    path: Path
    conf: dict[str, Any]

    def call(
        self, verb: str, plugin: str, container_id: str, conf: Mapping[str, Any], netns: Path | str = "/none"
    ) -> dict[str, Any]:
        """One call of a plugin, as libcni makes it. Raises RuntimeError with the plugin's own words."""
        environment = {
            **os.environ,
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": container_id,
            "CNI_IFNAME": "eth0",
            "CNI_NETNS": str(netns),
            "CNI_PATH": str(self.path),
        }
        with self.node.inside():
            done = subprocess.run(
                [self.path / plugin],
                input=json.dumps(conf),
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        answer: dict[str, Any] = json.loads(done.stdout) if done.stdout.strip() else {}
        if done.returncode != 0:
            raise RuntimeError(answer.get("msg", done.stderr))
        return answer

    def asking(self, ip: str) -> dict[str, Any]:
        """The configuration by which a caller asks for an address."""
        return {**self.conf, "runtimeConfig": {"ips": [ip]}}


@pytest.fixture
def plugins(tmp_path: Path) -> Generator[Plugins]:
    path = find_tools().cni_path
    assert path is not None, "the toolchain has no CNI plugins"
    conf = {
        "cniVersion": "1.0.0",
        "name": "pods",
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "capabilities": {"ips": True},
        "ipam": {
            "type": "host-local",
            "dataDir": str(tmp_path / "leases"),
            "ranges": [[{"subnet": "10.88.0.0/24", "rangeStart": "10.88.0.10", "rangeEnd": "10.88.0.15"}]],
        },
    }
    node = Netns.create(tmp_path / "node")
    try:
        yield Plugins(node=node, path=path, conf=conf)
    finally:
        node.remove()


@pytest.fixture
def pod(tmp_path: Path) -> Generator[Netns]:
    netns = Netns.create(tmp_path / "pod")
    try:
        yield netns
    finally:
        netns.remove()


def _given(answer: Mapping[str, Any]) -> str:
    return str(answer["ips"][0]["address"]).partition("/")[0]


def test_the_plugin_passes_a_reserved_address_by(plugins: Plugins) -> None:
    store = HostLocal.of(plugins.conf)
    for ip in ("10.88.0.10", "10.88.0.12"):
        store.reserve(ip, RESERVED)
    given = [_given(plugins.call("ADD", "host-local", f"pod-{n}", plugins.conf)) for n in range(4)]
    assert given == ["10.88.0.11", "10.88.0.13", "10.88.0.14", "10.88.0.15"]
    with pytest.raises(RuntimeError, match="no IP addresses available"):
        plugins.call("ADD", "host-local", "pod-5", plugins.conf)
    with pytest.raises(RuntimeError, match="not available"):
        plugins.call("ADD", "host-local", "pod-5", plugins.asking("10.88.0.10"))
    assert store.owner("10.88.0.11") == Owner(container_id="pod-0")
    assert store.release("10.88.0.10", RESERVED)
    assert _given(plugins.call("ADD", "host-local", "pod-5", plugins.conf)) == "10.88.0.10"


def test_the_plugins_lease_becomes_a_reservation_and_outlives_its_pod(plugins: Plugins) -> None:
    """Falling asleep: the pod's own DEL must not free the address."""
    store = HostLocal.of(plugins.conf)
    ip = _given(plugins.call("ADD", "host-local", "pod", plugins.conf))
    store.hand_over(ip, Owner(container_id="pod"), RESERVED)
    plugins.call("DEL", "host-local", "pod", plugins.conf)
    assert store.owner(ip) == RESERVED


def test_a_new_sandbox_gets_the_address_with_no_gap(plugins: Plugins, pod: Netns) -> None:
    """Reserved under the new id, one ADD with static addresses, one DEL with the network's own words."""
    store = HostLocal.of(plugins.conf)
    store.reserve("10.88.0.12", RESERVED)
    sandbox = Owner(container_id="sandbox-2")
    store.hand_over("10.88.0.12", RESERVED, sandbox)
    with pytest.raises(RuntimeError, match="not available"):
        plugins.call("ADD", "host-local", "sandbox-2", plugins.asking("10.88.0.12"))
    conf = with_static_ipam(plugins.conf, ["10.88.0.12/24"], ["10.88.0.1"])
    answer = plugins.call("ADD", "bridge", "sandbox-2", conf, pod.path)
    assert _given(answer) == "10.88.0.12"
    with pod.ipr() as ipr:
        eth0 = ipr.link_lookup(ifname="eth0")[0]
        assert [a.get("address") for a in ipr.get_addr(index=eth0, family=2)] == ["10.88.0.12"]
    assert store.owner("10.88.0.12") == sandbox
    plugins.call("DEL", "bridge", "sandbox-2", plugins.conf, pod.path)
    assert store.owner("10.88.0.12") is None
    with pod.ipr() as ipr:
        assert ipr.link_lookup(ifname="eth0") == []


def test_no_address_is_given_twice_in_a_race_with_the_plugin(plugins: Plugins) -> None:
    store = HostLocal.of(plugins.conf)
    given: list[str] = []

    def add(number: int) -> None:
        try:
            given.append(_given(plugins.call("ADD", "host-local", f"pod-{number}", plugins.conf)))
        except RuntimeError as error:
            assert "no IP addresses available" in str(error)

    adders = [threading.Thread(target=add, args=(number,)) for number in range(6)]
    for adder in adders:
        adder.start()
    for number in range(10, 16):
        ip = f"10.88.0.{number}"
        try:
            store.reserve(ip, RESERVED)
        except AddressTaken:
            continue
        given.append(ip)
    for adder in adders:
        adder.join()
    assert sorted(given) == [f"10.88.0.{number}" for number in range(10, 16)]


def test_the_leases_of_a_pod_that_died_without_a_del_are_found(plugins: Plugins) -> None:
    store = HostLocal.of(plugins.conf)
    for container_id in ("alive", "dead"):
        plugins.call("ADD", "host-local", container_id, plugins.conf)
    [stale] = store.stale({"alive"})
    assert stale.owner.container_id == "dead"
    assert store.release(stale.ip, stale.owner)
    assert _given(plugins.call("ADD", "host-local", "next", plugins.asking(stale.ip))) == stale.ip
