"""Leases: one owner at a time, whoever asks, and in host-local's own words."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from netmig.errors import NetworkError
from netmig.lease import AddressTaken, HostLocal, Owner, Reserver, Static, with_static_ipam

ONE, OTHER = Owner(container_id="one"), Owner(container_id="other", ifname="net1")
IP = "10.88.0.10"
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def store(tmp_path: Path) -> HostLocal:
    return HostLocal("pods", tmp_path)


@pytest.fixture(params=["host-local", "static"])
def reserver(request: pytest.FixtureRequest, store: HostLocal) -> Reserver:
    return store if request.param == "host-local" else Static()


def test_the_contract(reserver: Reserver) -> None:
    """What holds for every store, with one owner and no rival."""
    assert reserver.owner(IP) is None
    reserver.reserve(IP, ONE)
    reserver.reserve(IP, ONE)
    reserver.hand_over(IP, ONE, OTHER)
    reserver.hand_over(IP, ONE, OTHER)
    assert not any(lease.owner == OTHER for lease in reserver.stale({"other"}))
    assert reserver.release(IP, OTHER)
    assert reserver.owner(IP) is None


def test_a_lease_is_host_locals_own(store: HostLocal) -> None:
    store.reserve(IP, ONE)
    store.reserve("fd88:0:0::A", ONE)
    assert (store.path / IP).read_bytes() == b"one\r\neth0"
    assert (store.path / "fd88::a").read_bytes() == b"one\r\neth0"
    assert sorted(path.name for path in store.path.iterdir()) == [IP, "fd88::a", "lock"]
    assert store.owner("FD88::A") == ONE


def test_nobody_takes_what_another_has(store: HostLocal) -> None:
    store.reserve(IP, ONE)
    with pytest.raises(AddressTaken, match=r"could not lease address 10.88.0.10: container 'one' \(eth0\)"):
        store.reserve(IP, OTHER)
    with pytest.raises(AddressTaken):
        store.hand_over(IP, OTHER, Owner(container_id="third"))
    assert not store.release(IP, OTHER)
    assert not store.release(IP, Owner(container_id="one", ifname="net1"))
    assert store.owner(IP) == ONE
    with pytest.raises(NetworkError, match="nobody has it"):
        store.hand_over("10.88.0.11", ONE, OTHER)


def test_what_the_plugin_wrote_is_read(store: HostLocal) -> None:
    store.path.mkdir(parents=True)
    (store.path / IP).write_bytes(b"abc\r\neth0")
    (store.path / "10.88.0.11").write_bytes(b"old-format\n")
    (store.path / "last_reserved_ip.0").write_bytes(b"10.88.0.11")
    (store.path / "torpor-lease.new").write_bytes(b"abc\r\neth0")
    assert [(lease.ip, lease.owner.container_id, lease.owner.ifname) for lease in store.leases()] == [
        (IP, "abc", "eth0"),
        ("10.88.0.11", "old-format", ""),
    ]
    store.reserve("10.88.0.12", ONE)
    assert (store.path / "last_reserved_ip.0").read_bytes() == b"10.88.0.11"


def test_leases_of_the_dead_are_found_and_reservations_are_not_among_them(store: HostLocal) -> None:
    store.reserve(IP, ONE)
    store.reserve("10.88.0.11", OTHER)
    store.reserve("10.88.0.9", Owner(container_id="torpor-web"))
    assert [lease.ip for lease in store.stale({"other"})] == [IP]
    assert [lease.ip for lease in store.stale(set())] == [IP, "10.88.0.11"]
    for lease in store.stale({"other"}):
        assert store.release(lease.ip, lease.owner)
    assert store.stale({"other"}) == ()


def _race(directory: Path, number: int, start: int, results: int) -> None:
    owner = Owner(container_id=f"racer-{number}")
    os.read(start, 1)
    try:
        HostLocal("pods", directory).reserve(IP, owner)
    except AddressTaken:
        os._exit(1)
    os.write(results, bytes([number]))
    os._exit(0)


def test_of_twenty_racers_one_wins(tmp_path: Path) -> None:
    start_read, start_write = os.pipe()
    result_read, result_write = os.pipe()
    racers = [
        FORK.Process(target=_race, args=(tmp_path, number, start_read, result_write)) for number in range(20)
    ]
    for racer in racers:
        racer.start()
    os.write(start_write, b"x" * len(racers))
    for racer in racers:
        racer.join()
    os.close(result_write)
    winners = os.read(result_read, 100)
    for descriptor in (start_read, start_write, result_read):
        os.close(descriptor)
    assert [racer.exitcode for racer in racers].count(0) == 1
    assert len(winners) == 1
    assert HostLocal("pods", tmp_path).owner(IP) == Owner(container_id=f"racer-{winners[0]}")


def test_a_lease_passes_through_many_hands_without_a_gap(store: HostLocal) -> None:
    """Readers do not lock, as host-local's own check does not: they must see one owner or the other."""
    store.reserve(IP, ONE)
    seen: set[Owner | None] = set()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.add(store.owner(IP))

    reader = threading.Thread(target=look)
    reader.start()
    for _ in range(50):
        store.hand_over(IP, ONE, OTHER)
        store.hand_over(IP, OTHER, ONE)
    stop.set()
    reader.join()
    assert seen <= {ONE, OTHER}


def test_it_waits_for_host_locals_lock(store: HostLocal) -> None:
    store.reserve(IP, ONE)
    with (store.path / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiter = threading.Thread(target=store.reserve, args=("10.88.0.11", ONE))
        waiter.start()
        waiter.join(0.1)
        assert waiter.is_alive()
        assert store.owner("10.88.0.11") is None
    waiter.join(10)
    assert store.owner("10.88.0.11") == ONE


def _killed_at(point: str, directory: Path, act: Callable[[HostLocal], object]) -> None:
    """Do something in a child that is killed just before one of its system calls."""

    def child() -> None:
        def die(*_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        place: object = Path if point == "replace" else os
        setattr(place, point, die)
        act(HostLocal("pods", directory))

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("point", ["fchmod", "fsync", "replace"])
def test_a_kill_leaves_the_old_owner_or_none(tmp_path: Path, point: str) -> None:
    store = HostLocal("pods", tmp_path)
    _killed_at(point, tmp_path, lambda store: store.reserve(IP, ONE))
    assert store.owner(IP) is None
    assert store.leases() == ()
    store.reserve(IP, ONE)
    _killed_at(point, tmp_path, lambda store: store.hand_over(IP, ONE, OTHER))
    assert store.owner(IP) == ONE
    store.hand_over(IP, ONE, OTHER)
    assert store.owner(IP) == OTHER
    assert sorted(path.name for path in store.path.iterdir()) == [IP, "lock"]


CONF = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "ipam": {
                "type": "host-local",
                "dataDir": "/nowhere",
                "ranges": [
                    [{"subnet": "10.88.0.0/24", "rangeStart": "10.88.0.10", "rangeEnd": "10.88.0.20"}],
                    [{"subnet": "fd88::/64"}],
                ],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
        {"type": "portmap"},
    ],
}


@pytest.mark.parametrize("ip", ["10.88.0.9", "10.88.0.21", "fd89::1", "fd88::", "192.168.0.1"])
def test_what_the_range_does_not_have_is_refused(tmp_path: Path, ip: str) -> None:
    conf = {**CONF, "plugins": [{"ipam": {**CONF["plugins"][0]["ipam"], "dataDir": str(tmp_path)}}]}  # pyright: ignore
    store = HostLocal.of(conf)
    with pytest.raises(
        NetworkError, match=r"its ranges are 10\.88\.0\.10 to 10\.88\.0\.20, fd88::1 to fd88::"
    ):
        store.reserve(ip, ONE)
    for given in ("10.88.0.10", "10.88.0.20", "fd88::1"):
        store.reserve(given, ONE)
    assert store.path == tmp_path / "pods"


def test_a_subnet_without_a_range_is_one() -> None:
    conf = {"name": "pods", "ipam": {"type": "host-local", "subnet": "10.1.2.0/24", "dataDir": "/nowhere"}}
    for ip in ("10.1.2.0", "10.1.2.255"):
        with pytest.raises(NetworkError, match=r"10\.1\.2\.1 to 10\.1\.2\.254"):
            HostLocal.of(conf).reserve(ip, ONE)


def test_other_stores_and_names_are_refused() -> None:
    with pytest.raises(NetworkError, match="host-local does not give its addresses"):
        HostLocal.of({"name": "pods", "ipam": {"type": "dhcp"}})
    for name in ("../pods", "", "a/b", ".."):
        with pytest.raises(NetworkError, match="could not use network"):
            HostLocal(name)


def test_an_add_with_static_addresses_keeps_the_rest() -> None:
    changed = with_static_ipam(CONF, ["10.88.0.10/24", "fd88::10/64"], ["10.88.0.1"])
    bridge, portmap = changed["plugins"]
    assert bridge == {
        "type": "bridge",
        "ipam": {
            "type": "static",
            "addresses": [{"address": "10.88.0.10/24", "gateway": "10.88.0.1"}, {"address": "fd88::10/64"}],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    assert portmap == {"type": "portmap"}
    assert CONF["plugins"][0]["ipam"]["type"] == "host-local", "the original is left as it was"  # pyright: ignore
    one = with_static_ipam({"name": "x", "type": "ptp", "ipam": {"type": "host-local"}}, ["10.0.0.2/24"])
    assert one["ipam"] == {"type": "static", "addresses": [{"address": "10.0.0.2/24"}]}
