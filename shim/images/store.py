"""The store of checkpoint images on this node: root-only, immutable, complete or absent.

    STORE/images/<namespace or _>/<name>/   one image (see layout.py)
    STORE/staging/<random>/                 an image in the making, or one on its way out
    STORE/replaced/<namespace or _>:<name>/ what an image took the place of whose checkpoint may yet fail
    STORE/consumed/<digest>                 a `move` image that was restored
    STORE/lock                              held while names change

An image comes into being by one rename of a directory whose files are all on disk, and goes by one rename.
A directory in staging belongs to the process that holds its flock; without one it is a leftover.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from engines.api import ImageCorrupt, ImageError, ImageExists, Needs
from shim.errors import AdmissionRefused, ShimError, UnknownImage, Unsettled
from shim.images.beneath import exchange, read_plain
from shim.images.directories import check_mode, is_open, make_directory, sync_directory, unused
from shim.images.documents import MAX_DOCUMENT_BYTES, decode_needs
from shim.images.layout import CHECKPOINT, MANIFEST, NEEDS, NO_NAMESPACE, PENDING, Reference, check_name
from shim.images.manifest import FileDigest, Manifest, digest_of, parse_manifest
from shim.images.seal import OnBytes, cause_of, check_files, list_files, seal, write_file
from shim.log import now


@dataclass(frozen=True)
class Image:
    """A committed image. reference: with its digest. n_bytes: sum of all files."""

    path: Path
    reference: Reference
    digest: str
    manifest: Manifest

    @property
    def checkpoint_path(self) -> Path:
        """What the engine wrote."""
        return self.path / CHECKPOINT

    @property
    def n_bytes(self) -> int:
        return sum(file.size_bytes for file in self.manifest.files.values())

    @cached_property
    def needs(self) -> Needs:
        """What the image asks of a node and a spec, read on first use. Raises ImageCorrupt."""
        what = f"needs of image '{self.reference}'"
        try:
            data = read_plain(self.path, NEEDS, MAX_DOCUMENT_BYTES)
        except OSError as error:
            raise ImageCorrupt(f"could not read {what}: {cause_of(error)}; import the image again") from error
        return decode_needs(data, what=what)


@dataclass(frozen=True)
class BrokenImage:
    """A directory in the store that cannot be read as an image."""

    path: Path
    reference: Reference
    cause: str


class Store:
    """Access to the images below one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # --- making -------------------------------------------------------------------------------------

    @contextmanager
    def staging(self) -> Generator[Path]:
        """An empty directory (0700) to build an image in; what is not committed goes when the block ends.

        Raises ShimError if the store is not safe to use, ImageError if the directory cannot be made.
        """
        path, fd = self._new_staging()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)

    def commit(
        self,
        staged: Path,
        reference: Reference,
        *,
        manifest: Manifest | None = None,
        replace: bool = False,
        pending: bytes | None = None,
        known: Mapping[str, FileDigest] | None = None,
        on_bytes: OnBytes | None = None,
    ) -> Image:
        """Make the staged directory the image of that name.

        manifest: seal the directory with it (hashes every file); None if it was sealed before, then names
        and sizes are compared. replace: an existing image of the name gives way, in one step where the file
        system can. pending: whose checkpoint it is, where that may yet fail: nobody may use the image, nor is
        the replaced one gone, before it is `settled` or withdrawn. known: digests that were just checked.
        on_bytes: progress of hashing. Raises ImageExists, ImageCorrupt, ImageError; then nothing is left.
        """
        check_name(reference.name)
        if reference.namespace:
            check_name(reference.namespace, "namespace")
        destination = self._images / reference.directory
        try:
            if os.path.lexists(destination) and not replace:
                raise self._exists(reference)
            checkpoint_path = staged / CHECKPOINT
            (staged / PENDING).unlink(missing_ok=True)  # an archive may bring one
            if pending is not None:
                write_file(staged / PENDING, pending)
            if manifest is not None:
                seal(
                    manifest,
                    checkpoint_path=checkpoint_path,
                    extras_path=staged,
                    known=known,
                    on_bytes=on_bytes,
                )
            image = self._load(staged, reference)
            sizes = list_files(checkpoint_path=checkpoint_path, extras_path=staged)
            if sizes != {name: file.size_bytes for name, file in image.manifest.files.items()}:
                raise ImageCorrupt(
                    f"could not commit image '{reference}': its files are not those of its manifest; "
                    "seal it again"
                )
            if reference.digest is not None and reference.digest != image.digest:
                raise ImageCorrupt(
                    f"could not commit image '{reference}': its digest is {image.digest}; ask for that one"
                )
            with self._locked():
                make_directory(destination.parent)
                self._put(staged, destination, reference, replace=replace)
        except OSError as error:
            raise ImageError(f"could not commit image '{reference}': {cause_of(error)}") from error
        return Image(destination, reference.with_digest(image.digest), image.digest, image.manifest)

    def _put(self, staged: Path, destination: Path, reference: Reference, *, replace: bool) -> None:
        try:
            # An image directory is never empty, so this cannot silently take the place of another one.
            staged.rename(destination)
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
            if not replace:
                raise self._exists(reference) from error
            pending = (staged / PENDING).exists()
            old = self._old(reference) if pending else staged.with_suffix(".old")
            if (destination / PENDING).exists() or old.exists():
                raise ImageError(
                    f"could not replace image '{reference}': its checkpoint is not at its end, or was cut "
                    "short; try again, or remove it first"
                ) from error
            with unused(destination, reference):
                # Out of `staged`, where an engine that fails late, or its guardian, removes what it wrote.
                staged.rename(old)
                if not exchange(old, destination):
                    old.rename(staged)
                    destination.rename(old)
                    staged.rename(destination)
            if not pending:
                old.rename(staged)
        for path in (destination.parent, self._staging, self._replaced):
            sync_directory(path)

    def withdraw(self, image: Image, trash: Path) -> None:
        """Take the commit of a pending image back; one that it replaced stands in its place again.

        trash: a path in staging, absent or an empty directory, that the image gets. Nothing happens if
        another call was first. Raises ImageError.
        """
        old = self._old(image.reference)
        try:
            with self._locked():
                pending = (image.path / PENDING).exists()
                if not pending or self._load(image.path, image.reference).digest != image.digest:
                    return
                if old.exists() and exchange(old, image.path):
                    old.rename(trash)
                else:
                    image.path.rename(trash)
                    with suppress(FileNotFoundError):
                        old.rename(image.path)
                sync_directory(image.path.parent)
        except OSError as error:
            raise ImageError(f"could not withdraw image '{image.reference}': {cause_of(error)}") from error

    def _clear_replaced(self) -> None:
        """Remove what was replaced for good, and put back what a call that was killed left without successor.

        What cannot be done now is left to the next call.
        """
        with suppress(OSError, ImageError):
            for old in self._replaced.iterdir():
                path = self._images / old.name.replace(":", "/")
                with self.staging() as trash, self._locked():
                    unborn = (old / PENDING).exists()  # it never got its name, or lost it
                    if unborn or (path.exists() and not (path / PENDING).exists()):
                        old.rename(trash)
                    elif not path.exists():
                        make_directory(path.parent)
                        old.rename(path)

    @staticmethod
    def _exists(reference: Reference) -> ImageExists:
        return ImageExists(
            f"could not commit image '{reference}': there is one of this name; "
            "choose another name or replace it"
        )

    def _new_staging(self) -> tuple[Path, int]:
        path = self._staging / os.urandom(8).hex()
        try:
            self.ensure()
            with self._locked():  # else `recover` could come before the flock
                path.mkdir(mode=0o700)
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ImageError(f"could not stage an image in '{self.path}': {cause_of(error)}") from error
        return path, fd

    # --- finding ------------------------------------------------------------------------------------

    def resolve(self, reference: Reference) -> Image:
        """The image that a reference names. Raises UnknownImage, ImageCorrupt, ShimError."""
        check_name(reference.name)
        self._check_safe()
        path = self._images / reference.directory
        if not path.is_dir() or path.is_symlink():
            raise UnknownImage(
                f"could not find image '{reference}': the store '{self.path}' has none of this name; "
                "see `torpor images ls`"
            )
        if (path / PENDING).exists():
            raise Unsettled(
                f"could not use image '{reference}': its checkpoint is not at its end, or was cut short; "
                "the next checkpoint or restore on this node settles it"
            )
        image = self._load(path, reference)
        if reference.digest is not None and reference.digest != image.digest:
            raise UnknownImage(
                f"could not find image '{reference}': the image of this name has the digest {image.digest}; "
                "use that digest or none"
            )
        return image

    def has(self, reference: Reference) -> bool:
        """Whether there is an image of this name, usable or not."""
        return os.path.lexists(self._images / reference.directory)

    def unsettled(self) -> list[Image]:
        """Images whose checkpoint has not come to its end."""
        found: list[Image] = []
        for path, reference in self._places():
            if (path / PENDING).exists():
                try:
                    found.append(self._load(path, reference))
                except (ImageError, ShimError):
                    if (path / PENDING).exists():  # else it was settled or removed meanwhile
                        raise
        return found

    def settled(self, image: Image) -> None:
        """The checkpoint of an image has come to its end: it may be used. Raises ImageError."""
        try:
            (image.path / PENDING).unlink(missing_ok=True)
            sync_directory(image.path)
        except OSError as error:
            raise ImageError(f"could not settle image '{image.reference}': {cause_of(error)}") from error
        self._clear_replaced()

    @contextmanager
    def using(self, image: Image) -> Generator[None]:
        """Keep an image in its place while it is restored: it is neither removed nor replaced meanwhile.

        Raises UnknownImage if it is gone already.
        """
        try:
            fd = os.open(image.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise UnknownImage(f"could not use image '{image.reference}': it is gone") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if self.resolve(image.reference).digest != image.digest or not is_open(image.path, fd):
                raise UnknownImage(
                    f"could not use image '{image.reference}': it was replaced meanwhile; try again"
                )
            yield
        finally:
            os.close(fd)

    def list(self, namespace: str | None = None) -> tuple[Image, ...]:
        """All readable images, of one namespace or of all, by namespace and name."""
        return tuple(entry for entry in self.entries(namespace) if isinstance(entry, Image))

    def entries(self, namespace: str | None = None) -> Iterator[Image | BrokenImage]:
        """All images, with those that cannot be read."""
        if not self._images.is_dir():
            return
        self._check_safe()
        for path, reference in self._places():
            if namespace is not None and reference.namespace != namespace:
                continue
            try:
                yield self._load(path, reference)
            except (ImageError, ShimError) as error:
                if os.path.lexists(path):  # else it was removed meanwhile
                    yield BrokenImage(path, reference, str(error))

    def _places(self) -> Iterator[tuple[Path, Reference]]:
        """Where every image is. Errors of a listing are raised: to miss one would free what it holds."""
        for directory in sorted(self._images.iterdir()) if self._images.is_dir() else ():
            owner = "" if directory.name == NO_NAMESPACE else directory.name
            try:
                paths = sorted(directory.iterdir())
            except (FileNotFoundError, NotADirectoryError):
                continue  # a namespace goes with its last image; a file is none
            for path in paths:
                yield path, Reference(namespace=owner, name=path.name)

    def _load(self, path: Path, reference: Reference) -> Image:
        what = f"manifest of image '{reference}'"
        try:
            check_mode(path)
            data = read_plain(path, MANIFEST, MAX_DOCUMENT_BYTES)
        except OSError as error:
            raise ImageCorrupt(
                f"could not read {what}: {cause_of(error)}; remove it and checkpoint or import again"
            ) from error
        digest = digest_of(data)
        return Image(path, reference.with_digest(digest), digest, parse_manifest(data, what=what))

    def verify(self, image: Image, *, pages: bool, on_bytes: OnBytes | None = None) -> None:
        """Compare every file with the manifest: sizes always, content of page files only with `pages`.

        Raises ImageCorrupt.
        """
        if self._load(image.path, image.reference).digest != image.digest:
            raise ImageCorrupt(
                f"could not verify image '{image.reference}': its manifest was replaced meanwhile; try again"
            )
        check_files(
            image.manifest,
            checkpoint_path=image.checkpoint_path,
            extras_path=image.path,
            pages=pages,
            what=f"image '{image.reference}'",
            on_bytes=on_bytes,
        )

    # --- using up and removing ----------------------------------------------------------------------

    def consume(self, image: Image, by: str) -> None:
        """Record durably that a `move` image was restored, so that it is not restored a second time.

        by: who did it (the container's id). Calling again with the same `by` changes nothing. Raises
        AdmissionRefused if somebody else was first, ImageError if it cannot be recorded.
        """
        marker = self._marker(image)
        record = {"schema": 1, "by": by, "at": now(), "reference": str(image.reference)}
        draft = marker.with_name(f".{marker.name}")
        try:
            self.ensure()
            with self._locked():
                first = self.consumed_by(image)
                if first is None:
                    write_file(draft, json.dumps(record).encode())
                    draft.rename(marker)
                    sync_directory(marker.parent)
        except OSError as error:
            raise ImageError(f"could not consume image '{image.reference}': {cause_of(error)}") from error
        if first not in {None, by}:
            raise AdmissionRefused(
                f"could not use image '{image.reference}': it was taken to be moved once and container "
                f"'{first}' has it; checkpoint again, or take it with `use: clone`"
            )

    def consumed_by(self, image: Image) -> str | None:
        """Who restored a `move` image, None if nobody did. Raises ImageCorrupt."""
        marker = self._marker(image)
        try:
            record = json.loads(read_plain(marker.parent, marker.name, 1 << 16))
            return str(record["by"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ImageCorrupt(
                f"could not tell whether image '{image.reference}' was used: {error} ({marker}); "
                "remove the image and checkpoint again"
            ) from error

    def remove(self, reference: Reference) -> None:
        """Remove an image, readable or not, and with its last copy the record of its use.

        Raises UnknownImage, ImageError.
        """
        check_name(reference.name)
        path = self._images / reference.directory
        image: Image | None = None
        try:
            image = self.resolve(reference)
        except (ImageCorrupt, Unsettled):
            if reference.digest is not None:
                raise
        try:
            trash, fd = self._new_staging()
            try:
                with self._locked(), unused(path, reference):
                    with suppress(FileNotFoundError):
                        self._old(reference).rename(trash / "older")
                    path.rename(trash / "old")
                    sync_directory(path.parent)
                    with suppress(OSError):
                        path.parent.rmdir()
                shutil.rmtree(trash)
            finally:
                os.close(fd)
            if image is not None and all(other.digest != image.digest for other in self.list()):
                self._marker(image).unlink(missing_ok=True)
        except FileNotFoundError as error:
            raise UnknownImage(f"could not remove image '{reference}': it is gone already") from error
        except OSError as error:
            raise ImageError(f"could not remove image '{reference}': {cause_of(error)}") from error

    def recover(self) -> int:
        """Remove what dead processes left in staging. Returns how many there were. Raises ImageError."""
        n_removed = 0
        try:
            self.ensure()
            for path in self._staging.iterdir():
                if self._is_stale(path):
                    shutil.rmtree(path, ignore_errors=True)
                    n_removed += 1
            with self._locked():
                for draft in self._consumed.glob(".*"):
                    draft.unlink()
            self._clear_replaced()
        except OSError as error:
            raise ImageError(f"could not clean the store '{self.path}': {cause_of(error)}") from error
        return n_removed

    def _is_stale(self, path: Path) -> bool:
        with self._locked():
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            finally:
                os.close(fd)
        return True

    # --- the directories ----------------------------------------------------------------------------

    @property
    def _images(self) -> Path:
        return self.path / "images"

    @property
    def _staging(self) -> Path:
        return self.path / "staging"

    @property
    def _replaced(self) -> Path:
        return self.path / "replaced"

    def _old(self, reference: Reference) -> Path:
        """Where an image is kept that one of this name took the place of."""
        return self._replaced / reference.directory.replace("/", ":")

    @property
    def _consumed(self) -> Path:
        return self.path / "consumed"

    def _marker(self, image: Image) -> Path:
        return self._consumed / image.digest.removeprefix("sha256:")

    def ensure(self) -> None:
        """Make the store's directories where they are missing. Raises OSError, ShimError if it is unsafe."""
        if not os.path.lexists(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
        self._check_safe()
        for path in (self._images, self._staging, self._replaced, self._consumed):
            make_directory(path)

    def _check_safe(self) -> None:
        if os.path.lexists(self.path):
            check_mode(self.path)

    @contextmanager
    def _locked(self) -> Generator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self.path / "lock", flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
