"""Whatever line a call is killed at, `recover` leaves the network as it was before it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from netmig import hold, nft
from netmig.apply import create
from netmig.journal import Journal
from netmig.ns import Netns
from netmig.places import Place
from netmig.recover import hold_directory, journal_path, recover
from tests.support.soak import SOAK

pytestmark = [pytest.mark.engine, pytest.mark.soak]

FORK = multiprocessing.get_context("fork")
TABLE = hold.table_name("web")
STRIDE = 1 if SOAK else 4
WATCHED = ("/netmig/hold.py", "/netmig/recover.py", "/netmig/undo.py", "/netmig/journal.py", "/netmig/ns.py")


@pytest.fixture
def pod(tmp_path: Path) -> Generator[Netns]:
    netns = Netns.create(tmp_path / "pod")
    try:
        yield netns
    finally:
        netns.remove()


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The directory of what calls leave."""
    return tmp_path / "net"


def _killed_at_line(number: int, act: Callable[[], object]) -> bool:
    """Do something in a child that is killed at its NUMBERth line of netmig; False if it has fewer."""

    def child() -> None:
        seen = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal seen
            if not frame.f_code.co_filename.endswith(WATCHED):
                return None
            if event == "line":
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        act()
        sys.settrace(None)
        os._exit(0)

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode in {0, -signal.SIGKILL}
    return process.exitcode != 0


def _in_a_dead_call(act: Callable[[], object]) -> None:
    def child() -> None:
        act()
        os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _outcomes(directory: Path, *, dry_run: bool = False) -> list[tuple[str, str, str]]:
    return [(one.kind, one.owner, one.outcome) for one in recover(directory, dry_run=dry_run)]


def _files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


def _is_clean(pod: Netns, left: Path) -> bool:
    return hold.tables(pod) == () and _files(left) == []


def test_a_hold_is_recovered_whatever_line_it_was_killed_at(pod: Netns, left: Path) -> None:
    records = hold_directory(left)

    def act() -> None:
        hold.lock(pod, TABLE, records=records, owner="web")
        hold.unlock(pod, TABLE, records=records)

    number = 1
    held = 0
    while _killed_at_line(number, act):
        held += TABLE in hold.tables(pod)
        found = recover(left)
        assert all(one.outcome in {"released", "gone"} for one in found), found
        assert _is_clean(pod, left), f"killed at line {number}"
        number += STRIDE
    assert number > 30, "the trace saw nothing"
    assert held, "it was never killed while it held"
    assert recover(left) == ()


def test_recover_itself_may_be_killed_at_any_line(pod: Netns, left: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"

    def leave() -> None:
        create(made, Journal(journal_path(left, "web"))).close()
        hold.lock(pod, TABLE, records=hold_directory(left), owner="web")

    number = 1
    while True:
        _in_a_dead_call(leave)
        killed = _killed_at_line(number, lambda: recover(left))
        recover(left)
        assert _is_clean(pod, left), f"killed at line {number}"
        assert not made.exists()
        if not killed:
            break
        number += 2 * STRIDE - 1
    assert number > 30


def test_a_call_at_work_is_left_alone(pod: Netns, left: Path, tmp_path: Path) -> None:
    journal = Journal(journal_path(left, "web"))
    create(tmp_path / "made", journal).close()
    hold.lock(pod, TABLE, records=hold_directory(left), owner="web")
    before = _files(left)
    assert _outcomes(left) == [("journal", "web", "at work"), ("hold", "web", "at work")]
    assert _files(left) == before
    assert (tmp_path / "made").exists()
    journal.close()
    assert _outcomes(left) == [("journal", "web", "undone"), ("hold", "web", "at work")]
    hold.unlock(pod, TABLE, records=hold_directory(left))
    assert _is_clean(pod, left)


def test_what_awaits_a_decision_stays_even_when_criu_has_let_go(
    pod: Netns, left: Path, tmp_path: Path
) -> None:
    def leave() -> None:
        create(tmp_path / "made", Journal(journal_path(left, "move-1"))).close()
        hold.lock(pod, "CRIU-1", records=hold_directory(left), owner="move-1", until="decision")

    _in_a_dead_call(leave)
    before = _files(left)
    undecided = [("journal", "move-1", "undecided"), ("hold", "move-1", "undecided")]
    assert _outcomes(left) == undecided
    assert hold.tables(pod) == ("CRIU-1",)
    nft.run(pod, "delete table inet CRIU-1")
    assert _outcomes(left) == undecided
    assert _files(left) == before
    # Its owner decides: the journal first, the record last.
    journal = Journal.load(journal_path(left, "move-1"))
    assert journal is not None
    journal.forget()
    hold.unlock(pod, "CRIU-1", records=hold_directory(left))
    assert recover(left) == ()
    assert (tmp_path / "made").exists()
    Netns(tmp_path / "made", -1).remove()


def test_a_look_changes_nothing(pod: Netns, left: Path, tmp_path: Path) -> None:
    def leave() -> None:
        create(tmp_path / "made", Journal(journal_path(left, "web"))).close()
        hold.lock(pod, TABLE, records=hold_directory(left), owner="web")

    _in_a_dead_call(leave)
    before = _files(left)
    expected = [("journal", "web", "undone"), ("hold", "web", "released")]
    assert _outcomes(left, dry_run=True) == expected
    assert _files(left) == before
    assert hold.tables(pod) == (TABLE,)
    assert _outcomes(left) == expected
    assert _is_clean(pod, left)


def test_a_hold_stays_while_its_owners_journal_cannot_be_undone(pod: Netns, left: Path) -> None:
    path = journal_path(left, "web")
    path.parent.mkdir(parents=True)
    path.write_text('{"schema":99}\n')
    _in_a_dead_call(lambda: hold.lock(pod, TABLE, records=hold_directory(left), owner="web"))
    [journal, held] = recover(left)
    assert (journal.outcome, held.outcome) == ("failed", "failed")
    assert "use the torpor that wrote it" in journal.detail
    assert hold.tables(pod) == (TABLE,)
    path.unlink()
    assert _outcomes(left) == [("hold", "web", "released")]


def test_what_went_by_itself_is_forgotten(pod: Netns, left: Path, tmp_path: Path) -> None:
    records = hold_directory(left)
    gone = Netns.create(tmp_path / "gone")
    _in_a_dead_call(lambda: hold.lock(gone, TABLE, records=records, owner="gone", until="decision"))
    gone.remove()
    _in_a_dead_call(lambda: hold.lock(pod, TABLE, records=records, owner="boot", until="decision"))
    [path] = [path for path in records.iterdir() if f".{pod.inode}." in path.name]
    record = hold.read_record(path)
    assert isinstance(record, hold.Held)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, boot="another")))
    assert sorted(_outcomes(left)) == [("hold", "boot", "gone"), ("hold", "gone", "gone")]
    assert _files(left) == []
    hold.unlock(pod, TABLE)


def test_another_namespace_at_the_same_path_is_not_touched(pod: Netns, left: Path) -> None:
    records = hold_directory(left)
    _in_a_dead_call(lambda: hold.lock(pod, TABLE, records=records, owner="web"))
    [path] = records.iterdir()
    record = hold.read_record(path)
    assert isinstance(record, hold.Held)
    other = msgspec.structs.replace(record, place=Place(path=record.place.path, inode=1))
    path.write_bytes(msgspec.json.encode(other))
    assert _outcomes(left) == [("hold", "web", "gone")]
    assert hold.tables(pod) == (TABLE,)


def test_a_record_that_cannot_be_read_is_told(left: Path) -> None:
    records = hold_directory(left)
    records.mkdir(parents=True)
    (records / "torpor-hold-x.1.json").write_text("{}")
    [found] = recover(left)
    assert found.outcome == "failed"
    assert found.detail.startswith("could not read hold record")
    assert "\n" not in found.detail


def test_whoever_holds_again_after_a_kill_has_the_say(pod: Netns, left: Path) -> None:
    records = hold_directory(left)
    _in_a_dead_call(lambda: hold.lock(pod, TABLE, records=records, owner="web"))
    hold.lock(pod, TABLE, records=records, owner="web", until="decision")
    [path] = records.iterdir()
    record = hold.read_record(path)
    assert isinstance(record, hold.Held)
    assert (record.holder.pid, record.until) == (os.getpid(), "decision")
    hold.unlock(pod, TABLE, records=records)
    assert _is_clean(pod, left)
