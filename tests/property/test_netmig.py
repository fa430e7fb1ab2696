"""Whatever a pod's network is: the document, its messages to the kernel, and a clone's addresses."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from netmig import messages
from netmig.errors import NetworkError
from netmig.identity import (
    NTF_PROXY,
    NUD_PERMANENT,
    NUD_STALE,
    HostEnd,
    Identity,
    Link,
    LinkAddress,
    Neighbour,
    Queue,
    Route,
    Rule,
    decode,
    diff,
    encode,
    global_addresses,
    link_local,
    rebind,
)
from netmig.rtnl import Message

NAMES: tuple[str, ...] = ("lo", "eth0", "a.b")
# Whole documents take long to draw, longest on a busy machine.
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
INDEXES: dict[str, int] = {name: number + 1 for number, name in enumerate(NAMES)}

numbers = st.integers(0, 2**32 - 1)
words = st.sampled_from(("a", "veth-0123", "x.y", "longest-of-all1"))
macs = st.integers(0, 2**48 - 1).map(lambda number: number.to_bytes(6, "big").hex(":"))
ip4s = st.integers(0, 2**32 - 1).map(lambda number: str(ipaddress.IPv4Address(number)))
ip6s = st.integers(0, 2**128 - 1).map(lambda number: str(ipaddress.IPv6Address(number)))
interfaces = st.sampled_from(NAMES)


@st.composite
def addresses(draw: st.DrawFn) -> LinkAddress:
    six = draw(st.booleans())
    ips = ip6s if six else ip4s
    ip = draw(ips)
    return LinkAddress(
        interface=draw(interfaces),
        ip=ip,
        prefix=draw(st.integers(0, 128 if six else 32)),
        scope=draw(st.sampled_from([0, 200, 253, 254])),
        peer=draw(st.none() | ips.filter(lambda other: other != ip)),
        broadcast=None if six else draw(st.none() | ip4s),
        label=None if six else draw(st.none() | st.just("eth0:x")),
        flags=draw(st.sampled_from([0, 0x100, 0x200, 0x300])),
        lifetime=draw(st.none() | st.tuples(st.integers(0, 10**6), st.integers(0, 10**6))),
        metric=draw(st.none() | numbers),
        protocol=draw(st.integers(0, 255)),
    )


@st.composite
def networks(draw: st.DrawFn) -> str:
    six = draw(st.booleans())
    length = draw(st.integers(0, 128 if six else 32))
    return str(ipaddress.ip_network(f"{draw(ip6s if six else ip4s)}/{length}", strict=False))


@st.composite
def routes(draw: st.DrawFn) -> Route:
    destination = draw(networks())
    ips = ip6s if ":" in destination else ip4s
    near = st.fixed_dictionaries(
        {"RTA_OIF": interfaces}, optional={"RTA_GATEWAY": ips, "RTA_PRIORITY": numbers, "RTA_PREFSRC": ips}
    )
    hop = st.fixed_dictionaries(
        {"oif": interfaces, "hops": st.integers(0, 255), "attrs": ips.map(lambda ip: [["RTA_GATEWAY", ip]])}
    )
    far = st.fixed_dictionaries({"RTA_MULTIPATH": st.lists(hop, min_size=2, max_size=3)})
    return Route(
        destination=destination,
        table=draw(numbers.filter(lambda number: number != messages.TABLE_LOCAL)),
        protocol=draw(st.integers(3, 255)),
        scope=draw(st.integers(0, 255)),
        kind=draw(st.integers(1, 11)),
        tos=draw(st.integers(0, 255)),
        flags=draw(st.sampled_from([0, 2, 4])),
        source=draw(st.none() | ips.map(lambda ip: f"{ip}/{128 if ':' in ip else 32}")),
        attributes=draw(near | far),
    )


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    more = {"FRA_FWMARK": numbers, "FRA_IIFNAME": words, "FRA_PROTOCOL": st.integers(0, 255)}
    return Rule(
        family=draw(st.sampled_from([2, 10])),
        table=draw(numbers),
        action=draw(st.integers(1, 8)),
        priority=draw(numbers),
        source=draw(st.none() | networks()),
        destination=draw(st.none() | networks()),
        tos=draw(st.integers(0, 255)),
        flags=draw(st.sampled_from([0, 2])),
        attributes=draw(st.fixed_dictionaries({}, optional=more)),
    )


@st.composite
def neighbours(draw: st.DrawFn) -> Neighbour:
    state, flags = draw(st.sampled_from([(NUD_PERMANENT, 0), (NUD_PERMANENT, NTF_PROXY), (NUD_STALE, 0)]))
    mac = None if flags else draw(macs)
    return Neighbour(interface=draw(interfaces), ip=draw(ip4s | ip6s), mac=mac, state=state, flags=flags)


queues = st.builds(
    Queue,
    what=st.sampled_from(["qdisc", "class"]),
    kind=words,
    handle=numbers,
    parent=numbers,
    info=numbers,
    attributes=st.lists(st.tuples(st.integers(1, 20), words), max_size=2).map(tuple),
)
ends = st.builds(
    HostEnd,
    name=words,
    mac=macs,
    mtu=st.integers(68, 65535),
    queue_length=numbers,
    alias=st.none() | st.text(max_size=3),
    bridge=st.none() | words,
    port=st.dictionaries(words, numbers, max_size=2),
    queues=st.lists(queues, max_size=1).map(tuple),
)


@st.composite
def links(draw: st.DrawFn, name: str) -> Link:
    loopback = name == "lo"
    return Link(
        name=name,
        index=INDEXES[name],
        kind="loopback" if loopback else "veth",
        mac=None if loopback else draw(macs),
        mtu=draw(st.integers(68, 65535)),
        queue_length=draw(numbers),
        flags=draw(st.integers(0, 0x1FFF)),
        alias=draw(st.none() | st.text(max_size=3)),
        other_names=tuple(draw(st.lists(words, max_size=2))),
        host=None if loopback else draw(st.none() | ends),
        queues=tuple(draw(st.lists(queues, max_size=2))),
    )


@st.composite
def identities(draw: st.DrawFn) -> Identity:
    def some(what: st.SearchStrategy[Any], by: Callable[[Any], Any] = repr) -> tuple[Any, ...]:
        return tuple(draw(st.lists(what, max_size=2, unique_by=by)))

    leaves = st.text("abc:./0123456789", max_size=8) | numbers | st.none()
    firewall = st.recursive(leaves, lambda inner: st.lists(inner, max_size=2), max_leaves=4)
    return Identity(
        links=tuple(draw(links(name)) for name in NAMES),
        addresses=some(addresses(), lambda one: one.ip),
        routes=some(routes()),
        rules=some(rules()),
        neighbours=some(neighbours(), lambda one: (one.interface, one.ip)),
        sysctls=draw(st.dictionaries(words.map(lambda word: f"net/{word}"), st.text(max_size=3), max_size=2)),
        nftables=some(st.dictionaries(st.just("rule"), firewall, min_size=1)),
        warnings=some(st.text(max_size=8)),
    )


@given(identities())
@few
def test_a_document_comes_back_as_it_was(identity: Identity) -> None:
    data = encode(identity)
    assert decode(data) == identity
    assert encode(decode(data)) == data
    assert diff(identity, decode(data)) == []


@given(identities(), st.data())
@few
def test_a_damaged_document_is_refused_in_a_sentence(identity: Identity, data: st.DataObject) -> None:
    text = bytearray(encode(identity))
    where = data.draw(st.integers(0, len(text) - 1))
    text[where] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(text))
    except NetworkError as error:
        assert str(error).startswith("could not read a network identity: ")
        assert "; " in str(error)


STRANGE_LINK = {
    "name": "../x",
    "index": 2,
    "kind": "veth",
    "mac": None,
    "mtu": 1,
    "queue_length": 0,
    "flags": 0,
}
ADDRESS = {"interface": "lo", "ip": "10.0.0.1", "prefix": 8, "scope": 0}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"schema": 2}, "its schema is 2 and 1 is known here"),
        ({"schema": True}, "its schema is True"),
        ({"sysctls": {"kernel/core_pattern": "|/bin/sh"}}, "is not below net/"),
        ({"sysctls": {"net/../kernel/core_pattern": "x"}}, "is not below net/"),
        ({"links": [STRANGE_LINK]}, "no name of an interface"),
        ({"links": [{**STRANGE_LINK, "name": "eth0", "mac": "02"}]}, "no MAC address"),
        ({"links": [{**STRANGE_LINK, "name": "eth0"}] * 2}, "two interfaces of one name"),
        ({"addresses": [ADDRESS]}, "there is no interface"),
        ({"addresses": [{**ADDRESS, "ip": "10.0.0"}]}, "10.0.0"),
        ({"addresses": [{**ADDRESS, "peer": "fd00::1"}]}, "not of the family"),
        ({"routes": 3}, "routes"),
    ],
)
def test_what_must_not_reach_the_kernel(change: dict[str, Any], cause: str) -> None:
    document = json.loads(encode(Identity()))
    with pytest.raises(NetworkError) as error:
        decode(json.dumps({**document, **change}).encode())
    assert cause in str(error.value)


def test_another_document_is_refused() -> None:
    for data in (b"", b"[]", b"[" * 100_000, b'{"links": []}', b"\xff", b"null"):
        with pytest.raises(NetworkError, match="could not read a network identity"):
            decode(data)


def dumped(message: Message) -> Message:
    """A message as the kernel lists what it had been given by it."""
    header, attributes = dict(message.header), dict(message.attributes)
    for name in ("table", "flags"):
        header.setdefault(name, 0)
    if "RTA_TABLE" not in attributes and "prefixlen" in header:
        permanent = attributes["IFA_CACHEINFO"]["ifa_valid"] == 0xFFFFFFFF
        attributes["IFA_FLAGS"] |= 0x80 if permanent else 0
    return Message(header=header, attributes=attributes)


@given(addresses())
def test_an_address_is_the_same_on_the_other_side(one: LinkAddress) -> None:
    names = {index: name for name, index in INDEXES.items()}
    assert messages.address_from(dumped(messages.address_to(one, INDEXES[one.interface])), names) == one


@given(routes(), st.permutations(range(1, 4)))
def test_a_route_is_the_same_on_the_other_side(one: Route, order: list[int]) -> None:
    """Whatever numbers the interfaces have there."""
    indexes = dict(zip(NAMES, order, strict=True))
    names = {index: name for name, index in indexes.items()}
    assert messages.route_from(dumped(messages.route_to(one, indexes)), names) == one


@given(rules())
def test_a_rule_is_the_same_on_the_other_side(one: Rule) -> None:
    assert messages.rule_from(dumped(messages.rule_to(one))) == one


@given(neighbours())
def test_a_neighbour_is_the_same_on_the_other_side(one: Neighbour) -> None:
    names = {index: name for name, index in INDEXES.items()}
    assert messages.neighbour_from(messages.neighbour_to(one, INDEXES[one.interface]), names) == one


@given(identities(), st.data())
@few
def test_a_clone_has_the_new_addresses_and_none_of_the_old(identity: Identity, data: st.DataObject) -> None:
    ours = sorted({one.ip for one in identity.addresses})
    four, six = ([one for one in ours if (":" in one) is v6] for v6 in (False, True))
    fresh4 = data.draw(st.lists(ip4s, min_size=len(four), max_size=len(four), unique=True))
    fresh6 = data.draw(st.lists(ip6s, min_size=len(six), max_size=len(six), unique=True))
    new = {**dict(zip(four, fresh4, strict=True)), **dict(zip(six, fresh6, strict=True))}

    clone = rebind(identity, new)

    assert sorted(one.ip for one in clone.addresses) == sorted(new.values())
    assert {(one.ip, one.prefix, one.ifname) for one in global_addresses(clone)} == {
        (new[one.ip], one.prefix, one.ifname) for one in global_addresses(identity)
    }
    assert not any(one.state == NUD_STALE for one in clone.neighbours)
    gone = set(ours) - set(new.values())
    assert not any(route.attributes.get("RTA_PREFSRC") in gone for route in clone.routes)
    for before, after in zip(identity.links, clone.links, strict=True):
        assert (before.name, before.mtu, before.index) == (after.name, after.mtu, after.index)
        assert (after.mac is None) == (before.kind == "loopback")
        if after.mac is not None:
            assert int(after.mac[:2], 16) & 3 == 2
        assert (after.host is None) == (before.host is None)
    assert decode(encode(clone)) == clone
    back = rebind(clone, {new_one: old for old, new_one in new.items()})
    assert sorted(one.ip for one in back.addresses) == ours


@given(macs)
def test_link_local_addresses_follow_the_mac(mac: str) -> None:
    lo = Link(name="lo", index=1, kind="loopback", mac=None, mtu=65536, queue_length=0, flags=1)
    veth = Link(name="eth0", index=2, kind="veth", mac="02:00:00:00:00:01", mtu=1500, queue_length=0, flags=1)
    address = LinkAddress(interface="eth0", ip="fe80::ff:fe00:1", prefix=64, scope=253)
    assert address.ip == link_local("02:00:00:00:00:01")
    clone = rebind(Identity(links=(lo, veth), addresses=(address,)), {}, {"eth0": mac})
    assert [one.ip for one in clone.addresses] == [link_local(mac)]


def test_addresses_that_cannot_be_exchanged() -> None:
    lo = Link(name="lo", index=1, kind="loopback", mac=None, mtu=65536, queue_length=0, flags=1)
    ips = ("10.0.0.1", "10.0.0.2", "fd00::1")
    pod = Identity(
        links=(lo,),
        addresses=tuple(LinkAddress(interface="lo", ip=ip, prefix=24, scope=0) for ip in ips),
    )
    for new, cause in (
        ({"10.0.0.9": "10.0.0.8"}, "the pod does not have it"),
        ({"10.0.0.1": "fd00::2"}, "of the other family"),
        ({"10.0.0.1": "10.0.0.2"}, "there twice"),
        ({"10.0.0.1": "10.0.0.8", "10.0.0.2": "10.0.0.8"}, "there twice"),
    ):
        with pytest.raises(NetworkError, match=cause):
            rebind(pod, new)
    swapped = rebind(pod, {"10.0.0.1": "10.0.0.2", "10.0.0.2": "10.0.0.1"})
    assert [one.ip for one in swapped.addresses] == ["10.0.0.2", "10.0.0.1", "fd00::1"]


@given(identities(), st.data())
@few
def test_a_difference_is_told(identity: Identity, data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(NAMES) - 1))
    links = list(identity.links)
    links[number] = replace(links[number], mtu=links[number].mtu ^ 1)
    one = Rule(family=2, table=7, action=1, priority=2**32)
    for changed, where in (
        (replace(identity, links=tuple(links)), f"links.{NAMES[number]}.mtu: "),
        (
            replace(identity, links=tuple(links[:number] + links[number + 1 :])),
            f"links.{NAMES[number]}: only before",
        ),
        (replace(identity, rules=(*identity.rules, one)), "rules: only after: "),
        (replace(identity, sysctls={**identity.sysctls, "net/x": "0"}), "sysctls.net/x: "),
    ):
        (line,) = diff(identity, changed)
        assert line.startswith(where)
        assert len(diff(changed, identity)) == 1
    counted = replace(identity, nftables=({"rule": {"counter": {"packets": 1, "bytes": 60}}},))
    later = replace(identity, nftables=({"rule": {"counter": {"packets": 2, "bytes": 99}}},))
    assert diff(counted, later) == []
