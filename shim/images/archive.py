"""Reading the checkpoint archives of containerd, CRI-O and Podman into the store.

An archive is recognised by what is in it. Only regular files and directories are taken out of it, into a
fresh staging directory; whatever else it holds makes it unacceptable. Who may restore the image is said by
whoever imports it, never by the archive.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from engines.api import ImageCorrupt, ImageError, ImageExists, Needs, NotSupported
from shim.images import layout
from shim.images.apply import check_diff
from shim.images.beneath import read_plain
from shim.images.documents import MAX_DOCUMENT_BYTES, encode_needs
from shim.images.layout import Reference
from shim.images.manifest import (
    FileDigest,
    Imported,
    Manifest,
    Program,
    Rootfs,
    Use,
    build_manifest,
    digest_of,
    parse_manifest,
    source_of,
)
from shim.images.seal import OnBytes, cause_of, check_files, write_file
from shim.images.spec import parse
from shim.images.store import Image, Store
from shim.images.tarball import BadArchive, chunks, is_sparse, kind_of, members, open_tar, split_name
from shim.log import now

DEFAULT_MAX_BYTES = 256 << 30
_MAX_MEMBERS = 100_000
_MAX_NAMES_BYTES = 32 << 20

Inspect = Callable[[str, Path], Needs]
"""Given an engine's name and a directory that it wrote, what the image needs. Raises EngineError."""

_KEPT = frozenset(
    {
        layout.CONFIG_DUMP,
        layout.SPEC_DUMP,
        layout.NETWORK_STATUS,
        layout.ROOTFS_DIFF,
        layout.DELETED_FILES,
        layout.DUMP_LOG,
        layout.STATS_DUMP,
    }
)
_SHM = "devshm-checkpoint.tar"
_CRIO_LOG = "io.kubernetes.cri-o.LogPath"
_WHAT = "the archive"
# Known and not needed: state of the old caller, and output of the container.
_IGNORED = frozenset(
    {
        "status",
        "status.dump",
        "bind.mounts",
        "container.log",
        "ctr.log",
        _CRIO_LOG,
        "restore.log",
        "stats-restore",
    }
)

Kind = Literal["containerd", "cri-o", "podman", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Import:
    """An imported image, and what of the archive was left behind, in sentences."""

    image: Image
    warnings: tuple[str, ...]


class _ConfigDump(msgspec.Struct, frozen=True):
    """The keys of config.dump that all three callers write."""

    id: str = ""
    name: str | None = None
    rootfsImageName: str | None = None  # the callers' spelling
    rootfsImageRef: str | None = None
    runtime: str | None = None
    checkpointedTime: str | None = None


def open_archive(path: Path) -> BinaryIO:
    """Open an archive for `import_archive`. Raises ImageError if it is not a regular file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ImageError(f"could not open archive '{path}': {cause_of(error)}; check the path") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ImageError(
            f"could not open archive '{path}': it is not a regular file; give the archive's path"
        )
    return os.fdopen(fd, "rb")


def import_archive(
    file: BinaryIO,
    store: Store,
    reference: Reference,
    *,
    inspect: Inspect,
    torpor_version: str,
    use: Use | None = None,
    replace_existing: bool = False,
    max_bytes: int = DEFAULT_MAX_BYTES,
    on_bytes: OnBytes | None = None,
    judge: Callable[[Manifest], None] | None = None,
) -> Import:
    """Make an image of the store out of an archive.

    file: the open archive, seekable, at its start. reference: name and namespace of the new image. use:
    recorded in the manifest, None to keep what torpor's own manifest says. max_bytes: refused if more comes
    out of the archive. on_bytes: progress in bytes of the archive. judge: may raise, before anything of the
    image is read or stands in the store. Raises ImageError and its kinds,
    ShimError, NotSupported; then nothing is left in the store.
    """
    job = _Job(
        store=store,
        reference=reference,
        inspect=inspect,
        torpor_version=torpor_version,
        use=use,
        replace_existing=replace_existing,
        max_bytes=max_bytes,
        judge=judge,
    )
    if not replace_existing:
        _refuse_existing(store, reference)
    with store.staging() as staged:
        try:
            (staged / layout.CHECKPOINT).mkdir(mode=0o700)
            extracted = _Extraction(staged, max_bytes, on_bytes)
            extracted.run(file)
            return job.commit(staged, extracted)
        except OSError as error:
            raise ImageError(f"could not import image '{reference}': {cause_of(error)}") from error


def _refuse_existing(store: Store, reference: Reference) -> None:
    """Say so before gigabytes are copied."""
    if any(entry.reference.name == reference.name for entry in store.entries(reference.namespace)):
        raise ImageExists(
            f"could not import image '{reference}': there is one of this name; "
            "choose another name or replace it"
        )


class _Extraction:
    """Copies an archive's files into the staging directory."""

    def __init__(self, staged: Path, max_bytes: int, on_bytes: OnBytes | None) -> None:
        self.names: set[str] = set()
        self.warnings: list[str] = []
        self.has_shm = False
        self._staged = staged
        self._max_bytes = max_bytes
        self._left_bytes = max_bytes
        self._on_bytes = on_bytes
        self._position = 0

    @property
    def kind(self) -> Kind:
        """Which caller made the archive."""
        if self.names & {"bind.mounts", _CRIO_LOG}:
            return "cri-o"
        if self.names & {"ctr.log", "artifacts", _SHM}:
            return "podman"
        return "containerd" if self.names & {"container.log", "status.dump"} else "unknown"

    @property
    def has_manifest(self) -> bool:
        """Whether torpor's own manifest is in it."""
        return f"{layout.CHECKPOINT}/{layout.EXTRAS_PREFIX}{layout.MANIFEST}" in self.names

    def run(self, file: BinaryIO) -> None:
        n_members = n_bytes = 0
        # Twice the limit: headers and padding count too where the archive is compressed.
        with open_tar(file, what=_WHAT, max_bytes=2 * self._max_bytes) as tar:
            for info in members(tar):
                n_members += 1
                n_bytes += len(info.name)
                if n_members > _MAX_MEMBERS or n_bytes > _MAX_NAMES_BYTES:
                    raise BadArchive("it has too many members")
                self._take(tar, info, file)

    def _take(self, tar: tarfile.TarFile, info: tarfile.TarInfo, file: BinaryIO) -> None:
        parts = split_name(info.name)
        name = "/".join(parts)
        if info.issym() and parts == (layout.CHECKPOINT, "parent"):
            raise BadArchive(
                "its memory image is incremental and its parent is not in it; export without --pre"
            )
        if not (info.isreg() or info.isdir()) or is_sparse(info):
            raise BadArchive(f"{name[:200]!a} is a {kind_of(info)}, where only files and directories may be")
        if not parts:
            return
        if parts[0] == "pre-checkpoint":
            raise BadArchive(
                "it is a pre-checkpoint, which cannot be restored by itself; export a checkpoint"
            )
        if info.isdir():
            self.names.add(name)
            return
        if name in self.names:
            raise BadArchive(f"{name[:200]!a} stands in it twice")
        self.names.add(name)
        self.names.add(parts[0])
        destination = self._destination(parts)
        if destination is None:
            return
        self._left_bytes -= info.size
        if self._left_bytes < 0:
            raise BadArchive("it is larger than the limit")
        self._copy(tar, info, destination, file)

    def _destination(self, parts: tuple[str, ...]) -> Path | None:
        """Where a file goes; None for one that is left behind."""
        top = parts[0]
        if top == layout.CHECKPOINT:
            if len(parts) == 2 and parts[1] != layout.EXTRAS:
                own = parts[1].removeprefix(layout.EXTRAS_PREFIX)
                if own in {parts[1], ""}:
                    return self._staged.joinpath(*parts)
                extras_path = self._staged / layout.CHECKPOINT / layout.EXTRAS
                extras_path.mkdir(mode=0o700, exist_ok=True)
                return extras_path / own
            raise BadArchive(f"{'/'.join(parts)[:200]!a} is no file that an engine writes")
        if len(parts) == 1 and top in _KEPT:
            return self._staged / top
        if len(parts) == 1 and top == _SHM:
            self.has_shm = True
            return self._staged / top
        if top == "volumes":
            self.warnings.append(f"volume {'/'.join(parts[1:])[:200]!a} was left behind; restore it yourself")
        elif top not in _IGNORED and top != "artifacts":
            self.warnings.append(f"unknown file {'/'.join(parts)[:200]!a} was left behind")
        return None

    def _copy(self, tar: tarfile.TarFile, info: tarfile.TarInfo, destination: Path, file: BinaryIO) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(destination, flags, 0o600)
        with os.fdopen(fd, "wb", buffering=0) as output:
            for _, data in chunks(tar, info):
                view = memoryview(data)
                while view:
                    view = view[output.write(view) :]
                if self._on_bytes is not None:
                    position = file.tell()
                    self._on_bytes(max(0, position - self._position))
                    self._position = position


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What an import was asked to do."""

    store: Store
    reference: Reference
    inspect: Inspect
    torpor_version: str
    use: Use | None
    replace_existing: bool
    max_bytes: int
    judge: Callable[[Manifest], None] | None

    def commit(self, staged: Path, extracted: _Extraction) -> Import:
        """Judge what was extracted and make it an image."""
        checkpoint_path = staged / layout.CHECKPOINT
        engine = layout.writer_of(checkpoint_path, None)
        _refuse_shared_memory(staged, extracted)
        imported = Imported(archive=extracted.kind, at=now())
        known: Mapping[str, FileDigest] = {}
        if extracted.has_manifest:
            manifest, known = _own_manifest(staged, imported)
            layout.writer_of(checkpoint_path, manifest.engine.name)
        elif (checkpoint_path / layout.EXTRAS).exists():
            raise ImageCorrupt(
                "could not read the archive: it holds torpor's files but not its manifest; make it again"
            )
        else:
            manifest = _foreign_manifest(staged, extracted.kind, engine, self.torpor_version, imported)
        manifest = replace(
            manifest, use=self.use or manifest.use, rootfs=_rootfs(staged, manifest.rootfs, extracted.kind)
        )
        if self.judge is not None:
            self.judge(manifest)
        _check_rootfs(staged, manifest.rootfs, self.max_bytes)
        needs = self.inspect(manifest.engine.name, checkpoint_path)
        write_file(staged / layout.NEEDS, encode_needs(needs))
        known = {name: digest for name, digest in known.items() if name != layout.NEEDS}
        image = self.store.commit(
            staged, self.reference, manifest=manifest, known=known, replace=self.replace_existing
        )
        return Import(image=image, warnings=tuple(extracted.warnings))


def _refuse_shared_memory(staged: Path, extracted: _Extraction) -> None:
    """Podman keeps /dev/shm beside the memory image; dropping it in silence would lose data."""
    if not extracted.has_shm:
        return
    path = staged / _SHM
    with path.open("rb") as file, open_tar(file, what=f"{_SHM} of the archive", max_bytes=1 << 40) as tar:
        first = next((info.name for info in members(tar) if split_name(info.name)), "")
    if first:
        raise NotSupported(
            "could not import the archive: it keeps files of the container's /dev/shm (the "
            f"first is {first[:200]!a}), which only Podman puts back; restore it with "
            "`podman container restore`"
        )
    path.unlink()


def _own_manifest(staged: Path, imported: Imported) -> tuple[Manifest, Mapping[str, FileDigest]]:
    """Torpor's manifest from the archive, checked against every file; its files then move to their place."""
    checkpoint_path = staged / layout.CHECKPOINT
    extras_path = checkpoint_path / layout.EXTRAS
    data = read_plain(extras_path, layout.MANIFEST, MAX_DOCUMENT_BYTES)
    manifest = parse_manifest(data, what="the manifest in the archive")
    check_files(manifest, checkpoint_path=checkpoint_path, extras_path=extras_path, pages=True, what=_WHAT)
    (extras_path / layout.MANIFEST).unlink()
    for path in extras_path.iterdir():
        path.rename(staged / path.name)  # torpor's files are of the instant of the dump: they win
    extras_path.rmdir()
    imported = replace(imported, manifest_digest=digest_of(data))
    return replace(manifest, imported=imported), manifest.files


def _foreign_manifest(
    staged: Path, kind: Kind, engine: str, torpor_version: str, imported: Imported
) -> Manifest:
    spec_data = _read(staged, layout.SPEC_DUMP)
    config_data = _read(staged, layout.CONFIG_DUMP)
    try:
        config = msgspec.json.decode(config_data, type=_ConfigDump)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ImageCorrupt(f"could not read config.dump of the archive: {error}; make it again") from error
    spec = parse(spec_data, what="spec.dump of the archive")
    source = source_of(spec, container_id=config.id)
    source = replace(
        source,
        container_name=source.container_name or config.name or "",
        image_name=config.rootfsImageName or source.image_name,
        image_ref=config.rootfsImageRef or source.image_ref,
        runtime_caller=kind if kind != "unknown" else source.runtime_caller,
    )
    return build_manifest(
        spec_data=spec_data,
        source=source,
        engine=Program(name=engine),
        runtime=Program(name=config.runtime or ""),
        torpor_version=torpor_version,
        # Unknown; an archive can be restored again and again by its own caller too.
        leave_running=True,
        rootfs=Rootfs(kind="none"),
        host=None,
        created=_moment(config.checkpointedTime),
        imported=imported,
    )


def _moment(text: str | None) -> str:
    try:
        datetime.fromisoformat(text or "")
    except ValueError:
        return ""
    return text or ""


def _read(staged: Path, name: str) -> bytes:
    try:
        return read_plain(staged, name, MAX_DOCUMENT_BYTES)
    except FileNotFoundError:
        raise ImageCorrupt(f"could not read the archive: it holds no {name}; make it again") from None


def _rootfs(staged: Path, recorded: Rootfs, kind: Kind) -> Rootfs:
    """How the root file system is kept: by torpor, else by the caller in its own way, else not at all."""
    if recorded.kind != "none":
        return recorded
    if not (staged / layout.ROOTFS_DIFF).exists() and not (staged / layout.DELETED_FILES).exists():
        return recorded
    return replace(
        recorded, kind="overlay", whiteouts="deleted.files" if kind in {"podman", "cri-o"} else "oci"
    )


def _check_rootfs(staged: Path, rootfs: Rootfs, max_bytes: int) -> None:
    diff_path = staged / layout.ROOTFS_DIFF
    deleted_path = staged / layout.DELETED_FILES
    deleted = _read(staged, layout.DELETED_FILES) if deleted_path.exists() else b"[]"
    if rootfs.kind != "none" and not diff_path.exists():
        raise ImageCorrupt(f"could not read the archive: it holds no {layout.ROOTFS_DIFF}; make it again")
    if diff_path.exists():
        with diff_path.open("rb") as diff:
            check_diff(diff, deleted, whiteouts=rootfs.whiteouts, max_bytes=max_bytes)
