"""What becomes of a container that has arrived: deleted by its owner, or ended with its node."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, cast

import pytest

from cluster import arrival, config, settle
from cluster.arrival import Arriving
from cluster.cli import migrate as migrate_cli
from cluster.here import Here
from cluster.messages import Gone
from cluster.records import BOOT, STANDING, Arrival, Record
from netmig import identity as identities
from netmig.identity import Identity

NAME = "0" * 16


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setattr(Arriving, "leave", lambda arriving: arriving.record.remove())
    monkeypatch.setattr(
        settle, "tell", lambda here, peer, *said: "unknown" if said == (Gone(migration=NAME),) else None
    )
    return Here(config=config.Config(node="b", state=tmp_path / "state"), node=cast("Any", None))


@pytest.fixture(params=["", "away"])
def arrived(request: pytest.FixtureRequest, here: Here, tmp_path: Path) -> Record:
    record = Record(here.config.arrivals, NAME)
    plan = Arrival(
        migration=NAME,
        container_id="web",
        root=str(tmp_path / "runc"),
        directory=str(tmp_path / "torpor" / "web"),
        peer="a",
        engine="criu",
        netns="/run/netns/torpor-test",
        identity=identities.encode(Identity()),
        owner="web",
        away=bool(request.param),
    )
    with record.begun():
        record.make(plan)
    record.write(BOOT, Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    record.write(STANDING, "settled")
    (record.path / "upper").mkdir()
    (tmp_path / "runc" / "web").mkdir(parents=True)
    return record


def listed(here: Here, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    migrate_cli._list(here, as_json=True)  # pyright: ignore[reportPrivateUsage]
    said = capsys.readouterr()
    return json.loads(said.out)[0]["state"], said.err


def test_one_that_is_deleted_leaves_nothing(
    here: Here, arrived: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert settle.settle_all(here) == []
    assert listed(here, capsys) == ("here", "")
    (tmp_path / "runc" / "web").rmdir()
    assert settle.settle_all(here) == []
    assert not arrived.path.exists()


def test_one_that_ended_with_its_node_keeps_its_files(
    here: Here, arrived: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrived.write(BOOT, "another")
    (tmp_path / "runc" / "web").rmdir()
    (problem,) = settle.settle_all(here)
    words = f"container 'web' ended when this node was restarted; its files are kept in {arrived.path}, "
    assert words in problem
    assert settle.settle_all(here) == []  # told once
    assert (arrived.path / "upper").is_dir()
    state, warning = listed(here, capsys)
    assert (state, words in warning) == ("ended", True)
    (arrived.path / BOOT).unlink()  # as it says
    assert settle.settle_all(here) == []
    assert not arrived.path.exists()


def test_one_that_was_started_anew_is_its_owners_to_delete(
    here: Here, arrived: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrived.write(BOOT, "another")
    assert listed(here, capsys) == ("here", "")
    assert settle.settle_all(here) == []
    (tmp_path / "runc" / "web").rmdir()
    assert settle.settle_all(here) == []
    assert not arrived.path.exists()


def test_one_is_settled_when_its_files_are_on_disk(
    here: Here, arrived: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[Path, str]] = []

    def sync(path: Path) -> None:
        synced.append((path, arrived.read(STANDING)))
        if len(synced) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    real = arrival._sync  # pyright: ignore[reportPrivateUsage]
    real(arrived.path)
    with pytest.raises(FileNotFoundError):
        real(arrived.path / "none")
    monkeypatch.setattr(arrival, "_sync", sync)
    monkeypatch.setattr(Arriving, "_remove_image", lambda _: None)
    arrived.write(STANDING, "running")
    with pytest.raises(OSError, match="error"):
        Arriving(here, arrived).settle()
    Arriving(here, arrived).settle()
    assert synced == [(arrived.path, "running")] * 2
    assert arrived.read(STANDING) == "settled"
