"""Open files, devices, sockets and terminals of a CRIU image (files.img and what belongs to it)."""

from __future__ import annotations

import gzip
import ipaddress
import os
import stat
import struct
import tarfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engines.api import AbstractNeed, DeviceNeed, FileNeed, ImageCorrupt, PrivilegedNeed, SocketNeed
from engines.criu.images import ImageReader, Message, text

_UNSUPPORTED, _TMPFS = 0, 5
_OVERLAY = 17
_ON_DISK = (_UNSUPPORTED, 7, 13, _OVERLAY)  # file systems whose content the image does not carry
_TTY_KINDS_OF_THE_MACHINE = (2, 3, 6)  # console, virtual terminal, serial line
_PTY = 1
_PTMX_MINOR = 2
_TTYAUX_MAJOR = 5
_O_ACCMODE = 3
_LINKED, _GHOST = 0, 1
_USK_EXTERN, _USK_INHERIT = 1 << 0, 1 << 3
_PROTOCOLS: Mapping[int, Literal["tcp", "udp"]] = {6: "tcp", 17: "udp"}
_STATES: Mapping[int, str] = {
    1: "established",
    2: "syn-sent",
    3: "syn-recv",
    7: "closed",
    8: "close-wait",
    10: "listen",
}
_INET, _INET6 = 2, 10
_SOCK_RAW = 3
_UNIX_KINDS: Mapping[int, Literal["stream", "datagram", "seqpacket"]] = {
    1: "stream",
    2: "datagram",
    5: "seqpacket",
}
# A fanotify group that reports file ids instead of handing out descriptors is open to everybody.
_FAN_REPORT_IDS = 0x600
_MAX_TMPFS_BYTES = 64 << 20
_HELD: Mapping[int, Literal["file", "directory", "fifo"]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "fifo",
}
# What the runtime itself binds into a container that may not make device nodes (user namespaces).
_STANDARD: Mapping[str, tuple[int, int]] = {
    "/dev/null": (1, 3),
    "/dev/zero": (1, 5),
    "/dev/full": (1, 7),
    "/dev/random": (1, 8),
    "/dev/urandom": (1, 9),
    "/dev/tty": (5, 0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What the tasks have open or mapped. namespaces: ids of those that a descriptor refers to."""

    files: tuple[FileNeed, ...]
    devices: tuple[DeviceNeed, ...]
    sockets: tuple[SocketNeed, ...]
    abstract: tuple[AbstractNeed, ...]
    terminal: bool
    shared: tuple[str, ...]
    namespaces: tuple[int, ...]
    privileged: tuple[PrivilegedNeed, ...]


def read(
    reader: ImageReader,
    mounts: Iterable[Message],
    homes: Collection[int] = (),
    executed: Collection[int] = (),
) -> Opened:
    """Everything that the image's tasks have open.

    mounts: entries of the image's mount tables. homes: numbers of the files that are somebody's working
    directory; executed: that are somebody's program. Raises ImageCorrupt.
    """
    entries = reader.read("files.img", "FILES")
    by_id = {int(mount.mnt_id): mount for mount in mounts}
    remapped = _remapped(reader)
    links = {number for kind, number in remapped.values() if kind == _LINKED}
    # A terminal has a regular file's entry too, for its path. Its kind stands in tty-info.img.
    of_terminals = {int(entry.tty.regf_id) for entry in entries if entry.HasField("tty")}
    files: dict[tuple[str, str], FileNeed] = {}
    nodes = _DeviceNodes(reader, by_id)
    devices: list[DeviceNeed] = []
    sockets: list[SocketNeed] = []
    abstract: list[AbstractNeed] = []
    shared: list[str] = []
    namespaces: list[int] = []
    privileged: list[PrivilegedNeed] = []
    for entry in entries:
        privileged += _privileged(entry)
        if entry.HasField("reg"):
            kind = stat.S_IFMT(int(entry.reg.mode))
            if kind in (stat.S_IFCHR, stat.S_IFBLK) and int(entry.reg.id) not in of_terminals:
                devices.append(nodes.need(entry.reg))
            elif _on_disk(entry.reg, by_id):
                number = int(entry.reg.id)
                if number in links:
                    need = _beside(entry.reg, "link")
                elif number in remapped:
                    need = _beside(entry.reg, "deleted") if remapped[number][0] == _GHOST else None
                elif kind in _HELD:
                    need = _file(entry.reg, at_home=number in homes, executed=number in executed)
                else:
                    need = None
                if need:
                    files[need.path, need.use] = _both(files.get((need.path, need.use)), need)
        elif entry.HasField("isk"):
            sockets.append(_socket(entry.isk))
        elif entry.HasField("usk") and int(entry.usk.uflags) & (_USK_EXTERN | _USK_INHERIT):
            shared.append(f"a unix socket whose other end is outside the container ({_text(entry.usk.name)})")
        elif entry.HasField("usk"):
            files |= {(need.path, need.use): need for need in _bound(entry.usk)}
            abstract += _abstract(entry.usk)
        elif entry.HasField("ify") or entry.HasField("ffy"):
            files |= {(need.path, need.use): need for need in _watched(entry)}
        elif entry.HasField("nsf"):
            namespaces.append(int(entry.nsf.ns_id))
        elif entry.HasField("tunf"):
            devices.append(DeviceNeed(path="/dev/net/tun", kind="c", major=10, minor=200, access="rw"))
    terminals = _terminals(reader)
    devices += [need for need in map(_machine_terminal, terminals) if need]
    return Opened(
        files=tuple(files.values()),
        devices=tuple(dict.fromkeys(devices)),
        sockets=tuple(sockets),
        abstract=tuple(dict.fromkeys(abstract)),
        terminal=_has_orphan(terminals),
        shared=tuple(dict.fromkeys(shared)),
        namespaces=tuple(dict.fromkeys(namespaces)),
        privileged=tuple(dict.fromkeys(privileged)),
    )


def _privileged(entry: Message) -> Iterator[PrivilegedNeed]:
    """What stays open although the capability that opened it was dropped."""
    if entry.HasField("isk") and int(entry.isk.type) == _SOCK_RAW:
        yield PrivilegedNeed(what="a raw socket", capabilities=("CAP_NET_RAW",))
    elif entry.HasField("psk"):
        yield PrivilegedNeed(what="a packet socket", capabilities=("CAP_NET_RAW",))
    elif entry.HasField("ffy") and not int(entry.ffy.faflags) & _FAN_REPORT_IDS:
        yield PrivilegedNeed(what="a fanotify group", capabilities=("CAP_SYS_ADMIN",))
    elif entry.HasField("bpf"):
        yield PrivilegedNeed(what="a BPF map", capabilities=("CAP_BPF", "CAP_SYS_ADMIN"))


# --- regular files -------------------------------------------------------------------------------------


def _remapped(reader: ImageReader) -> dict[int, tuple[int, int]]:
    """Files of which an open name was removed: how they are kept, and in which file. A ghost is in the image,
    and is made again for a moment; one with other names lies under one of CRIU's own beside the removed one.
    """
    if not reader.exists("remap-fpath.img"):
        return {}
    return {
        int(entry.orig_id): (int(entry.remap_type), int(entry.remap_id))
        for entry in reader.read("remap-fpath.img", "REMAP_FPATH")
    }


def _beside(reg: Message, use: Literal["deleted", "link"]) -> FileNeed:
    return FileNeed(path=_path(reg), size_bytes=-1, mode=-1, kind="any", use=use, writable=True)


def _both(one: FileNeed | None, other: FileNeed) -> FileNeed:
    """A file that is open several times, maybe for writing too."""
    if one is None:
        return other
    return replace(
        other,
        size_bytes=max(one.size_bytes, other.size_bytes),
        build_id=one.build_id or other.build_id,
        writable=one.writable or other.writable,
        executed=one.executed or other.executed,
    )


def _on_disk(reg: Message, mounts: Mapping[int, Message]) -> bool:
    mount = mounts.get(int(reg.mnt_id))
    return mount is None or bool(mount.ext_mount) or bool(mount.ext_key) or int(mount.fstype) in _ON_DISK


def _path(reg: Message) -> str:
    return "/" + text(reg.name).lstrip("/")


def _file(reg: Message, *, at_home: bool, executed: bool) -> FileNeed:
    kind = _HELD[stat.S_IFMT(int(reg.mode))]
    # A file that is only appended to may have grown: CRIU restores it all the same.
    sized = kind == "file" and reg.HasField("size") and not int(reg.flags) & os.O_APPEND
    return FileNeed(
        path=_path(reg),
        size_bytes=int(reg.size) if sized else -1,
        mode=stat.S_IMODE(int(reg.mode)) if reg.HasField("mode") else -1,
        build_id=b"".join(struct.pack("<I", int(word) & 0xFFFFFFFF) for word in reg.build_id).hex(),
        kind=kind,
        use="working-directory" if at_home else "open",
        writable=bool(int(reg.flags) & _O_ACCMODE),
        executed=executed,
    )


def _bound(usk: Message) -> Iterator[FileNeed]:
    """Where a unix socket is bound, and in which directory; CRIU makes that of a deleted one itself."""
    name = bytes(usk.name)
    if name and not name.startswith(b"\0") and not usk.deleted:
        path = os.path.normpath(os.path.join("/", text(usk.name_dir), os.fsdecode(name.rstrip(b"\0"))))  # noqa: PTH118
        yield FileNeed(path=path, size_bytes=-1, mode=-1, kind="socket", use="socket")
        yield FileNeed(
            path=os.path.dirname(path),  # noqa: PTH120
            size_bytes=-1,
            mode=-1,
            kind="directory",
            use="socket",
        )


def _abstract(usk: Message) -> Iterator[AbstractNeed]:
    name, kind = bytes(usk.name), _UNIX_KINDS.get(int(usk.type))
    if name.startswith(b"\0") and kind:
        yield AbstractNeed(name=name[1:].hex(), kind=kind)


def _watched(entry: Message) -> Iterator[FileNeed]:
    """What inotify and fanotify watch, as far as CRIU found its name."""
    if entry.HasField("ify"):
        handles = [watch.f_handle for watch in entry.ify.wd]
    else:
        handles = [mark.ie.f_handle for mark in entry.ffy.mark if mark.HasField("ie")]
    for handle in handles:
        if handle.path:
            path = "/" + text(handle.path).lstrip("/")
            yield FileNeed(path=path, size_bytes=-1, mode=-1, kind="any", use="watched")


# --- devices -------------------------------------------------------------------------------------------


class _DeviceNodes:
    """Finds device numbers, which CRIU does not record with an open file.

    A node on a tmpfs of the container's own is in the archive of that tmpfs, which is what the restore will
    make again; a node that the runtime bound in is known by its key. Anything else has the numbers -1:
    unknown, for the judge to refuse.
    """

    def __init__(self, reader: ImageReader, mounts: Mapping[int, Message]) -> None:
        self._reader = reader
        self._mounts = mounts
        self._tables: dict[int, Mapping[str, tuple[str, int, int]]] = {}

    def need(self, reg: Message) -> DeviceNeed:
        kind: Literal["c", "b"] = "c" if stat.S_ISCHR(int(reg.mode)) else "b"
        mode = int(reg.flags) & _O_ACCMODE
        access: Literal["r", "w", "rw"] = "r" if mode == 0 else "w" if mode == 1 else "rw"
        major, minor = self._numbers(_path(reg), kind, self._mounts.get(int(reg.mnt_id)))
        return DeviceNeed(path=_path(reg), kind=kind, major=major, minor=minor, access=access)

    def _numbers(self, path: str, kind: str, mount: Message | None) -> tuple[int, int]:
        if mount is None:
            return -1, -1
        if mount.ext_mount or mount.ext_key:
            return _STANDARD.get(text(mount.ext_key), (-1, -1))
        if int(mount.fstype) != _TMPFS:
            return -1, -1
        device = int(mount.root_dev)
        if device not in self._tables:
            self._tables[device] = self._nodes(f"tmpfs-dev-{device}.tar.gz.img")
        inside = path.removeprefix("/" + text(mount.mountpoint).strip("/")).lstrip("/")
        inside = "/".join(part for part in (text(mount.root).strip("/"), inside) if part)
        found = self._tables[device].get(inside)
        return found[1:] if found and found[0] == kind else (-1, -1)

    def _nodes(self, name: str) -> Mapping[str, tuple[str, int, int]]:
        if not self._reader.exists(name):
            return {}
        nodes: dict[str, tuple[str, int, int]] = {}
        try:
            with (
                os.fdopen(self._reader.open(name), "rb") as raw,
                gzip.GzipFile(fileobj=raw) as unpacked,
                tarfile.open(fileobj=unpacked, mode="r|") as archive,
            ):
                read_bytes = 0
                for member in archive:
                    read_bytes += member.size
                    if read_bytes > _MAX_TMPFS_BYTES:
                        break  # nobody keeps that much beside device nodes; what was not seen stays unknown
                    if member.ischr() or member.isblk():
                        kind = "c" if member.ischr() else "b"
                        nodes[member.name.removeprefix("./")] = (kind, member.devmajor, member.devminor)
        except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
            raise ImageCorrupt(
                f"could not read image '{self._reader.path}': {name}: {error}; "
                "take the checkpoint again, or copy it again"
            ) from None
        return nodes


# --- terminals -----------------------------------------------------------------------------------------


def _terminals(reader: ImageReader) -> Sequence[Message]:
    return reader.read("tty-info.img", "TTY_INFO") if reader.exists("tty-info.img") else ()


def _major_minor(rdev: int) -> tuple[int, int]:
    return rdev >> 8 & 0xFFF, rdev & 0xFF | rdev >> 12 & 0xFFF00


def _has_orphan(terminals: Iterable[Message]) -> bool:
    """Whether some pseudo terminal's master lay outside the container, as the container's own one does."""
    masters: set[tuple[int, int]] = set()
    slaves: set[tuple[int, int]] = set()
    for info in terminals:
        if int(info.type) == _PTY:
            is_master = _major_minor(int(info.rdev)) == (_TTYAUX_MAJOR, _PTMX_MINOR)
            (masters if is_master else slaves).add((int(info.dev), int(info.pty.index)))
    return bool(slaves - masters)


def _machine_terminal(info: Message) -> DeviceNeed | None:
    if int(info.type) not in _TTY_KINDS_OF_THE_MACHINE:
        return None
    major, minor = _major_minor(int(info.rdev))
    return DeviceNeed(path=f"terminal {major}:{minor}", kind="c", major=major, minor=minor, access="rw")


# --- sockets -------------------------------------------------------------------------------------------


def _socket(isk: Message) -> SocketNeed:
    remote_port = int(isk.dst_port)
    return SocketNeed(
        family="inet6" if int(isk.family) == _INET6 else "inet",
        protocol=_PROTOCOLS.get(int(isk.proto), "other"),
        state=_STATES.get(int(isk.state), f"state {int(isk.state)}"),
        address=_address(isk.src_addr, int(isk.family)),
        port=int(isk.src_port),
        remote=_address(isk.dst_addr, int(isk.family)) if remote_port else "",
        remote_port=remote_port,
        v6only=bool(isk.v6only),
        freebind=bool(isk.ip_opts.freebind),
        interface=text(isk.opts.so_bound_dev) or text(isk.ifname),
    )


def _address(words: Iterable[int], family: int) -> str:
    packed = b"".join(struct.pack("<I", int(word)) for word in words)
    packed = packed.ljust(16 if family == _INET6 else 4, b"\0")
    return str(ipaddress.IPv6Address(packed[:16]) if family == _INET6 else ipaddress.IPv4Address(packed[:4]))


def _text(name: bytes) -> str:
    return name.strip(b"\0").decode(errors="replace") or "no name"
