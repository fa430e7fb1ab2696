"""The journal of network steps: on disk before a step, readable after any end, no use after a boot."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from netmig.errors import NetworkError
from netmig.identity import Identity, Link, Route
from netmig.journal import Created, Journal, Plugged, Proxied, Routed, Set, Shaped, Step
from netmig.places import Place

NODE = Place(path="/proc/1/ns/net", inode=4026531840)
LO = Link(name="lo", index=1, kind="loopback", mac=None, mtu=65536, queue_length=1000, flags=1)
ROUTE = Route(
    destination="10.0.0.1/32", table=254, protocol=188, scope=253, kind=1, attributes={"RTA_OIF": "veth1"}
)
STEPS: tuple[Step, ...] = (
    Created(path="/run/netns/x"),
    Shaped(netns=Place(path="/run/netns/x", inode=7), host=NODE, before=Identity(links=(LO,))),
    Plugged(host=NODE, end="veth1", index=9, before=None, port={"IFLA_BRPORT_MODE": 1}),
    Set(host=NODE, name="net/ipv4/conf/veth1/proxy_arp", before="0"),
    Proxied(host=NODE, interface="veth1", ip="fd00::1"),
    Routed(host=NODE, route=ROUTE, before=(ROUTE,)),
)


def written(path: Path) -> Journal:
    journal = Journal(path)
    for step in STEPS:
        journal.record(step)
    journal.close()
    return journal


def loaded(path: Path) -> tuple[Step, ...]:
    journal = Journal.load(path)
    assert journal is not None
    journal.close()
    return journal.steps


def test_the_steps_come_back(tmp_path: Path) -> None:
    path = tmp_path / "below" / "journal"
    assert written(path).steps == STEPS
    assert loaded(path) == STEPS
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_line_that_was_cut_off_is_a_step_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    whole = path.read_bytes()
    ends = [number for number, octet in enumerate(whole) if octet == ord("\n")]
    for length in (*range(0, len(whole), 5), *ends, *(end + 1 for end in ends)):
        path.write_bytes(whole[:length])
        n_lines = sum(end < length for end in ends)
        left = STEPS[: max(n_lines - 1, 0)]
        assert loaded(path) == left
        again = Journal.load(path)
        assert again is not None
        again.record(STEPS[-1])
        again.close()
        assert loaded(path) == (*left, STEPS[-1])


def test_each_step_is_synced_before_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(path.read_bytes()))
    for number, step in enumerate(STEPS):
        journal.record(step)
        assert synced[number] == path.read_bytes()
        assert synced[number].count(b"\n") == number + 2


def test_a_journal_of_a_call_at_work_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    assert Journal.load(path) is None
    with pytest.raises(NetworkError, match="File exists"):
        Journal(path)
    journal.close()
    again = Journal.load(path)
    assert again is not None
    assert Journal.load(path) is None
    again.record(STEPS[0])
    again.close()
    assert loaded(path) == STEPS[:1]


def test_a_call_that_ends_while_its_journal_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it did is to stay."""
    path = tmp_path / "journal"
    written(path)
    real = fcntl.flock

    def late(fd: int, how: int) -> None:
        path.unlink()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert Journal.load(path) is None


def test_nothing_of_a_network_outlives_a_boot(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    path.write_bytes(path.read_bytes().replace(boot, b"another"))
    again = Journal.load(path)
    assert again is not None
    assert again.steps == ()
    again.record(STEPS[0])
    again.close()
    assert loaded(path) == STEPS[:1]


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        (b'"schema":1}', b'"schema":2}', "its schema is 2 and 1 is known here"),
        (b'"step":"set"', b'"step":"sit"', "Invalid value 'sit'"),
        (b'{"path"', b'{"pa"', "missing required field"),
        (b'{"before":null', b"]", "Expecting value"),
    ],
)
def test_a_journal_that_cannot_be_read(tmp_path: Path, old: bytes, new: bytes, cause: str) -> None:
    path = tmp_path / "journal"
    written(path)
    changed = path.read_bytes().replace(old, new)
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    with pytest.raises(NetworkError, match="could not read network journal") as error:
        Journal.load(path)
    assert cause in str(error.value)
    with pytest.raises(NetworkError, match="No such file"):
        Journal.load(tmp_path / "none")


def test_the_file_goes_with_the_last_step(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    for step in STEPS:
        journal.record(step)
    journal.drop(2)
    assert (journal.steps, path.exists()) == (STEPS[:2], True)
    journal.drop(0)
    assert (journal.steps, path.exists()) == ((), False)


def test_a_journal_in_memory(tmp_path: Path) -> None:
    journal = Journal()
    journal.record(STEPS[0])
    assert journal.steps == STEPS[:1]
    journal.forget()
    assert journal.steps == ()


def test_a_step_that_cannot_be_written_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    monkeypatch.setattr(os, "write", lambda fd, data: len(data) - 1)
    with pytest.raises(NetworkError, match="no space is left; make room"):
        journal.record(STEPS[0])
    assert journal.steps == ()
