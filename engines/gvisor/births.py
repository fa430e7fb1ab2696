"""Which processes of a sandbox come from exec sessions that have ended.

runsc kills them when it restores, and cannot restore at all if one still holds its session's streams. It does
not tell where a process comes from, so that is found out: an exec session has a session (setsid) of its own,
streams of its own, and begins no earlier than the first `exec` of its container. A process that has left
its parent's session and was started later than that could have come from one, and counts as if it had.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_HOST_FILE = re.compile(r"host:\[(\d+)\]")
_DELETED = " (deleted)"
_STREAMS = 3  # that runsc numbers for each container that it starts


@dataclass(frozen=True, kw_only=True)
class Birth:
    """A process, by its ids in the sandbox. parent: 0 for a container's first process.

    session: as of getsid(2). born_ns: since the epoch. host_files: the numbers that runsc gives the streams
    of the node that it holds. holds: paths in the sandbox, each with how: "open", "mapped", "cwd", or
    "deleted" for what is open and has no name any more. polls: it has an epoll set.
    """

    pid: int
    parent: int
    session: int
    born_ns: int
    host_files: frozenset[int]
    name: str
    holds: frozenset[tuple[str, str]] = frozenset()
    polls: bool = False


def parse(text: str) -> tuple[Birth, ...]:
    """The processes in what `runsc trace procfs` says. Raises ValueError, KeyError."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return tuple(_birth(json.loads(line)) for line in lines)


def _birth(document: Mapping[str, Any]) -> Birth:
    status = document["status"]
    paths = [str(entry.get("path", "")) for entry in document.get("fdlist") or ()]
    return Birth(
        pid=int(status["pid"]),
        parent=int(status.get("ppid", 0)),
        session=int(document["stat"]["sid"]),
        born_ns=int(document["clone_ts"]),
        host_files=frozenset(int(match[1]) for path in paths if (match := _HOST_FILE.fullmatch(path))),
        name=str(status.get("comm", "")),
        holds=frozenset((path, how) for path, how in _holds(document, paths) if path.startswith("/")),
        polls=any("[eventpoll]" in path for path in paths if not path.startswith("/")),
    )


def _holds(document: Mapping[str, Any], opened: Iterable[str]) -> Iterator[tuple[str, str]]:
    found = [(str(document.get("cwd", "")), "cwd"), (str(document.get("exe", "")), "mapped")]
    found += [(str(entry.get("pathname") or ""), "mapped") for entry in document.get("maps") or ()]
    found += [(path, "open") for path in opened]
    for path, how in found:
        named = path.removesuffix(_DELETED)
        if named == path:
            yield path, how
        elif how == "open":
            yield named, "deleted"


def from_exec(births: Sequence[Birth], first_exec_ns: int | None) -> Birth | None:
    """A process that comes from an exec session, or may; None if there is none.

    first_exec_ns: when the first session began, since the epoch; None if none is known of.
    """
    by_pid = {birth.pid: birth for birth in births}
    firsts = {birth.pid for birth in births if birth.parent == 0}
    sessions = {by_pid[pid].session for pid in firsts}
    tops = {birth.pid: _top(birth, by_pid, firsts) for birth in births if birth.pid not in firsts}
    doubtful = {pid: top for pid, top in tops.items() if top.session not in sessions}
    known = _host_files(birth for birth in births if birth.pid not in doubtful)
    for pid, top in sorted(doubtful.items()):
        foreign = {number for number in by_pid[pid].host_files - known if number > _STREAMS * len(firsts)}
        if foreign or (first_exec_ns is not None and top.born_ns >= first_exec_ns):
            return by_pid[pid]
    return None


def _top(birth: Birth, by_pid: Mapping[int, Birth], firsts: Collection[int]) -> Birth:
    """The ancestor, or itself, whose parent is a container's first process: that adopts orphans."""
    while birth.parent not in firsts and birth.parent in by_pid:
        birth = by_pid[birth.parent]
    return birth


def _host_files(births: Iterable[Birth]) -> frozenset[int]:
    return frozenset(number for birth in births for number in birth.host_files)
