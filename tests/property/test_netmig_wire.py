"""What comes from the wire or from others' files never breaks us, and what we send says what we mean."""

from __future__ import annotations

import ipaddress
import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from netmig.claim import _announcements, _claim, _question, _report
from netmig.hold import _check_name, table_name
from netmig.lease import HostLocal, Owner

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
ADDRESSES = st.ip_addresses()
MACS = st.binary(min_size=6, max_size=6)


@given(st.binary(max_size=200), st.sampled_from([b"\x08\x06", b"\x86\xdd", b"\x08\x00"]))
@example(b"", b"\x86\xdd")
def test_any_frame_can_be_looked_at(data: bytes, kind: bytes) -> None:
    _claim(data)
    _claim(data[:12] + kind + data[12:])
    _claim(bytes(12) + b"\x86\xdd" + bytes(6) + b"\x3a" + data)


@given(ADDRESSES, MACS)
def test_an_announcement_claims_its_address(ip: IPAddress, mac: bytes) -> None:
    frames = _announcements(str(ip), mac)
    assert len(frames) == (2 if ip.version == 4 else 1)
    for frame in frames:
        if any(ip.packed):  # an unspecified sender asks, and has no address yet
            assert _claim(frame) == (ip, mac)
        assert frame[6:12] == mac


@given(ADDRESSES, MACS)
def test_a_question_counts_as_a_rivals(ip: IPAddress, mac: bytes) -> None:
    frame = _question(ip, mac)
    assert _claim(frame) == (ip, mac)
    if ip.version == 6:
        assert frame[:6] == b"\x33\x33\xff" + ip.packed[13:], "the group of the address"


def test_a_report_of_a_group_is_what_routers_expect() -> None:
    """RFC 3810, 5.2, byte by byte."""
    group = ipaddress.IPv6Address("ff02::1:ff00:a").packed
    assert _report(group, bytes.fromhex("020000000001")).hex(" ", 2) == (
        "3333 0000 0016 0200 0000 0001 86dd "  # to the group's MAC, from the pod's
        "6000 0000 0024 0001 "  # 36 bytes, options first, one hop
        "0000 0000 0000 0000 0000 0000 0000 0000 ff02 0000 0000 0000 0000 0000 0000 0016 "
        "3a00 0502 0000 0100 "  # ICMPv6 is next; router alert
        "8f00 6f80 0000 0001 0400 0000 "  # a report of one record: excluded are no sources
        "ff02 0000 0000 0000 0000 0001 ff00 000a"
    )


@given(ADDRESSES, MACS)
def test_the_checksum_of_ipv6_is_right(ip: IPAddress, mac: bytes) -> None:
    if ip.version == 4:
        return
    for frame in (*_announcements(str(ip), mac), _question(ip, mac), _report(ip.packed, mac)):
        body = frame[62 if frame[20] == 0 else 54 :]  # without the options
        pseudo = frame[22:54] + len(body).to_bytes(4, "big") + b"\0\0\0\x3a"
        words = pseudo + body
        total = sum(int.from_bytes(words[i : i + 2], "big") for i in range(0, len(words), 2))
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        assert total == 0xFFFF


@given(st.text(max_size=300), st.text(max_size=300))
@example("a/b", "a-b")
@example("x" * 200, "x" * 201)
def test_every_owner_has_a_table_of_its_own(owner: str, other: str) -> None:
    _check_name(table_name(owner))
    assert (table_name(owner) == table_name(other)) == (owner == other)


@settings(max_examples=30)
@given(st.binary(max_size=100))
def test_any_lease_file_can_be_read(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = HostLocal("pods", Path(directory))
        store.path.mkdir()
        (store.path / "10.0.0.1").write_bytes(content)
        [lease] = store.leases()
        assert store.owner("10.0.0.1") == lease.owner
        assert store.release("10.0.0.1", lease.owner)


@settings(max_examples=30)
@given(st.text(st.characters(codec="ascii", exclude_categories=["C", "Z"]), min_size=1), ADDRESSES)
def test_a_lease_is_read_as_it_was_written(container_id: str, ip: IPAddress) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = HostLocal("pods", Path(directory))
        owner = Owner(container_id=container_id, ifname="eth0")
        store.reserve(str(ip), owner)
        assert store.owner(str(ip)) == owner
