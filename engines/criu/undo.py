"""Undoes a dump or a restore that died half-way, from its journal.

Three callers: the engine after a failure or a deadline, the guardian after the engine's own death, and
`CriuEngine.undo` when both are gone. Every step is safe to repeat. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engines.criu import cgroups, repair
from engines.criu.journal import Journal, mount_points
from engines.criu.wire import lock_table, table_of_run
from engines.guard import remove_partial
from engines.processes import alive

_FREEZE_S = 0.5
_GONE_S = 10.0
_GRACE_S = 1.0
_ENDING_S = 5.0  # for CRIU and the runtime to end the source as they were told to
_TOOL_S = 10.0
_MNT_DETACH = 2
_LOG_BYTES = 1 << 20
_TEMPORARY = "/tmp"  # noqa: S108 - CRIU's own choice
_YARD = rf"{_TEMPORARY}/\.criu\.[a-z]+\.\w{{6}}"
_CHECK = ".criu.move_mount_set_group.*"
_libc = ctypes.CDLL(None, use_errno=True)

State = Literal["running", "paused", "stopped"]


@dataclass(kw_only=True)
class Outcome:
    """What an undo came to. problems: what could not be undone, in words.

    completed: a dump that had been allowed to end its source was carried through: the image is complete and
    stays, the container is gone. held: the caller has yet to decide, and nothing was touched.
    """

    state: State
    completed: bool = False
    held: bool = False
    problems: list[str] = field(default_factory=list[str])


def undo_pending(state_path: Path, token: str = "") -> Outcome | None:
    """Undo the call whose journal stands in a state directory; None if there is none.

    token: undo only the call that has it.
    """
    if not state_path.is_dir():
        return None
    with Journal.undoing(state_path):
        journal = Journal.read(state_path)
        if journal is None or token not in ("", journal.token):
            return None
        return _settled(journal)


def _settled(journal: Journal) -> Outcome:
    outcome = undo(journal)
    if not outcome.held:
        journal.remove()
    return outcome


def undo(journal: Journal) -> Outcome:
    """Undo one call, whose processes may still live. The caller holds `Journal.undoing`."""
    if journal.operation == "restore":
        return _undo_restore(journal)
    return _undo_dump(journal)


def undo_own(journal: Journal) -> Outcome:
    """Undo a call of this process. If its guardian or a later call has done so, only say what came of it."""
    with Journal.undoing(Path(journal.state)):
        if journal.stands():
            return _settled(journal)
    state = _state(journal)
    return Outcome(state=state, completed=journal.committed and state == "stopped")


def _state(journal: Journal) -> State:
    if alive(journal.init, journal.init_start) and not _doomed(journal.init):
        return "paused" if journal.was_frozen else "running"
    return "stopped"


# --- processes -----------------------------------------------------------------------------------------


def call_processes(journal: Journal) -> list[int]:
    """The processes of a call: the runtime, CRIU, and what they started.

    The runtime is known by its environment, CRIU (which writes its title over it) by its open log, and the
    rest by being in a session with one of them: the engine gives every call a session of its own.
    """
    mark = f"CRIU_CONFIG_FILE={journal.config_path}".encode()
    sessions: dict[int, int] = {}
    marked: set[int] = set()
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            row = Path("/proc", name, "stat").read_text(errors="replace")
            comm, _, rest = row.partition("(")[2].rpartition(")")
            state, _, _, session = rest.split()[:4]
            if state in "ZX":
                continue
            sessions[int(name)] = int(session)
            if mark in Path("/proc", name, "environ").read_bytes().split(b"\0") or (
                comm == "criu" and _has_open(name, journal.work_path)
            ):
                marked.add(int(name))
    theirs = {sessions[pid] for pid in marked} - {0, os.getsid(0)}
    return sorted(marked | {pid for pid, session in sessions.items() if session in theirs})


def has_criu(journal: Journal) -> bool:
    """Whether CRIU itself is there: a child of the runtime. Children that outlive it do not count."""
    pids = call_processes(journal)
    runtimes = {pid for pid in pids if _comm(pid) != "criu"}
    return any(_comm(pid) == "criu" and _parent(pid) in runtimes for pid in pids)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _comm(pid: int | str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def _has_open(pid: str, directory: Path) -> bool:
    """Whether a process has a file of a directory open."""
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if Path(entry.path).readlink().parent == directory:
                return True
    return False


def end_call(journal: Journal, *, grace_s: float, leave: bool = False) -> bool:
    """End all processes of a call and wait until they are gone; False if one would not go.

    The runtime is killed at once, CRIU only after a grace: without its runtime, or with a stage refused, it
    undoes a dump itself, and only CRIU can give a task back the registers that it has just borrowed. It is
    killed with the container frozen, so that no task meets a socket in repair mode. leave: the runtime has
    the same grace, to end the source as it was told to.

    The tasks of a restore are killed with it: the cgroup that CRIU shares with them may be frozen, must be
    thawed for CRIU to die, and no task may run then.
    """
    restore = journal.operation == "restore"
    freezer = None if restore else cgroups.freezer(journal.groups)
    own = cgroups.strictly_own(journal.groups) if restore else {}
    started = time.monotonic()
    while pids := call_processes(journal):
        passed_s = time.monotonic() - started
        if passed_s >= grace_s and freezer:
            freezer.freeze(timeout_s=_FREEZE_S)
            freezer = None
        for pid in pids:
            if passed_s >= grace_s or not (leave or _is_criu(pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _kill_tasks(own)
        if passed_s > grace_s + _GONE_S:
            return False
        time.sleep(0.005)
    return True


def _is_criu(pid: int) -> bool:
    """Whether a process is CRIU, or was started by it (a script, tar)."""
    return "criu" in (_comm(pid), _comm(_parent(pid)))


def _doomed(pid: int) -> bool:
    """Whether a process is gone, a zombie, or has a SIGKILL waiting for it."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return True
    rows = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    pending = int(rows["SigPnd"], 16) | int(rows["ShdPnd"], 16)
    return rows["State"][0] in "ZX" or bool(pending & 1 << (signal.SIGKILL - 1))


def _kill_tasks(own: cgroups.Groups) -> bool:
    """Send SIGKILL to every task of these cgroups; whether there was one."""
    pids = cgroups.tasks(own)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # On v1 a frozen task dies only when it is thawed; the signal is there first, so nothing runs.
    freezer = cgroups.freezer(own)
    if pids and freezer:
        freezer.thaw()
    return bool(pids)


def _end_tasks(groups: cgroups.Groups) -> bool:
    """Kill every task of a container's own cgroups; False if one would not go."""
    own = cgroups.strictly_own(groups)
    deadline = time.monotonic() + _GONE_S
    while _kill_tasks(own):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


# --- a dump --------------------------------------------------------------------------------------------


def _undo_dump(journal: Journal) -> Outcome:
    outcome = Outcome(state="stopped")
    freezer = cgroups.freezer(journal.groups)
    verdict = journal.verdict()
    if verdict == "hold":
        if freezer and not has_criu(journal):
            freezer.freeze(timeout_s=_FREEZE_S)
        return Outcome(state="paused", held=True)
    told = verdict == "commit"
    if not end_call(journal, grace_s=_ENDING_S if told else _GRACE_S, leave=told):
        outcome.problems.append("processes of the dump do not die")
    if freezer and alive(journal.init, journal.init_start):
        freezer.freeze(timeout_s=_FREEZE_S)
    if told or (journal.committed and any(_doomed(pid) for pid in journal.tasks)):
        # CRIU had begun to end the source. The image is complete: half a container helps nobody.
        if not _end_tasks(journal.groups):
            outcome.problems.append("tasks of the container do not die")
        delete_container(journal, outcome)
        release_network(journal, outcome)
        outcome.completed = True
        return outcome
    # By its path where it has one: the container may die of what CRIU's death did to it, its pod lives on.
    # A namespace without a path dies with it, and what has its pid then is another's.
    if journal.netns or alive(journal.init, journal.init_start):
        _unlock(journal, journal.netns or f"/proc/{journal.init}/ns/net", outcome)
    for pid in cgroups.tasks(journal.groups):
        repair.end_repair(pid)
    _remove_link_remaps(journal)
    if freezer and not journal.was_frozen:
        freezer.thaw()
    remove_partial(Path(journal.image), made=journal.image_made)
    _remove_yards(journal, "dump.log")
    outcome.state = _state(journal)
    return outcome


def _unlock(journal: Journal, netns: str, outcome: Outcome) -> None:
    for name in _tables(journal.work_path / "dump.log", "CRIU run id"):
        _delete_table(journal, netns, name, outcome)


def release_network(journal: Journal, outcome: Outcome) -> None:
    """Remove the lock that a dump left in a namespace that outlives its container, if that was asked for."""
    if journal.release_network and journal.netns:
        here = Outcome(state=outcome.state)
        _unlock(journal, journal.netns, here)
        outcome.problems += [
            f"the network of {journal.netns} may still be locked ({problem}); delete CRIU's table in it"
            for problem in dict.fromkeys(here.problems)
        ]


def _remove_link_remaps(journal: Journal) -> None:
    """Remove the names that CRIU gave to unlinked files of the container, as its log tells them."""
    names = set(re.findall(r"(/?[^\s'\"`]*link_remap\.\d+)", _tail(journal.work_path / "dump.log")))
    with contextlib.suppress(OSError):
        root = os.open(f"/proc/{journal.init}/root", os.O_PATH | os.O_DIRECTORY)
        try:
            # Asked after the opening: the pid may be another's by now, and this is another's root.
            for name in names if alive(journal.init, journal.init_start) else ():
                with contextlib.suppress(OSError):
                    _unlink_inside(root, name)
        finally:
            os.close(root)


def _unlink_inside(root: int, name: str) -> None:
    """Unlink a file under a container's root without following any link of the container's."""
    *parents, last = [part for part in name.split("/") if part not in ("", ".", "..")]
    directory = os.open(".", os.O_PATH | os.O_DIRECTORY, dir_fd=root)
    try:
        for part in parents:
            below = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = below
        os.unlink(last, dir_fd=directory)
    finally:
        os.close(directory)


# --- a restore -----------------------------------------------------------------------------------------


def _undo_restore(journal: Journal) -> Outcome:
    outcome = Outcome(state="stopped")
    if not end_call(journal, grace_s=0):
        outcome.problems.append("processes of the restore do not die")
    if journal.groups and not _end_tasks(journal.groups):
        outcome.problems.append("restored tasks do not die")
    # Before the runtime deletes its state: CRIU's view of the rootfs is mounted in it.
    state = str(Path(journal.root, journal.container_id))
    for point in sorted(mount_points(state, journal.rootfs), key=len, reverse=True):
        if point not in journal.mounts:
            _libc.umount2(os.fsencode(point), _MNT_DETACH)
    if mount_points(state):
        outcome.problems.append(f"{state} is still mounted")
    else:
        delete_container(journal, outcome)
        shutil.rmtree(state, ignore_errors=True)
    cgroups.remove([*cgroups.strictly_own(journal.groups).values(), *journal.new_groups])
    if journal.netns:
        names = set(_tables(journal.work_path / "restore.log", "CRIU run id"))
        recorded = lock_table(Path(journal.image))
        for name in sorted(names | ({recorded} if recorded else set())):
            _delete_table(journal, journal.netns, name, outcome)
    _remove_yards(journal, "restore.log")
    return outcome


# --- what both leave -----------------------------------------------------------------------------------


def delete_container(journal: Journal, outcome: Outcome) -> None:
    """`delete --force` of the real runtime, which says nothing if there is no such container."""
    argv = [journal.runtime, *journal.runtime_args, "--root", journal.root]
    argv += ["delete", "--force", journal.container_id]
    _run(argv, journal, outcome)


def _run(argv: list[str], journal: Journal, outcome: Outcome | None) -> str:
    """Run a tool; its output, empty if it failed, which is noted in the outcome."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TOOL_S,
            check=False,
            env={"PATH": journal.search_path},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        if outcome:
            outcome.problems.append(f"{Path(argv[0]).name}: {error}")
        return ""
    if done.returncode and outcome:
        outcome.problems.append(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout if done.returncode == 0 else ""


def _tables(log_path: Path, label: str) -> list[str]:
    """Names of the nftables tables that the runs in a log may have made, by their run ids."""
    return [table_of_run(run) for run in re.findall(rf"{label} = ([0-9a-f-]{{36}})", _head(log_path))]


def _delete_table(journal: Journal, netns: str, name: str, outcome: Outcome) -> None:
    if not Path(netns).exists():
        return
    enter = ["nsenter", f"--net={netns}", "nft"]
    listed = _run([*enter, "list", "tables", "inet"], journal, outcome)
    if name in listed.split():
        _run([*enter, "delete", "table", "inet", name], journal, outcome)


def _remove_yards(journal: Journal, log_name: str) -> None:
    """Remove CRIU's temporary directories: those that its log tells, and what its start-up checks left.

    The latter are in no log. They are empty, made during the call, and nobody's while no CRIU runs. Others
    may be in use by a CRIU of another pid namespace, which we do not see: with the directory would go what it
    has mounted there.
    """
    for name in set(re.findall(_YARD, _head(journal.work_path / log_name))):
        for point in sorted(mount_points(name), key=len, reverse=True):
            _libc.umount2(os.fsencode(point), _MNT_DETACH)
        with contextlib.suppress(OSError):
            Path(name).rmdir()
    # A CRIU that starts after we have looked makes younger ones.
    looked = time.time()
    if any(_comm(name) == "criu" for name in os.listdir("/proc") if name.isdigit()):  # noqa: PTH208
        return
    for path in Path(_TEMPORARY).glob(_CHECK):
        with contextlib.suppress(OSError):
            if journal.began <= path.lstat().st_mtime <= looked:
                path.rmdir()


def _head(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
