"""The addresses of sleeping images: reserved, handed to the pod that wakes up, or given back."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from netmig.identity import Address
from netmig.lease import AddressTaken, HostLocal, Owner
from shim import leases
from shim.errors import ShimError

DIGEST = "sha256:" + "ab" * 32
OURS = leases.owner_id(DIGEST)
POD = "5" * 64
ADDRESSES = (
    Address(ip="10.88.0.10", prefix=24, ifname="eth0", mac="02:00:00:00:00:01"),
    Address(ip="fd88::10", prefix=64, ifname="eth0", mac="02:00:00:00:00:01"),
    Address(ip="192.168.9.9", prefix=24, ifname="net1", mac="02:00:00:00:00:02"),
)


@pytest.fixture
def pods(tmp_path: Path) -> HostLocal:
    """A network with a pod that has two addresses of it."""
    store = HostLocal("pods", tmp_path / "cni")
    for address in ADDRESSES[:2]:
        store.reserve(address.ip, Owner(container_id=POD))
    return store


@pytest.fixture
def plugins(pods: HostLocal) -> leases.Plugins:
    return {"eth0": (pods, Owner(container_id=POD))}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return tmp_path / "store"


def _owners(store: HostLocal) -> dict[str, str]:
    return {lease.ip: lease.owner.container_id for lease in store.leases()}


def test_the_pods_own_end_does_not_free_them(pods: HostLocal, plugins: leases.Plugins, images: Path) -> None:
    leases.keep(images, DIGEST, "web", ADDRESSES, plugins)
    assert _owners(pods) == {"10.88.0.10": OURS, "fd88::10": OURS}
    assert not pods.release("10.88.0.10", Owner(container_id=POD)), "what the plugin's DEL would do"
    assert pods.stale(set()) == ()
    assert leases.read(images)[DIGEST].image == "web"
    leases.keep(images, DIGEST, "web", ADDRESSES, plugins)
    assert leases.release(images, DIGEST) == ("10.88.0.10", "fd88::10")
    assert _owners(pods) == {}
    assert leases.read(images) == {}
    assert leases.release(images, DIGEST) == ()


def test_a_pod_that_went_first_is_no_hindrance(
    pods: HostLocal, plugins: leases.Plugins, images: Path
) -> None:
    for address in ADDRESSES[:2]:
        pods.release(address.ip, Owner(container_id=POD))
    leases.keep(images, DIGEST, "web", ADDRESSES, plugins)
    assert set(_owners(pods).values()) == {OURS}


def test_what_another_has_got_is_told_and_the_rest_is_given_back(
    pods: HostLocal, plugins: leases.Plugins, images: Path
) -> None:
    pods.hand_over("fd88::10", Owner(container_id=POD), Owner(container_id="other"))
    with pytest.raises(AddressTaken, match="container 'other'"):
        leases.keep(images, DIGEST, "web", ADDRESSES, plugins)
    assert leases.release(images, DIGEST) == ("10.88.0.10",)
    assert _owners(pods) == {"fd88::10": "other"}


def test_what_woke_up_keeps_its_address(pods: HostLocal, plugins: leases.Plugins, images: Path) -> None:
    leases.keep(images, DIGEST, "web", ADDRESSES, plugins)
    pods.hand_over("10.88.0.10", Owner(container_id=OURS), Owner(container_id="new"))
    assert leases.release(images, DIGEST) == ("fd88::10",)
    assert _owners(pods) == {"10.88.0.10": "new"}


def test_only_images_that_will_not_wake_up_lose_theirs(
    pods: HostLocal, plugins: leases.Plugins, images: Path
) -> None:
    leases.keep(images, DIGEST, "web", ADDRESSES, plugins)
    assert leases.prune(images, lambda digest: digest == DIGEST) == {}
    assert set(_owners(pods).values()) == {OURS}
    assert leases.prune(images, lambda _: False) == {"web": ("10.88.0.10", "fd88::10")}
    assert leases.prune(images, lambda _: False) == {}


def test_nothing_is_written_where_no_host_local_gives_addresses(images: Path) -> None:
    leases.keep(images, DIGEST, "web", ADDRESSES, {})
    assert not images.exists()
    assert leases.prune(images, lambda _: False) == {}


def test_a_kill_between_record_and_hand_over_leaves_what_can_be_released(
    pods: HostLocal, plugins: leases.Plugins, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HostLocal, "hand_over", die)
    with pytest.raises(KeyboardInterrupt):
        leases.keep(images, DIGEST, "web", ADDRESSES, plugins)
    assert set(leases.read(images)) == {DIGEST}
    assert leases.release(images, DIGEST) == ()
    assert set(_owners(pods).values()) == {POD}


def test_a_record_that_cannot_be_read_is_one_sentence(images: Path) -> None:
    (images / "leases").mkdir(parents=True)
    (images / "leases" / "aa.json").write_text('{"schema": 2}')
    with pytest.raises(ShimError, match=r"could not read lease record .*; free its addresses by"):
        leases.prune(images, lambda _: False)


def _note(netns: str, conf: dict[str, Any], ifname: str = "eth0") -> str:
    config = base64.b64encode(json.dumps(conf).encode()).decode()
    return json.dumps(
        {
            "kind": "cniCacheV1",
            "containerId": POD,
            "config": config,
            "ifName": ifname,
            "networkName": conf["name"],
            "netns": netns,
        }
    )


def test_the_networks_of_a_pod_are_found_in_libcnis_notes(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    pod, other, link = tmp_path / "pod", tmp_path / "other", tmp_path / "link"
    pod.touch()
    link.symlink_to(pod)
    local = {"type": "host-local", "dataDir": str(tmp_path / "cni")}
    (results / "a").write_text(_note(str(link), {"name": "pods", "plugins": [{"ipam": local}]}))
    (results / "b").write_text(_note(str(pod), {"name": "more", "ipam": local}, "net1"))
    (results / "c").write_text(_note(str(pod), {"name": "dhcp", "ipam": {"type": "dhcp"}}, "net2"))
    (results / "d").write_text(_note(str(other), {"name": "pods", "ipam": local}, "net3"))
    (results / "e").write_text("not JSON")
    (results / "f").write_text('["a list"]')
    found = leases.plugins_of(pod, results)
    assert {ifname: store.path for ifname, (store, _) in found.items()} == {
        "eth0": tmp_path / "cni" / "pods",
        "net1": tmp_path / "cni" / "more",
    }
    assert found["net1"][1] == Owner(container_id=POD, ifname="net1")
    assert leases.plugins_of(pod, tmp_path / "none") == {}
