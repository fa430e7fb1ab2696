"""Has somebody got the address, and do others know where it is now? On the real kernel."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import wiring
from netmig import claim, hold, mute
from netmig.errors import NetworkError
from tests.support.segment import (
    BRIDGE,
    At,
    Member,
    Segment,
    Sniffer,
    barrier,
    in_netns,
    neighbour,
    segment,
    until,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Generator[Segment]:
    with segment(tmp_path_factory.mktemp("claim")) as made:
        yield made


@pytest.fixture(scope="module")
def client(wire: Segment) -> Member:
    return wire.add("client", 20)


@pytest.fixture(scope="module")
def owner(wire: Segment) -> Member:
    return wire.add("owner", 10)


FREE = ("10.77.0.99", "fd77::99")


def _cache(member: Member) -> set[tuple[str, str]]:
    """Who is where, groups left out."""
    with member.netns.ipr() as ipr:
        entries = [(entry.get("dst"), entry.get("lladdr")) for entry in ipr.get_neighbours()]
    return {(ip, mac) for ip, mac in entries if mac and not mac.startswith("33:33:")}


def test_a_live_owner_is_found(wire: Segment, owner: Member) -> None:
    before = _cache(owner)
    started = time.monotonic()
    found = claim.probe(wire.node, BRIDGE, [*owner.addresses, *FREE], n_probes=2, interval_s=0.2)
    assert time.monotonic() - started >= 0.4, "the free ones were waited for"
    assert [(one.ip, one.mac) for one in found] == [(ip, owner.mac) for ip in owner.addresses]
    assert str(found[0]) == f"address {owner.ip4} is in use by {owner.mac}"
    assert _cache(owner) == before, "the question changed who is where"


@pytest.mark.parametrize("ip", FREE)
def test_a_free_address_is_free(wire: Segment, ip: str) -> None:
    assert claim.probe(wire.node, BRIDGE, [ip], n_probes=2, interval_s=0.05) == []


def test_an_owner_of_ours_does_not_count(wire: Segment, owner: Member, client: Member) -> None:
    ips = [*owner.addresses, *client.addresses]
    found = claim.probe(wire.node, BRIDGE, ips, [owner.mac.upper()], n_probes=2, interval_s=0.05)
    assert [one.mac for one in found] == [client.mac, client.mac]


def test_an_answer_that_came_in_time_is_read_however_late(
    wire: Segment, owner: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy node the asker may not run for a while after it has asked."""
    moments = iter([0.0, 0.0, 0.0])

    def clock() -> float:
        now = next(moments, 10.0)
        time.sleep(now / 100)
        return now

    monkeypatch.setattr(claim, "time", SimpleNamespace(monotonic=clock))
    found = claim.probe(wire.node, BRIDGE, [owner.ip4], n_probes=1, interval_s=0.05)
    assert [one.mac for one in found] == [owner.mac]


def test_the_wait_begins_when_the_question_is_sent(
    wire: Segment, owner: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when it was due: the answer comes a moment after it."""
    send = claim._send  # pyright: ignore[reportPrivateUsage]

    def late(*words: object) -> None:
        time.sleep(0.6)
        threading.Timer(0.02, send, words).start()

    monkeypatch.setattr(claim, "_send", late)
    found = claim.probe(wire.node, BRIDGE, [owner.ip4], n_probes=1, interval_s=0.5)
    assert [one.mac for one in found] == [owner.mac]


def test_an_address_in_another_spelling_is_found(wire: Segment, owner: Member) -> None:
    found = claim.probe(wire.node, BRIDGE, ["fd77:0:0:0:0:0:0:000A"], interval_s=1.0)
    assert [one.ip for one in found] == [owner.ip6]


def test_two_who_ask_at_once_do_not_both_win(wire: Segment, client: Member, owner: Member) -> None:
    found: dict[str, list[claim.Conflict]] = {}
    both = threading.Barrier(2)

    def ask(member: Member) -> None:
        both.wait(20)
        found[member.port] = claim.probe(member.netns, "eth0", FREE, interval_s=0.3)

    askers = [threading.Thread(target=ask, args=(member,)) for member in (client, owner)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    for ip in FREE:
        assert any(one.ip == ip for conflicts in found.values() for one in conflicts)


def test_probing_where_there_is_nothing_is_refused(wire: Segment) -> None:
    with pytest.raises(NetworkError, match="could not open interface 'br9' of network namespace") as caught:
        claim.probe(wire.node, "br9", FREE)
    assert "\n" not in str(caught.value)
    with wire.node.ipr() as ipr:
        ipr.link("add", ifname="down0", kind="bridge")
    with pytest.raises(NetworkError, match="could not send on interface 'down0': Network is down; set it up"):
        claim.probe(wire.node, "down0", FREE)


def _talk(client: Member, member: Member) -> None:
    """Let the client's cache and the bridge know where an address is."""
    for ip in member.addresses:
        with in_netns(client.netns, socket.SOCK_DGRAM, ipv6=":" in ip) as datagram:
            datagram.sendto(b"where?", (ip, 9))
    barrier(client, member)
    until(lambda: all(neighbour(client.netns, ip) == member.mac for ip in member.addresses))


def _receiver(member: Member, ip: str) -> socket.socket:
    receiver = in_netns(member.netns, socket.SOCK_DGRAM, ipv6=":" in ip)
    receiver.bind((ip, 7777))
    receiver.settimeout(10)
    return receiver


@pytest.mark.parametrize("same_mac", [True, False], ids=["same MAC", "another MAC"])
def test_an_announcement_moves_the_address(
    wire: Segment, client: Member, same_mac: bool, record_property: Callable[[str, object], None]
) -> None:
    """The new place is held, as it would be between its plug and the restore."""
    number = 30 if same_mac else 40
    old = wire.add(f"old{number}", number)
    new = wire.add(f"new{number}", number, mac=number if same_mac else number + 1, plugged=False)
    _talk(client, old)
    assert wire.port_of(old.mac) == old.port
    hold.lock(old.netns, hold.table_name("old"))
    hold.lock(new.netns, hold.table_name("new"))
    with claim.Announcer(new.netns, [At(ip=ip, mac=new.mac) for ip in new.addresses]) as announcer:
        wire.plug(new)
        assert announcer.send() == (4 if same_mac else 5)  # two of the addresses may share their group
        took_s = until(lambda: wire.port_of(new.mac) == new.port)
        took_s += until(lambda: all(neighbour(client.netns, ip) == new.mac for ip in new.addresses))
    record_property("moved_ms", round(took_s * 1000, 1))
    hold.unlock(new.netns, hold.table_name("new"))
    for ip in new.addresses:
        with _receiver(new, ip) as receiver, in_netns(client.netns, socket.SOCK_DGRAM, ipv6=":" in ip) as s:
            started = time.monotonic()
            s.sendto(b"here?", (ip, 7777))
            assert receiver.recv(100) == b"here?"
            record_property(f"first_packet_ms_{ip}", round((time.monotonic() - started) * 1000, 2))


def test_without_an_announcement_it_stays(wire: Segment, client: Member) -> None:
    """What the announcement is for: the bridge and the caches go on sending to the old place."""
    old = wire.add("old50", 50)
    new = wire.add("new50", 50, plugged=False)
    # The kernel must not speak for itself here: it would, with its listener reports, some time later.
    new.netns.set_sysctl("net/ipv6/conf/eth0/disable_ipv6", "1")
    _talk(client, old)
    hold.lock(old.netns, hold.table_name("old"))
    hold.lock(new.netns, hold.table_name("new"))
    wire.plug(new)
    hold.unlock(new.netns, hold.table_name("new"))
    with _receiver(new, new.ip4) as receiver, in_netns(client.netns, socket.SOCK_DGRAM) as near:
        near.sendto(b"lost", (new.ip4, 7777))
        assert wire.port_of(old.mac) == old.port
        claim.Announcer(new.netns, [At(ip=new.ip4, mac=new.mac)]).send()
        until(lambda: wire.port_of(new.mac) == new.port)
        near.sendto(b"found", (new.ip4, 7777))
        assert receiver.recv(100) == b"found"


def test_a_bridge_that_listens_for_groups_lets_others_ask_at_once(tmp_path: Path) -> None:
    """Nobody heard what the kernel said of the group of its address, and none is asked for half a minute."""
    # In this order: so long does a bridge that begins to ask flood everything all the same.
    options = (("mcast_query_response_interval", "1"), ("mcast_querier", "1"))
    with segment(tmp_path) as wire:
        client = wire.add("client", 20)
        new = wire.add("new", 30, plugged=False)
        new.netns.set_sysctl("net/ipv6/conf/eth0/mldv2_unsolicited_report_interval", "1")
        assert mute.mute(new.netns)
        with wire.node.inside():
            for option in options:
                subprocess.run(["ip", "link", "set", BRIDGE, "type", "bridge", *option], check=True)
        wire.plug(new)  # it is asked now, and once more after 31 s
        time.sleep(1.2)  # until the last of its reports is lost
        with claim.Announcer(new.netns, [At(ip=new.ip6, mac=new.mac)]) as announcer:
            mute.unmute(new.netns)
            announcer.send()
        with _receiver(new, new.ip6) as receiver, in_netns(client.netns, socket.SOCK_DGRAM, ipv6=True) as s:
            s.sendto(b"here?", (new.ip6, 7777))
            assert receiver.recv(100) == b"here?"


def test_what_has_arrived_is_announced_once_more(wire: Segment, client: Member) -> None:
    new = wire.add("new70", 70)
    with new.netns.ipr() as ipr:
        ipr.addr("del", index=ipr.link_lookup(ifname="eth0")[0], address=new.ip4, prefixlen=24)
    told: set[str] = set()

    def is_told() -> bool:
        claims = [claim._claim(frame) for frame in sniffer.frames()]  # pyright: ignore[reportPrivateUsage]
        told.update(str(one[0]) for one in claims if one is not None)
        return new.ip6 in told

    with Sniffer(client, new.mac) as sniffer:
        wiring.tidy(new.netns.path)
        until(is_told)
    assert new.ip4 not in told, "it has given it up"


def test_an_announcer_needs_its_interface(owner: Member) -> None:
    with pytest.raises(NetworkError, match="could not open interface 'eth7'"):
        claim.Announcer(
            owner.netns, [At(ip=owner.ip4, mac=owner.mac), At(ip="10.9.9.9", mac=owner.mac, ifname="eth7")]
        )
    assert claim.Announcer(owner.netns, [At(ip="10.9.9.9", mac="", ifname="tun0")]).send() == 0
    announcer = claim.Announcer(owner.netns, [At(ip=owner.ip4, mac=owner.mac)])
    announcer.close()
    announcer.close()


def test_a_router_announces_for_who_is_behind_it(wire: Segment, client: Member) -> None:
    """The routed mode: the pods that stayed find the one that left at their own bridge."""
    gone = wire.add("gone60", 60)
    _talk(client, gone)
    hold.lock(gone.netns, hold.table_name("gone"))
    assert claim.announce_on(wire.node, BRIDGE, gone.addresses) == 3
    until(lambda: {neighbour(client.netns, ip) for ip in gone.addresses} == {"02:77:00:00:00:01"})
