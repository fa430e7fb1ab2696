"""A container that is away from its home, on routed networks: its leases, and that it is listed there."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from cluster import away, config
from cluster.away import Absence, Absent
from cluster.cli import migrate as migrate_cli
from cluster.here import Here
from cluster.records import Record
from netmig import census
from netmig import identity as identities
from netmig.errors import NetworkError
from netmig.identity import Identity, Link, LinkAddress
from netmig.journal import Created, Journal
from netmig.lease import HostLocal, Owner
from shim.cli import net

ETH0 = Link(index=2, name="eth0", kind="veth", mac="02:00:00:00:00:01", mtu=1500, queue_length=0, flags=0)
IPS = ("10.88.0.10", "fd88::10")
POD = Identity(
    links=(ETH0,),
    addresses=tuple(LinkAddress(interface="eth0", ip=ip, prefix=24, scope=0) for ip in IPS),
)


@pytest.fixture
def store(tmp_path: Path) -> HostLocal:
    found = HostLocal("pods", tmp_path)
    for ip in IPS:
        found.reserve(ip, Owner(container_id="sandbox"))
        aged = time.time() - 600
        os.utime(found.path / ip, (aged, aged))
    return found


@pytest.fixture
def absence(tmp_path: Path, store: HostLocal) -> Absence:
    here = Here(
        config=config.Config(node="a", state=tmp_path / "state", leases=str(store.path)),
        node=cast("Any", None),
    )
    record = Record(here.config.away, "0" * 16)
    record.path.mkdir(parents=True)
    absent = Absent(
        migration="0" * 16,
        owner="sandbox",
        identity=identities.encode(POD),
        peer="b",
        via=("10.0.0.2",),
        container_id="web",
    )
    record.make(absent)
    return Absence(here, record)


def free(store: HostLocal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a home whose runtimes and namespaces know nothing of a container that is away."""
    node = SimpleNamespace(config=SimpleNamespace(store_path=tmp_path / "images"), store=None)
    monkeypatch.setattr(net, "this_node", lambda: node)
    monkeypatch.setattr(net, "container_ids", set)
    monkeypatch.setattr(net, "prune", lambda *args: {})
    monkeypatch.setattr(net, "sleeping", lambda *args: None)
    monkeypatch.setattr(net.log, "audit", lambda *args, **fields: None)
    monkeypatch.setattr(census, "in_use", lambda addresses: {})
    arguments = ["leases", "--free", "--data-dir", str(store.path.parent), store.path.name]
    done = CliRunner().invoke(net.command, arguments, catch_exceptions=False)
    assert done.exit_code == 0


def owners(store: HostLocal) -> list[str]:
    return [lease.owner.container_id for lease in store.leases()]


def test_what_is_away_keeps_its_leases(
    absence: Absence, store: HostLocal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    absence.keep()
    absence.keep()
    assert owners(store) == [absence.keeper] * 2
    for ip in IPS:
        os.utime(store.path / ip, (0, 0))
    free(store, monkeypatch, tmp_path)
    assert not store.release(IPS[0], Owner(container_id="sandbox"))  # what a DEL of the old id does
    assert owners(store) == [absence.keeper] * 2


def test_what_has_come_home_has_its_own_leases_again(
    absence: Absence, store: HostLocal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    absence.keep()
    absence.end()
    assert owners(store) == ["sandbox"] * 2
    assert not absence.record.exists()
    for ip in IPS:
        os.utime(store.path / ip, (0, 0))
    free(store, monkeypatch, tmp_path)
    assert owners(store) == []


@pytest.mark.parametrize("kept", [True, False])
def test_what_has_ended_away_gives_them_back(absence: Absence, store: HostLocal, kept: bool) -> None:
    if kept:
        absence.keep()
    absence.gone()
    assert owners(store) == []
    assert not absence.record.exists()


def test_the_leases_of_another_stay_as_they_are(absence: Absence, store: HostLocal) -> None:
    store.hand_over(IPS[0], Owner(container_id="sandbox"), Owner(container_id="other"))
    absence.keep()
    assert owners(store) == ["other", absence.keeper]
    absence.gone()
    assert owners(store) == ["other"]


def test_a_way_that_another_process_is_at_is_not_taken_for_undone(absence: Absence) -> None:
    path = absence.record.path / "journal.jsonl"
    theirs = Journal(path)
    theirs.record(Created(path=str(path.with_name("netns"))))
    for over in (absence.come_home, absence.end, absence.gone):
        with pytest.raises(NetworkError, match="another process has it open; end that one"):
            over()
    assert absence.record.exists()
    theirs.close()
    absence.end()
    assert not absence.record.exists()


@pytest.mark.parametrize("how", ["come_home", "end", "gone"])
def test_one_that_is_being_sent_on_is_waited_for(
    absence: Absence, store: HostLocal, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """As by an agent that starts anew, while the container comes home or ends."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(*args: object, **named: object) -> None:
        begun.set()
        assert go_on.wait(5)

    monkeypatch.setattr(away, "detour", slow)
    monkeypatch.setattr(away.oneway, "let_pass", lambda *_: None)
    sending = threading.Thread(target=absence.send_on)
    sending.start()
    assert begun.wait(5)
    over = threading.Thread(target=getattr(absence, how))
    over.start()
    over.join(0.1)
    assert over.is_alive()
    go_on.set()
    for one in (sending, over):
        one.join(5)
    assert not (absence.record.path / "journal.jsonl").exists()
    assert owners(store) == {"come_home": [absence.keeper] * 2, "end": ["sandbox"] * 2, "gone": []}[how]
    begun.clear()
    absence.send_on()  # it is not away any more
    assert not begun.is_set()


def test_by_what_another_node_is_reached_is_an_address() -> None:
    assert away.no_way(("10.0.0.2", "fd00::2")) is None
    for text in ("", "node-b", "10.0.0.2 ", "10.0.0.2/24", "fe80::1%eth0"):
        assert away.no_way(("10.0.0.2", text)) == text


def test_what_is_away_is_listed_at_home(absence: Absence, capsys: pytest.CaptureFixture[str]) -> None:
    migrate_cli._list(absence.here, as_json=True)  # pyright: ignore[reportPrivateUsage]
    row = {"migration": "0" * 16, "container": "web", "way": "to b", "state": "away"}
    assert json.loads(capsys.readouterr().out) == [row]
