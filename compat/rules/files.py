"""Files, places of mounts and locks, looked at on this node."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from compat.rules.case import Case, finding, rule, specified_mounts
from engines import mountinfo
from engines.api import FileNeed, Finding, LockNeed, Needs
from engines.elf import build_id
from engines.mountinfo import Mount
from engines.places import Places as Tree
from engines.places import source


@rule(
    *("files.missing", "files.size", "files.mode", "files.build-id", "files.immutable", "files.in-way"),
    *("files.read-only", "files.busy"),
    about="here",
    source="CRIU compares size and mode and fails; another build of the same size was seen to crash later",
)
def in_volumes(case: Case) -> Iterator[Finding]:
    """Files that tasks have open in what the spec binds in from elsewhere must be as they were. The root file
    system's own are looked at when the image's changes are in it; gVisor's are not unpacked. Restore over the
    same container image and volumes.
    """
    root = case.rootfs_path
    # An empty one is mounted later.
    complete = case.has_kernel and root is not None and root.is_dir() and any(root.iterdir())
    return files(case.needs, case.new, root, complete=complete)


def files(
    needs: Needs, spec: Mapping[str, Any], rootfs_path: Path | None, *, complete: bool
) -> Iterator[Finding]:
    """What tasks have open or mapped must be there, of the same kind, size and mode: CRIU refuses anything
    else. Of programs and libraries the build is compared too, which CRIU does not do: another one crashes
    later. The same goes for working directories, for what is watched and for where unix sockets are bound.
    What was open for writing must not be immutable (chattr +i) nor a program that somebody runs here, a
    program that is restored must not be open for writing, and only a socket may be where one is bound.
    Where there is one, or a file that is open for writing or was deleted, the file system must be writable;
    and a file that had two names, of which an open one was removed, is only in the volume of the dump
    itself. complete: the image's changes are already in the root file system; else only what the spec binds
    in from elsewhere can be looked at.
    """
    place = Places(needs, spec, rootfs_path, complete=complete)
    running = Running()
    for need in needs.files:
        yield from _same_file(need, place, running, content=complete)


class Places:
    """Where paths of an image lie on this node: in what the spec binds in, or in its root file system.

    complete: see `files`.
    """

    def __init__(
        self, needs: Needs, spec: Mapping[str, Any], rootfs_path: Path | None, *, complete: bool
    ) -> None:
        self.specified = specified_mounts(spec, rootfs_path)
        found = {path: source(entry) for path, entry in self.specified.items()}
        self._tree = Tree(
            rootfs_path if complete else None,
            {mount.destination: found.get(mount.destination) for mount in needs.mounts},
        )

    def of(self, path: str, *, proper: bool = False) -> Path | None:
        """Where a path lies, None if the image brings it or nobody knows. proper: beneath another mount.

        As the container sees it: an absolute link leads elsewhere in it, maybe into another mount. Raises
        OSError where there are too many links.
        """
        return self._tree.on_node(self._tree.real(path), beneath=proper)


_IS: Mapping[str, Callable[[int], bool]] = {
    "file": stat.S_ISREG,
    "directory": stat.S_ISDIR,
    "fifo": stat.S_ISFIFO,
    "any": lambda _: True,
}
_KINDS: Mapping[str, str] = {"file": "regular file", "directory": "directory", "fifo": "FIFO"}
_FS_IOC_GETFLAGS, _FS_IMMUTABLE = 0x80086601, 0x10
_USES: Mapping[str, str] = {
    "open": "the image has '{}' open",
    "working-directory": "tasks of the image work in '{}'",
    "watched": "tasks of the image watch '{}'",
    "socket": "the image has a unix socket in '{}'",
    "link": "the image has a file open whose name was removed, and which the dump kept as '{}'",
}


class Running:
    """Which files somebody on this node runs as programs; read once, when somebody asks."""

    @cached_property
    def _programs(self) -> set[tuple[int, int]]:
        found: set[tuple[int, int]] = set()
        for pid in os.listdir("/proc"):  # noqa: PTH208  # there may be very many
            if pid.isdecimal():
                with contextlib.suppress(OSError):  # it has ended, or is the kernel's own
                    program = os.stat(f"/proc/{pid}/exe")  # noqa: PTH116
                    found.add((program.st_dev, program.st_ino))
        return found

    def has(self, status: os.stat_result) -> bool:
        """Whether a file is one of them."""
        return (status.st_dev, status.st_ino) in self._programs


def _same_file(need: FileNeed, place: Places, running: Running, *, content: bool) -> Iterator[Finding]:
    remedy = "restore over the container image and the volumes of the dump"
    if need.kind == "socket":
        yield from _socket_place(need, place)
        return
    if need.use == "deleted":
        yield from _ghost_place(need, place)
        return
    if need.use == "link":
        remedy = "restore over the volume of the dump itself, which no other restore has used yet"
    use = _USES[need.use].format(need.path)
    try:
        path = place.of(need.path)
        if path is None:
            return
        found = path.lstat()
    except (OSError, ValueError) as error:  # or no file can be named so
        why = error.strerror if isinstance(error, OSError) else error
        yield finding("files.missing", "refuse", f"{use}, which cannot be found here: {why}", remedy)
        return
    if not _IS[need.kind](found.st_mode):
        yield finding("files.missing", "refuse", f"{use}, which is no {_KINDS[need.kind]} here", remedy)
    elif need.size_bytes not in {-1, found.st_size}:
        yield finding(
            "files.size",
            "refuse",
            f"{use} with {need.size_bytes} bytes, here it has {found.st_size}",
            remedy,
        )
    elif need.mode not in {-1, stat.S_IMODE(found.st_mode)}:
        yield finding(
            "files.mode",
            "refuse",
            f"{use} with mode {need.mode:04o}, here it is {stat.S_IMODE(found.st_mode):04o}",
            remedy,
        )
    elif need.writable and _is_immutable(path):
        yield finding(
            "files.immutable",
            "refuse",
            f"{use} for writing, and here it is immutable",
            f"let it be written to (chattr -i '{path}')",
        )
    elif need.writable and _is_read_only(path):
        yield _read_only(f"{use} for writing", path)
    elif need.writable and stat.S_ISREG(found.st_mode) and running.has(found):
        yield finding(
            "files.busy",
            "refuse",
            f"{use} for writing, and here it is a program that somebody runs",
            "end that program, or give the container a volume of its own",
        )
    elif need.executed and not _may_run(path):
        yield finding(
            "files.busy",
            "refuse",
            f"tasks of the image run '{need.path}', which somebody here has open for writing",
            "end the other one, or give the container a volume of its own",
        )
    elif content and need.build_id and not _may_be_build(need.build_id, path):
        yield finding(
            "files.build-id",
            "refuse",
            f"the image has '{need.path}' mapped, and here that is another build of the same size",
            remedy,
        )


def _socket_place(need: FileNeed, place: Places) -> Iterator[Finding]:
    with contextlib.suppress(OSError, ValueError):  # its directory is missing: told
        path = place.of(need.path)
        if path is None:
            return
        if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
            yield finding(
                "files.in-way",
                "refuse",
                f"the image has a unix socket bound to '{need.path}', where something else is here",
                f"remove '{path}'",
            )
        elif _is_read_only(path):
            yield _read_only(f"the image has a unix socket bound to '{need.path}'", path)


def _ghost_place(need: FileNeed, place: Places) -> Iterator[Finding]:
    """CRIU makes a deleted file again for a moment, and directories above it that are missing."""
    with contextlib.suppress(OSError, ValueError):  # too many links, or no name: then nobody knows
        path = place.of(need.path)
        above = next((folder for folder in path.parents if os.path.lexists(folder)), None) if path else None
        use = f"the image has the deleted file '{need.path}' open"
        if above and not above.is_dir():
            message = f"{use}, and '{above}' is no directory here"
            yield finding("files.in-way", "refuse", message, f"remove '{above}'")
        elif above and _is_read_only(above):
            yield _read_only(use, above)


def _is_read_only(path: Path) -> bool:
    """Whether the file system of a path, or of the directory where it would be, takes no writes. (A mount
    that alone is read-only does not matter: the restored one is as it was.)
    """
    place = path if os.path.lexists(path) else path.parent
    with contextlib.suppress(OSError):
        if os.statvfs(place).f_flag & os.ST_RDONLY:
            mount = _mount_of(place)
            return mount is not None and mount.super_options[0] == "ro"
    return False


def _mount_of(path: Path) -> Mount | None:
    """The mount that something lies on, None if it is none of this namespace. Raises OSError."""
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        told = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    finally:
        os.close(descriptor)
    number = told.partition("mnt_id:")[2].split()[0]
    return next((mount for mount in mountinfo.mounts() if mount.id == number), None)


def _read_only(use: str, path: Path) -> Finding:
    return finding(
        "files.read-only",
        "refuse",
        f"{use}, and here that file system is read-only",
        f"mount what '{path}' lies on so that it can be written to",
    )


def _may_run(path: Path) -> bool:
    """Whether nobody has a program open for writing, as far as that can be known: a lease tells."""
    try:
        return _lease(path, exclusive=False)
    except OSError:
        return True


def _is_immutable(path: Path) -> bool:
    """Whether nobody may write to a file, whatever its mode says."""
    with contextlib.suppress(OSError):  # not every file system knows that
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            flags = fcntl.ioctl(descriptor, _FS_IOC_GETFLAGS, bytes(8))
        finally:
            os.close(descriptor)
        return bool(flags[0] & _FS_IMMUTABLE)
    return False


def _may_be_build(wanted: str, path: Path) -> bool:
    """Whether a program or library is this very build, or does not say which it is."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = build_id(descriptor)
        finally:
            os.close(descriptor)
        return not found or found == wanted
    return True


# --- places of mounts ----------------------------------------------------------------------------------


@rule("mounts.place", about="here", source="measured: mnt-v2: Can't stat mountpoint; runc makes only its own")
def places_in_volumes(case: Case) -> Iterator[Finding]:
    """A mount that the program itself has made, or that the runtime laid over a path, needs something to be
    mounted on. (In the root file system that is looked at when the image's changes are in it.) Restore over
    the same container image and volumes.
    """
    return places(case.needs, case.new, case.rootfs_path, complete=False)


def places(
    needs: Needs, spec: Mapping[str, Any], rootfs_path: Path | None, *, complete: bool
) -> Iterator[Finding]:
    """See `places_in_volumes`. The runtime makes the places of what the spec mounts."""
    place = Places(needs, spec, rootfs_path, complete=complete)
    for mount in needs.mounts:
        if mount.destination == "/" or mount.destination in place.specified:
            continue
        if _is_missing(place, mount.destination):
            yield finding(
                "mounts.place",
                "refuse",
                f"the image has a {mount.fstype} mounted on '{mount.destination}', which is not there",
                "restore over the container image and the volumes of the dump",
            )


def _is_missing(place: Places, destination: str) -> bool:
    try:
        path = place.of(destination, proper=True)
    except OSError:
        return True
    return path is not None and not os.path.lexists(path)


# --- locks ---------------------------------------------------------------------------------------------


@rule("files.locked", about="here", source="measured: CRIU waits for the lock until its deadline")
def locked(case: Case) -> Iterator[Finding]:
    """A lock that a task had on a file of a volume is taken again, and whoever has it meanwhile is waited
    for; a lease is not given on what another has open for writing. End the other one, or give the container a
    volume of its own.
    """
    if not case.needs.locks or case.has_kernel:
        return
    place = Places(case.needs, case.new, case.rootfs_path, complete=False)
    held: list[_Held] | None = None
    for need in case.needs.locks:
        with contextlib.suppress(OSError, ValueError):  # files.missing says so
            path = place.of(need.path)
            if path is None:
                continue
            status = path.lstat()  # as `_lease`: a link is not what the task had
            held = _held() if held is None else held
            mount, own = _mount_of(path), f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
            device = mount.device if mount else own
            major, minor = map(int, device.split(":"))
            bars = (lock for lock in held if lock.bars(need, f"{major:02x}:{minor:02x}:{status.st_ino}"))
            if other := next((lock for lock in bars if device == own or _may_be_on(lock, status)), None):
                yield finding(
                    "files.locked",
                    "refuse",
                    f"the image has a lock on '{need.path}', which process {other.pid} has on this node",
                    "end the other one, or give the container a volume of its own",
                )
            elif (
                need.kind == "lease"
                and stat.S_ISREG(status.st_mode)
                and not _lease(path, exclusive=need.exclusive)
            ):
                yield finding(
                    "files.locked",
                    "refuse",
                    f"the image has a lease on '{need.path}', which another process has open on this node",
                    "end the other one, or give the container a volume of its own",
                )


def _may_be_on(lock: _Held, status: os.stat_result) -> bool:
    """Whether whoever has a lock has this very file open, or cannot be asked. /proc/locks names a whole file
    system, and on some (btrfs, with its snapshots) many files have one number.
    """
    try:
        opened = list(Path(f"/proc/{lock.pid}/fd").iterdir())
    except OSError:
        return True
    for descriptor in opened:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if os.path.samestat(descriptor.stat(), status):
                return True
    return False


def _lease(path: Path, *, exclusive: bool) -> bool:
    """Whether the kernel gives a lease on a file: it is taken for a moment. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno not in {errno.EAGAIN, errno.EBUSY}
    finally:
        os.close(descriptor)
    return True


@dataclass(frozen=True, kw_only=True)
class _Held:
    """A line of /proc/locks."""

    kind: str
    exclusive: bool
    pid: str
    file: str
    first: int
    last: int | None

    def bars(self, need: LockNeed, file: str) -> bool:
        """Whether nobody gets the other lock as long as there is this one."""
        if self.file != file or self.kind != need.kind or not (self.exclusive or need.exclusive):
            return False
        before = need.last is not None and need.last < self.first
        return not (before or (self.last is not None and self.last < need.first))


def _held() -> list[_Held]:
    """The locks of this node. Raises OSError."""
    found: list[_Held] = []
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()[1:]
        kinds = {"FLOCK": "flock", "POSIX": "range", "OFDLCK": "range", "LEASE": "lease"}
        if words[0] in kinds:  # one that only waits begins with an arrow
            found.append(
                _Held(
                    kind=kinds[words[0]],
                    exclusive=words[2] == "WRITE",
                    pid=words[3],
                    file=words[4],
                    first=int(words[5]),
                    last=None if words[6] == "EOF" else int(words[6]),
                )
            )
    return found
