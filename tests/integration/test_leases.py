"""The address of a pod that sleeps is nobody else's, with containerd and the real plugins."""

from __future__ import annotations

import ipaddress

import pytest

from netmig.lease import HostLocal
from tests.support.containerd import Containerd
from tests.support.cri import Cri
from tests.support.torpor import Torpor

pytestmark = pytest.mark.engine

LIVE = ("/usr/bin/python3", "-IS", "-u", "/workloads/live.py")


def _next(store: HostLocal, address: str) -> None:
    """Let the plugin give this address next, if it may: it goes on from the one that it gave last."""
    (store.path / "last_reserved_ip.0").write_text(str(ipaddress.ip_address(address) - 1))


def _owner(store: HostLocal, address: str) -> str:
    owner = store.owner(address)
    return owner.container_id if owner else ""


def _asleep(torpor: Torpor, daemon: Containerd, container_id: str, *options: str) -> None:
    torpor(
        *("checkpoint", container_id, "--root", daemon.runc_root / "k8s.io", "--name", "net", "--stop"),
        *options,
    )


def test_an_address_is_reserved_until_it_is_released(
    cri: Cri, daemon: Containerd, torpor: Torpor, tag: str
) -> None:
    store = HostLocal(tag, daemon.path / "ipam")
    old = cri.pod("old")
    source = old.run("main", LIVE, image=daemon.image("python"))
    source.until_number(3)
    address = old.ip
    _asleep(torpor, daemon, source.id)
    assert _owner(store, address) == old.id, "nobody asked for a reservation"
    said = torpor("net", "reserve", "net", "--namespace", "default").stdout
    assert said == f"reserved {address}\n"
    old.remove()
    assert _owner(store, address).startswith("torpor-")
    _next(store, address)
    other = cri.pod("other")
    assert other.ip != address
    assert torpor("net", "release", "net", "--namespace", "default").stdout == f"released {address}\n"
    assert torpor("net", "release", "net", "--namespace", "default").stdout == "nothing is reserved for it\n"
    assert _owner(store, address) == ""
