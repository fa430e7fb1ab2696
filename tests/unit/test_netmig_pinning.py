"""What each CNI plugin is told, compared with files that a person has read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from netmig.errors import NetworkError
from netmig.identity import Identity, Link, LinkAddress
from netmig.pinning import CNIS, as_yaml, render

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "pinning"
ATTACHMENTS = {"net1": "storage/fast"}


def _link(name: str, mac: str) -> Link:
    return Link(name=name, index=2, kind="veth", mac=mac, mtu=1500, queue_length=1000, flags=1)


def _address(interface: str, ip: str, prefix: int, scope: int = 0) -> LinkAddress:
    return LinkAddress(interface=interface, ip=ip, prefix=prefix, scope=scope)


IDENTITY = Identity(
    links=(
        Link(name="lo", index=1, kind="loopback", mac=None, mtu=65536, queue_length=1000, flags=1),
        _link("eth0", "0a:58:0a:58:00:0a"),
        _link("net1", "0a:58:c0:a8:05:07"),
    ),
    addresses=(
        _address("lo", "127.0.0.1", 8),
        _address("eth0", "10.88.0.10", 24),
        _address("eth0", "fd88::10", 64),
        _address("eth0", "fe80::858:aff:fe58:a", 64, 253),
        _address("net1", "192.168.5.7", 24),
    ),
)
"""Two interfaces, two families on the first."""


@pytest.mark.parametrize("cni", sorted(CNIS))
def test_rendered_as_it_was_read(cni: str) -> None:
    rendered = as_yaml(render(cni, IDENTITY, attachments=ATTACHMENTS))
    assert rendered == (GOLDEN / f"{cni}.yaml").read_text()


def test_every_golden_file_has_its_plugin() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CNIS)


def test_those_that_cannot_say_so_and_what_to_do() -> None:
    cannot = {cni for cni in CNIS if not render(cni, IDENTITY, attachments=ATTACHMENTS).can_keep}
    assert cannot == {"cilium", "flannel", "kindnet", "whereabouts"}


def test_the_documentation_has_every_sentence() -> None:
    text = " ".join((Path(__file__).resolve().parents[2] / "docs" / "network.md").read_text().split())
    for cni in CNIS:
        assert render(cni, IDENTITY, attachments=ATTACHMENTS).sentence in text, cni


@pytest.mark.parametrize(
    ("cni", "key", "expected"),
    [
        ("calico", "cni.projectcalico.org/ipAddrs", ["10.88.0.10", "fd88::10"]),
        (
            "ovn-kubernetes",
            "v1.multus-cni.io/default-network",
            [
                {
                    "name": "default",
                    "namespace": "ovn-kubernetes",
                    "ips": ["10.88.0.10/24", "fd88::10/64"],
                    "mac": "0a:58:0a:58:00:0a",
                }
            ],
        ),
        (
            "multus",
            "k8s.v1.cni.cncf.io/networks",
            [
                {
                    "name": "fast",
                    "namespace": "storage",
                    "interface": "net1",
                    "ips": ["192.168.5.7/24"],
                    "mac": "0a:58:c0:a8:05:07",
                }
            ],
        ),
    ],
)
def test_annotations_that_are_json_are_json(cni: str, key: str, expected: object) -> None:
    assert json.loads(render(cni, IDENTITY, attachments=ATTACHMENTS).annotations[key]) == expected


def test_what_has_no_room_is_refused() -> None:
    two = Identity(links=IDENTITY.links, addresses=(*IDENTITY.addresses, _address("eth0", "10.88.0.11", 24)))
    for cni in ("calico", "kube-ovn", "ovn-kubernetes"):
        with pytest.raises(NetworkError, match=r"takes one of each family; add the others by hand"):
            render(cni, two)
    assert "10.88.0.11/24" in json.dumps(render("host-local", two).ipam)


def test_questions_that_have_no_answer() -> None:
    with pytest.raises(NetworkError, match="it is not known; use calico, cilium"):
        render("weave", IDENTITY)
    with pytest.raises(NetworkError, match="the identity has none"):
        render("calico", Identity())
    with pytest.raises(NetworkError, match="--attachment net1=NAME"):
        render("multus", IDENTITY)
    only_first = Identity(links=IDENTITY.links[:2], addresses=IDENTITY.addresses[:4])
    with pytest.raises(NetworkError, match="no interface besides eth0"):
        render("multus", only_first)
    only_second = Identity(links=IDENTITY.links[2:], addresses=IDENTITY.addresses[4:])
    with pytest.raises(NetworkError, match="eth0 has none"):
        render("calico", only_second)


def test_quotes_stay_quotes() -> None:
    pinning = render("multus", IDENTITY, attachments={"net1": "it's"})
    assert "it''s" in as_yaml(pinning)
