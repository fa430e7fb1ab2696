"""What calls that were killed left of the network, found and taken back.

Below one directory lie the journals of what was changed and the records of what is held:

    journal/OWNER.jsonl    netmig.journal
    hold/TABLE.INODE.json  netmig.hold

A journal whose call still works is locked, and a record names its process: both are left alone. Whatever is
to last until somebody decides (the two sides of a migration) is told, and not touched, nor is its owner's
journal: the owner settles the journal first, and takes the record away last (`hold.unlock`), even where CRIU
has deleted the table. Of the rest the changes are undone first and the holds released last, so that nobody is
answered out of a namespace that is half way back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from netmig import hold
from netmig.errors import NetworkError
from netmig.places import open_place

Outcome = Literal["undone", "released", "at work", "undecided", "gone", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One thing that a call left.

    outcome: what was done about it: `undone` and `released` by this call; `at work`: its process lives;
    `undecided`: only its owner may decide; `gone`: it went by itself, or with its namespace or the machine.
    detail: a sentence for people.
    """

    kind: Literal["journal", "hold"]
    path: Path
    owner: str
    outcome: Outcome
    detail: str


def hold_directory(directory: Path) -> Path:
    """Where the records of holds lie: `records` of `hold.lock`."""
    return directory / "hold"


def journal_path(directory: Path, owner: str) -> Path:
    """Where the journal of an owner (a container's id, a migration's name) lies."""
    return directory / "journal" / f"{owner}.jsonl"


def recover(directory: Path, *, dry_run: bool = False) -> tuple[Found, ...]:
    """Undo and release what dead calls left below a directory. Can be cut off anywhere, and done again.

    dry_run: only look; `undone` and `released` then say what would be. What fails is an outcome, no error.
    """
    holds = list(_holds(directory))
    undecided = {
        record.owner for _, record in holds if isinstance(record, hold.Held) and _awaits_decision(record)
    }
    found: list[Found] = []
    failed: set[str] = set()
    for path in sorted((directory / "journal").glob("*.jsonl")):
        one = _journal(path, undecided=path.stem in undecided, dry_run=dry_run)
        found.append(one)
        if one.outcome in {"failed", "at work"}:
            failed.add(one.owner)
    found += [_hold(path, record, failed, dry_run=dry_run) for path, record in holds]
    return tuple(found)


def _holds(directory: Path) -> Iterator[tuple[Path, hold.Held | str]]:
    where = hold_directory(directory)
    for draft in where.glob("*.new"):
        pid = draft.suffixes[-2].removeprefix(".")
        if not pid.isdigit() or hold.process_start(int(pid)) is None:
            draft.unlink(missing_ok=True)
    for path in sorted(where.glob("*.json")):
        record = hold.read_record(path)
        if record is not None:
            yield path, record


def _journal(path: Path, *, undecided: bool, dry_run: bool) -> Found:
    def say(outcome: Outcome, detail: str) -> Found:
        return Found(kind="journal", path=path, owner=path.stem, outcome=outcome, detail=detail)

    if undecided:
        return say("undecided", "its changes stay until its owner decides")
    # pyroute2 takes 130 ms to load: only where there is something to undo.
    from netmig.journal import Journal
    from netmig.undo import undo_left

    try:
        if dry_run:
            journal = Journal.load(path)
            n_steps = None if journal is None else len(journal.steps)
            if journal is not None:
                journal.close()
        else:
            steps = undo_left(path)
            n_steps = None if steps is None else len(steps)
    except NetworkError as error:
        return say("failed", str(error))
    if n_steps is None:
        return say("at work", "its call is at work")
    return say("undone", f"{n_steps} step{'' if n_steps == 1 else 's'} taken back")


def _hold(path: Path, record: hold.Held | str, failed: set[str], *, dry_run: bool) -> Found:
    def say(outcome: Outcome, detail: str) -> Found:
        owner = record.owner if isinstance(record, hold.Held) else ""
        return Found(kind="hold", path=path, owner=owner, outcome=outcome, detail=detail)

    if isinstance(record, str):
        return say("failed", record)
    where = f"table {record.table} in {record.place.path}"
    if record.boot != hold.boot_id():
        return _drop(say("gone", f"{where} went with an earlier boot"), dry_run=dry_run)
    if hold.is_alive(record.holder):
        return say("at work", f"process {record.holder.pid} holds {where}")
    try:
        netns = open_place(record.place)
        if netns is None:
            return _drop(say("gone", f"{where} went with its namespace"), dry_run=dry_run)
        with netns:
            if record.until == "decision":
                return say("undecided", f"{where} stays until its owner decides")
            if record.table not in hold.tables(netns):
                return _drop(say("gone", f"{where} was released already"), dry_run=dry_run)
            if record.owner in failed:
                return say("failed", f"{where} stays, since the journal of its owner is not undone")
            if not dry_run:
                hold.unlock(netns, record.table)
    except NetworkError as error:
        return say("failed", str(error))
    return _drop(say("released", f"{where} is released: traffic passes again"), dry_run=dry_run)


def _awaits_decision(record: hold.Held) -> bool:
    return record.until == "decision" and record.boot == hold.boot_id()


def _drop(found: Found, *, dry_run: bool) -> Found:
    if not dry_run:
        found.path.unlink(missing_ok=True)
    return found
