"""A held namespace answers nobody, and goes on as if nothing had been when it is let go."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

from netmig import claim, hold, nft
from netmig.errors import NetworkError, NftError
from shim.toolchain.find import find_tools
from tests.support.segment import (
    Member,
    Segment,
    Sniffer,
    barrier,
    in_netns,
    is_neighbour_talk,
    segment,
    until,
)

pytestmark = pytest.mark.engine

TABLE = hold.table_name("test")
CRIU_TABLE = "CRIU-0123456789abcdef01234"


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Generator[Segment]:
    with segment(tmp_path_factory.mktemp("hold")) as made:
        yield made


@pytest.fixture(scope="module")
def pod(wire: Segment) -> Member:
    return wire.add("pod", 10)


@pytest.fixture(scope="module")
def client(wire: Segment) -> Member:
    return wire.add("client", 20)


@pytest.fixture(params=["library", "program"])
def nft_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to change nftables do the same."""
    if request.param == "library":
        if nft._library() is None:
            pytest.skip("this machine has no libnftables that this Python can load")
    else:
        program = find_tools().nft
        if program is None:
            pytest.skip("this machine has no nft")
        monkeypatch.setattr(nft, "_library", lambda: None)
        monkeypatch.setattr(nft, "_program", program)
    return str(request.param)


def _poke(client: Member, pod: Member, n: int) -> None:
    """What a kernel answers at once: connections to a port that nobody has, datagrams likewise, pings."""
    for ip in pod.addresses:
        ipv6 = ":" in ip
        with in_netns(client.netns, socket.SOCK_STREAM, ipv6=ipv6) as stream:
            stream.setblocking(False)
            with suppress(BlockingIOError):
                stream.connect((ip, 9))
        with in_netns(client.netns, socket.SOCK_DGRAM, ipv6=ipv6) as datagram:
            datagram.sendto(b"x", (ip, 9))
        protocol = socket.IPPROTO_ICMPV6 if ipv6 else socket.IPPROTO_ICMP
        with client.netns.inside():
            raw = socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, socket.SOCK_RAW, protocol)
        with raw:
            # The checksum of ICMPv6 is the kernel's work; that of ICMP is right for this very number.
            raw.sendto(bytes([128, 0, 0, 0, 0, 0, 0, n]) if ipv6 else _echo(n), (ip, 0))


def _echo(n: int) -> bytes:
    total = ~(0x0800 + n) & 0xFFFF
    return bytes([8, 0, total >> 8, total & 0xFF, 0, 0, 0, n])


@pytest.mark.parametrize("table", [TABLE, CRIU_TABLE])
def test_a_held_namespace_answers_nobody(wire: Segment, pod: Member, client: Member, table: str) -> None:

    def answers(n: int) -> None:
        """Without a hold: RST, port unreachable and echo, of IPv4 and of IPv6."""
        found: list[bytes] = []
        _poke(client, pod, n)
        until(lambda: found.extend(sniffer.frames()) or sum(not is_neighbour_talk(one) for one in found) >= 6)

    with Sniffer(client, pod.mac) as sniffer:
        answers(1)
        barrier(client, pod)

        hold.lock(pod.netns, table)
        sniffer.frames()  # what it said by itself until then
        try:
            for n in range(5):
                _poke(client, pod, n)
            barrier(client, pod)
            frames = sniffer.frames()
        finally:
            hold.unlock(pod.netns, table)
        assert frames, "ARP still answers, as the barrier shows"
        said = [frame.hex() for frame in frames if not is_neighbour_talk(frame)]
        assert said == []

        answers(7)


def test_a_held_namespace_says_nothing_of_itself(pod: Member, client: Member) -> None:
    hold.lock(pod.netns, TABLE)
    try:
        with Sniffer(client, pod.mac) as sniffer:
            for ipv6, ip in enumerate(client.addresses):
                with in_netns(pod.netns, socket.SOCK_DGRAM, ipv6=bool(ipv6)) as datagram, suppress(OSError):
                    datagram.sendto(b"x", (ip, 9))
            barrier(client, pod)
            assert all(is_neighbour_talk(frame) for frame in sniffer.frames())
    finally:
        hold.unlock(pod.netns, TABLE)


@pytest.mark.parametrize("ipv6", [False, True], ids=["ipv4", "ipv6"])
def test_a_connection_waits_and_goes_on(pod: Member, client: Member, ipv6: bool) -> None:
    ip = pod.addresses[ipv6]
    with (
        in_netns(pod.netns, socket.SOCK_STREAM, ipv6=ipv6) as listener,
        in_netns(client.netns, socket.SOCK_STREAM, ipv6=ipv6) as near,
    ):
        listener.bind((ip, 0))
        listener.listen()
        near.connect((ip, listener.getsockname()[1]))
        far, _ = listener.accept()
        with far:
            far.setblocking(False)
            near.setblocking(False)
            hold.lock(pod.netns, TABLE)
            try:
                near.sendall(b"from outside")
                with suppress(OSError):
                    far.send(b"from inside")
                barrier(client, pod)
                with pytest.raises(BlockingIOError):
                    far.recv(100)
                with pytest.raises(BlockingIOError):
                    near.recv(100)
            finally:
                hold.unlock(pod.netns, TABLE)
            far.settimeout(10)
            near.settimeout(10)
            assert far.recv(100) == b"from outside"
            assert near.recv(100) == b"from inside"


def test_loopback_is_held_too(pod: Member) -> None:
    """A sibling's data that a dumped process has acknowledged would be lost."""
    with in_netns(pod.netns, socket.SOCK_DGRAM) as one, in_netns(pod.netns, socket.SOCK_DGRAM) as other:
        one.bind(("127.0.0.1", 0))
        one.setblocking(False)
        hold.lock(pod.netns, TABLE)
        try:
            with suppress(PermissionError):
                other.sendto(b"held", one.getsockname())
            with pytest.raises(BlockingIOError):
                one.recv(100)
        finally:
            hold.unlock(pod.netns, TABLE)
        other.sendto(b"free", one.getsockname())
        one.settimeout(10)
        assert one.recv(100) == b"free"


def test_criu_passes(pod: Member, client: Member) -> None:
    """The probe with which a restored connection leaves repair mode has CRIU's mark."""
    with (
        in_netns(client.netns, socket.SOCK_DGRAM) as listener,
        in_netns(pod.netns, socket.SOCK_DGRAM) as criu,
    ):
        listener.bind((client.ip4, 0))
        listener.settimeout(10)
        criu.setsockopt(socket.SOL_SOCKET, 36, 0xC114)  # SO_MARK
        hold.lock(pod.netns, CRIU_TABLE)
        try:
            criu.sendto(b"probe", listener.getsockname())
            assert listener.recv(100) == b"probe"
        finally:
            hold.unlock(pod.netns, CRIU_TABLE)


def test_the_address_of_a_held_pod_is_still_seen_to_be_taken(wire: Segment, pod: Member) -> None:
    hold.lock(pod.netns, TABLE)
    try:
        found = claim.probe(wire.node, "br0", pod.addresses, interval_s=1.0)
    finally:
        hold.unlock(pod.netns, TABLE)
    assert {(conflict.ip, conflict.mac) for conflict in found} == {(ip, pod.mac) for ip in pod.addresses}


def test_again_does_no_harm(pod: Member, nft_by: str) -> None:
    nft.run(pod.netns, "table inet CRIUSE {\n chain in {\n counter\n }\n}\ntable ip own {\n}\n")
    try:
        assert hold.tables(pod.netns) == ()
        hold.lock(pod.netns, TABLE)
        before = nft.run(pod.netns, f"list table inet {TABLE}")
        hold.lock(pod.netns, TABLE)
        assert nft.run(pod.netns, f"list table inet {TABLE}") == before
        hold.lock(pod.netns, CRIU_TABLE)
        assert set(hold.tables(pod.netns)) == {TABLE, CRIU_TABLE}
        assert hold.unlock(pod.netns, TABLE)
        assert not hold.unlock(pod.netns, TABLE)
        assert hold.tables(pod.netns) == (CRIU_TABLE,)
        assert hold.unlock(pod.netns, CRIU_TABLE)
        names = {entry["table"]["name"] for entry in nft.run(pod.netns, "list tables") if "table" in entry}
        assert names == {"CRIUSE", "own"}, "others' tables stay"
    finally:
        nft.run(pod.netns, "delete table inet CRIUSE\ndelete table ip own\n")


def test_a_refusal_is_one_sentence(pod: Member, nft_by: str) -> None:
    with pytest.raises(NftError, match=r"could not change nftables: .*(No such file|not exist)") as caught:
        nft.run(pod.netns, "delete table inet nothere\n")
    assert "\n" not in str(caught.value)
    with pytest.raises(NftError, match="syntax error"):
        nft.run(pod.netns, "hold everything")


def test_json_goes_both_ways(pod: Member, nft_by: str) -> None:
    table = {"family": "inet", "name": "both"}
    nft.run(pod.netns, {"nftables": [{"add": {"table": table}}]})
    try:
        listed = nft.run(pod.netns, "list tables")
        assert {"family": "inet", "name": "both"}.items() <= listed[-1]["table"].items()
    finally:
        nft.run(pod.netns, {"nftables": [{"delete": {"table": table}}]})


@pytest.mark.parametrize("name", ["pod", "torpor-hold-a b", "CRIU-;flush ruleset", "CRIU-" + "x" * 200, ""])
def test_only_names_of_holds_are_taken(pod: Member, name: str) -> None:
    with pytest.raises(NetworkError, match="could not hold"):
        hold.lock(pod.netns, name)
    with pytest.raises(NetworkError, match="could not hold"):
        hold.unlock(pod.netns, name)


def test_a_record_comes_before_the_table_and_goes_after_it(
    pod: Member, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = nft.run

    def spy(*args: object) -> nft.Objects:
        seen.append(len(list(tmp_path.glob("*.json"))))
        return real(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(nft, "run", spy)
    hold.lock(pod.netns, TABLE, records=tmp_path, owner="web")
    hold.lock(pod.netns, TABLE, records=tmp_path, until="decision", owner="another")
    assert set(seen) == {1}
    [path] = tmp_path.iterdir()
    held = hold.read_record(path)
    assert isinstance(held, hold.Held)
    assert (held.table, held.owner, held.until, held.place.inode) == (TABLE, "web", "call", pod.netns.inode)
    assert hold.is_alive(held.holder)
    hold.unlock(pod.netns, TABLE, records=tmp_path)
    assert set(seen) == {1}
    assert list(tmp_path.iterdir()) == []


def test_no_record_stays_of_a_hold_that_failed(
    pod: Member, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold, "_rules", lambda table: "nonsense")  # pyright: ignore
    with pytest.raises(NftError):
        hold.lock(pod.netns, TABLE, records=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_library_or_program_it_says_so(pod: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nft, "_library", lambda: None)
    monkeypatch.setattr(nft, "_program", None)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)  # pyright: ignore
    assert not nft.available()
    with pytest.raises(NftError, match="install nftables"):
        hold.lock(pod.netns, TABLE)
