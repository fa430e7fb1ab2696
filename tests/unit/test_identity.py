"""The network identity beside an image: read in a thread, absent from older images, checked when read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engines.api import ImageCorrupt
from netmig.identity import Identity, Link, LinkAddress, encode, global_addresses
from shim import identity
from tests.support.containers import SEARCH_PATH, lab

WEB = Identity(
    links=(
        Link(name="eth0", index=2, kind="veth", mac="02:00:00:00:00:01", mtu=1500, queue_length=0, flags=1),
    ),
    addresses=(LinkAddress(interface="eth0", ip="10.77.1.2", prefix=24, scope=0),),
)


def test_an_image_without_an_identity_is_readable(tmp_path: Path) -> None:
    assert identity.read(tmp_path) is None


def test_what_was_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "network.json").write_bytes(encode(WEB))
    assert identity.read(tmp_path) == WEB


@pytest.mark.parametrize("data", [b"", b"[]", b'{"schema": 99}', encode(WEB).replace(b"eth0", b"../0")])
def test_a_damaged_identity_is_told(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "network.json").write_bytes(data)
    with pytest.raises(ImageCorrupt, match="could not read the network identity"):
        identity.read(tmp_path)


def test_a_namespace_that_is_gone_costs_the_identity_not_the_image(tmp_path: Path) -> None:
    capture = identity.Capture(tmp_path / "gone", SEARCH_PATH)
    assert capture.document() is None
    (warning,) = capture.warnings
    assert warning.startswith("the image has no network identity: could not open network namespace")


@pytest.mark.engine
def test_the_identity_of_a_namespace_with_an_address(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    with lab(tmp_path) as place:
        network = place.network()
        capture = identity.Capture(network.pod_path, SEARCH_PATH)
        document = capture.document()
        assert capture.warnings == ()
        assert document is not None
        (tmp_path / "network.json").write_bytes(document)
        found = identity.read(tmp_path)
        assert found is not None
        assert [(one.ip, one.ifname) for one in global_addresses(found)] == [(network.pod_address, "eth0")]
        assert not identity.is_ours(network.pod_path)
    assert identity.is_ours(Path("/proc/self/ns/net"))
