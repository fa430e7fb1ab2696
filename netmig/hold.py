"""Silence for a namespace: nobody answers for its address while nobody runs with it.

A hold is one nftables table that drops whatever comes in or goes out, loopback as well: the kernel of a
dumped process would go on acknowledging data that the restored one never sees. CRIU's own packets pass (by
their mark), and so does the look for a neighbour: the address stays visible to those who ask whether somebody
has it. ARP is no business of an inet table.

`criu dump` leaves such a table of its own in the source's namespace, named after its run, and `criu restore`
deletes the table of that name at the one right moment: the sockets are rebuilt, and about to leave repair
mode. So a table of that name, made on the target beforehand, lets it be plugged in and announced early.

What is held is written to a record on disk before the table is made, so that `netmig.recover` finds it after
whoever held it was killed.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from netmig import nft
from netmig.errors import NetworkError
from netmig.places import Place, place_of

if TYPE_CHECKING:
    from netmig.ns import Netns

PREFIX = "torpor-hold-"
CRIU_PREFIX = "CRIU-"

_CRIU_MARK = 0xC114  # SOCCR_MARK
_MAX_NAME = 128  # the kernel takes twice as much
_MAX_OWNER = _MAX_NAME - len(PREFIX)
_NOT_PLAIN = re.compile("[^A-Za-z0-9-]")
_BEFORE_ALL = -500  # before conntrack and everybody's own rules

Until = Literal["call", "decision"]
"""How long a hold is meant to last: as long as the process that placed it, so that `recover` may release it
after that; or until somebody decides, as in a migration whose two sides must not both go on."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that placed a hold. start: field 22 of /proc/PID/stat: a pid may be used again."""

    pid: int
    start: int


class Held(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of one hold.

    boot: the kernel's boot id; no hold outlives it. owner: a container's id, a migration's name.
    """

    schema: Literal[1]
    table: str
    place: Place
    boot: str
    holder: Holder
    until: Until
    owner: str
    since: float


def table_name(owner: str) -> str:
    """The name of our own table for an owner: two owners in one namespace do not meet."""
    plain = _NOT_PLAIN.sub("-", owner)
    if plain != owner or len(plain) > _MAX_OWNER:
        mark = zlib.crc32(owner.encode(errors="surrogatepass"))
        plain = f"{plain[: _MAX_OWNER - 9]}-{mark:08x}"
    return PREFIX + plain


def lock(
    netns: Netns,
    table: str,
    *,
    records: Path | None = None,
    until: Until = "call",
    owner: str = "",
) -> None:
    """Let nothing into the namespace or out of it. Again does no harm.

    table: `table_name(...)`, or the name of CRIU's table that is to be there before CRIU looks for it.
    records: directory for the record that makes the hold recoverable; made if absent. Raises NetworkError.
    """
    _check_name(table)
    record: Path | None = None
    if records is not None:
        record = _record_path(records, netns, table)
        found = read_record(record) if record.exists() else None
        if isinstance(found, Held) and is_alive(found.holder) and table in tables(netns):
            return  # whoever holds it has the say on its release
        _write_record(record, netns, table, until, owner)
    try:
        nft.run(netns, _rules(table))
    except NetworkError:
        if table in tables(netns):
            return  # held already; all of a table is made at once, so it is whole
        if record is not None:
            record.unlink(missing_ok=True)
        raise


def unlock(netns: Netns, table: str, *, records: Path | None = None) -> bool:
    """Let traffic pass again. Returns whether the table was there; its record goes in any case."""
    _check_name(table)
    was_there = table in tables(netns)
    if was_there:
        # Added again first: it may go by itself (a restore deletes it) between the look and this.
        nft.run(netns, f"add table inet {table}\ndelete table inet {table}\n")
    if records is not None:
        _record_path(records, netns, table).unlink(missing_ok=True)
    return was_there


def tables(netns: Netns) -> tuple[str, ...]:
    """Names of the tables that hold the namespace: ours, and those that CRIU left."""
    found = (entry.get("table") for entry in nft.run(netns, "list tables"))
    return tuple(
        str(table["name"])
        for table in found
        if table and table["family"] == "inet" and str(table["name"]).startswith((PREFIX, CRIU_PREFIX))
    )


def read_record(path: Path) -> Held | str | None:
    """A record; a sentence if it cannot be read, None if it is gone."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Held)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        return f"could not read hold record '{path}': {error}; look at the namespace, and remove the file"


def is_alive(holder: Holder) -> bool:
    """Does the process that placed a hold still run?"""
    return process_start(holder.pid) == holder.start


def boot_id() -> str:
    """The kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _rules(table: str) -> str:
    body = f"""policy drop
  meta mark {_CRIU_MARK:#x} accept
  icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept"""
    # `create` refuses a table that is there: its rules are never doubled, nor taken away for a moment.
    return f"""create table inet {table}
table inet {table} {{
 chain in {{
  type filter hook prerouting priority {_BEFORE_ALL}; {body}
 }}
 chain out {{
  type filter hook output priority {_BEFORE_ALL}; {body}
 }}
}}
"""


def _check_name(table: str) -> None:
    plain = all(c.isascii() and (c.isalnum() or c in "-_") for c in table)
    if not (plain and table.startswith((PREFIX, CRIU_PREFIX)) and len(table) <= _MAX_NAME):
        raise NetworkError(
            f"could not hold a namespace with table '{table}': it must begin with {PREFIX} or {CRIU_PREFIX}; "
            f"use at most {_MAX_NAME} letters, digits and dashes"
        )


def _record_path(records: Path, netns: Netns, table: str) -> Path:
    return records / f"{table}.{netns.inode}.json"


def _write_record(path: Path, netns: Netns, table: str, until: Until, owner: str) -> None:
    held = Held(
        schema=1,
        table=table,
        place=place_of(netns),
        boot=boot_id(),
        holder=Holder(pid=os.getpid(), start=process_start(os.getpid()) or 0),
        until=until,
        owner=owner,
        since=time.time(),
    )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}.new")
    try:
        with new.open("wb") as file:
            file.write(msgspec.json.encode(held))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def process_start(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks since its boot; None if it does not run any more."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[19]) if fields[0] not in "ZX" else None
    return None
