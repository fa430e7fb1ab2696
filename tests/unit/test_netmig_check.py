"""What the kernel of a test machine has not, and other nodes have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from netmig import apply, check
from netmig.capture import filters_by_vlan
from netmig.errors import NetworkError
from netmig.identity import HostEnd, Identity, Link
from netmig.ns import Netns
from netmig.rtnl import Message

LINK = Link(name="eth0", index=2, kind="veth", mac="02:00:00:00:00:01", mtu=1500, queue_length=0, flags=1)


def bridge(**data: int) -> Message:
    options = {"attrs": [[name, value] for name, value in data.items()]}
    info = {"attrs": [["IFLA_INFO_KIND", "bridge"], ["IFLA_INFO_DATA", options]]}
    header = {"ifi_type": 1, "index": 3, "flags": 1}
    return Message(header=header, attributes={"IFLA_IFNAME": "cni0", "IFLA_MTU": 1500, "IFLA_LINKINFO": info})


def test_a_bridge_that_filters_by_vlan_is_refused() -> None:
    plain, filtering = bridge(IFLA_BR_VLAN_FILTERING=0), bridge(IFLA_BR_VLAN_FILTERING=1)
    assert not filters_by_vlan(plain)
    assert filters_by_vlan(filtering)
    assert check._bridge("cni0", LINK, {"cni0": plain}) == []
    (problem,) = check._bridge("cni0", LINK, {"cni0": filtering})
    assert problem.code == "bridge"
    assert problem.sentence.startswith("bridge 'cni0' filters by VLAN")


def test_a_bridge_that_keeps_new_ports_waiting_is_refused() -> None:
    off = bridge(IFLA_BR_STP_STATE=0, IFLA_BR_FORWARD_DELAY=1500)
    at_once = bridge(IFLA_BR_STP_STATE=2, IFLA_BR_FORWARD_DELAY=0)
    for fine in (off, at_once):
        assert check._bridge("cni0", LINK, {"cni0": fine}) == []
    slow = bridge(IFLA_BR_STP_STATE=1, IFLA_BR_FORWARD_DELAY=1500)
    (problem,) = check._bridge("cni0", LINK, {"cni0": slow})
    assert problem.code == "bridge"
    assert problem.sentence.startswith("bridge 'cni0' runs STP, and forwards nothing of a new port for 30 s")


def test_a_pod_on_one_that_filters_is_not_unplugged(monkeypatch: pytest.MonkeyPatch) -> None:
    end = HostEnd(
        name="veth1", mac="02:00:00:00:00:02", mtu=1500, queue_length=0, bridge="cni0", by_vlan=True
    )
    pod = Identity(links=(replace(LINK, host=end),))
    monkeypatch.setattr(apply, "capture", lambda netns, host: pod)
    netns = Netns(Path("/run/netns/x"), -1)
    with pytest.raises(NetworkError, match="bridge 'cni0' filters by VLAN"):
        apply.attach(netns, netns)
