"""Closing an image (digests of every file, on disk for good) and checking it afterwards.

An image lies either in one directory (the store: `checkpoint/` beside torpor's files) or in two (made for a
runtime caller: the caller's image directory, which then is `checkpoint_path` and `extras_path` in one, and
torpor's files have the prefix `torpor-`). The names in the manifest are the same, so one manifest fits both.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from engines.api import ImageCorrupt, ImageError
from shim.images.beneath import open_plain
from shim.images.layout import CHECKPOINT, EXTRAS, EXTRAS_PREFIX, MANIFEST, UNSEALED, is_page_file
from shim.images.manifest import FileDigest, Manifest

N_HASH_THREADS = 2

OnBytes = Callable[[int], None]
"""Called with the number of bytes that were just worked through, from any thread."""


class _Progress:
    """A reader that tells how far hashing has come."""

    def __init__(self, fd: int, on_bytes: OnBytes | None) -> None:
        self._fd = fd
        self._on_bytes = on_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:
        n_read = os.readv(self._fd, [buffer])
        if self._on_bytes is not None and n_read:
            self._on_bytes(n_read)
        return n_read


def cause_of(error: OSError) -> str:
    """The cause of a failed file operation in words that say what to do about a full disk."""
    name = f" ({error.filename})" if error.filename else ""
    text = f"{os.strerror(error.errno) if error.errno else error}{name}"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return f"{text}; free some space or remove images with `torpor images rm`"
    return text


def locate(name: str, *, checkpoint_path: Path, extras_path: Path) -> tuple[Path, str]:
    """Where a file of the manifest lies: a directory and the name below it."""
    if name.startswith(CHECKPOINT + "/"):
        return checkpoint_path, name.removeprefix(CHECKPOINT + "/")
    return extras_path, f"{EXTRAS_PREFIX}{name}" if extras_path == checkpoint_path else name


def flatten(image_path: Path) -> None:
    """Move torpor's files in a caller's image directory from their own directory up, with the prefix.

    Raises OSError.
    """
    extras_path = image_path / EXTRAS
    for path in extras_path.iterdir():
        path.rename(image_path / f"{EXTRAS_PREFIX}{path.name}")
    extras_path.rmdir()


def list_files(*, checkpoint_path: Path, extras_path: Path) -> dict[str, int]:
    """Names and sizes (bytes) of an image's files that belong to its digest.

    Raises ImageError on a link or device.
    """
    found: dict[str, int] = {}
    if extras_path == checkpoint_path:
        for name, size_bytes in _walk(checkpoint_path, skip=""):
            own = name.removeprefix(EXTRAS_PREFIX)
            found[own if own != name else f"{CHECKPOINT}/{name}"] = size_bytes
    else:
        split = extras_path.parent == checkpoint_path
        for name, size_bytes in _walk(checkpoint_path, skip=extras_path.name if split else ""):
            found[f"{CHECKPOINT}/{name}"] = size_bytes
        for name, size_bytes in _walk(extras_path, skip="" if split else CHECKPOINT):
            found[name] = size_bytes
    return {name: size_bytes for name, size_bytes in found.items() if name not in UNSEALED}


def damage(manifest: Manifest, *, checkpoint_path: Path, extras_path: Path) -> str:
    """The first file that is missing or of another size, in words; "" if none is. No content is read."""
    try:
        found = list_files(checkpoint_path=checkpoint_path, extras_path=extras_path)
    except OSError as error:
        return cause_of(error)
    except ImageError as error:
        return str(error)
    for name, file in manifest.files.items():
        size_bytes = found.get(name)
        if size_bytes is None:
            return f"'{name}' is missing"
        if size_bytes != file.size_bytes:
            return f"'{name}' has {size_bytes} bytes of {file.size_bytes}"
    return ""


def _walk(top: Path, *, skip: str) -> Iterator[tuple[str, int]]:
    pending = [""]
    while pending:
        below = pending.pop()
        with os.scandir(top / below) as entries:
            for entry in entries:
                name = f"{below}/{entry.name}" if below else entry.name
                if name == skip:
                    continue
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    pending.append(name)
                elif stat.S_ISREG(status.st_mode):
                    yield name, status.st_size
                else:
                    raise ImageError(
                        f"could not seal image '{top}': {name!r} is neither a file nor a directory "
                        "(an incremental dump links to its parent); make a full checkpoint"
                    )


def _hash(directory: Path, name: str, *, on_bytes: OnBytes | None, sync: bool) -> FileDigest:
    fd = open_plain(directory, name)
    try:
        size_bytes = os.fstat(fd).st_size
        digest = hashlib.file_digest(_Progress(fd, on_bytes), "sha256")  # type: ignore[arg-type]  # duck-typed
        if sync:
            os.fchmod(fd, 0o400)
            os.fsync(fd)
    finally:
        os.close(fd)
    return FileDigest(sha256=digest.hexdigest(), size_bytes=size_bytes)


def hash_files(
    names: list[str], *, checkpoint_path: Path, extras_path: Path, on_bytes: OnBytes | None = None, sync: bool
) -> dict[str, FileDigest]:
    """Digests of the named files, two at a time if there is memory among them.

    sync: also make them read-only and force them to disk.
    Raises OSError.
    """

    def one(name: str) -> FileDigest:
        directory, below = locate(name, checkpoint_path=checkpoint_path, extras_path=extras_path)
        return _hash(directory, below, on_bytes=on_bytes, sync=sync)

    if not any(map(is_page_file, names)):
        return {name: one(name) for name in names}
    from concurrent.futures import ThreadPoolExecutor  # longer to import than to hash what is not pages

    with ThreadPoolExecutor(N_HASH_THREADS, thread_name_prefix="hash") as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def seal(
    manifest: Manifest,
    *,
    checkpoint_path: Path,
    extras_path: Path,
    on_bytes: OnBytes | None = None,
    known: Mapping[str, FileDigest] | None = None,
) -> Manifest:
    """Write manifest.json into `extras_path` with the digest of every file; all of it is on disk afterwards.

    Modes become 0400 and 0700; of a container with a user namespace the engine's files become readable to all
    who get as far, which below the store is root. known: digests of files that were just checked, so that
    large files are read once. Returns the manifest with its files. Raises ImageError.
    """
    try:
        sizes = list_files(checkpoint_path=checkpoint_path, extras_path=extras_path)
        trusted = {name: digest for name, digest in (known or {}).items() if name in sizes}
        fresh = sorted(set(sizes) - set(trusted), key=lambda name: -sizes[name])
        files = hash_files(
            fresh, checkpoint_path=checkpoint_path, extras_path=extras_path, on_bytes=on_bytes, sync=True
        )
        for name in trusted:
            directory, below = locate(name, checkpoint_path=checkpoint_path, extras_path=extras_path)
            _settle(directory, below)
        sealed = replace(manifest, files={**files, **trusted})
        directory, below = locate(MANIFEST, checkpoint_path=checkpoint_path, extras_path=extras_path)
        write_file(directory / below, sealed.to_bytes())
        for top in (checkpoint_path, extras_path):
            _settle_directories(top)
        if manifest.security.uid_map:
            _open_to_user_namespace(checkpoint_path)
    except OSError as error:
        raise ImageError(f"could not seal image '{extras_path}': {cause_of(error)}") from error
    return sealed


def _settle(directory: Path, name: str) -> None:
    fd = open_plain(directory, name)
    try:
        os.fchmod(fd, 0o400)
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_to_user_namespace(checkpoint_path: Path) -> None:
    """CRIU opens an image from inside the user namespace that it restores, as nobody in particular."""
    for directory, _, names in os.walk(checkpoint_path):
        Path(directory).chmod(0o755)
        for name in names:
            if not name.startswith(EXTRAS_PREFIX):
                (Path(directory) / name).chmod(0o444)


def _settle_directories(top: Path) -> None:
    for directory, _, _ in os.walk(top):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fchmod(fd, 0o700)
            os.fsync(fd)
        finally:
            os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file of mode 0400 and force it to disk. An existing one is replaced. Raises OSError."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o400)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def check_files(
    manifest: Manifest,
    *,
    checkpoint_path: Path,
    extras_path: Path,
    pages: bool,
    what: str,
    on_bytes: OnBytes | None = None,
) -> None:
    """Compare an image's files with its manifest: names and sizes always, content but of pages always.

    pages: also hash the page files. what: the image in words. Raises ImageCorrupt.
    """
    remedy = "remove it and checkpoint or import again"
    try:
        sizes = list_files(checkpoint_path=checkpoint_path, extras_path=extras_path)
        if missing := sorted(set(manifest.files) - set(sizes)):
            raise ImageCorrupt(f"could not verify {what}: file {missing[0]!r} is missing; {remedy}")
        if surplus := sorted(set(sizes) - set(manifest.files)):
            raise ImageCorrupt(
                f"could not verify {what}: file {surplus[0]!r} is not in its manifest; {remedy}"
            )
        for name, wanted in sorted(manifest.files.items()):
            if sizes[name] != wanted.size_bytes:
                raise ImageCorrupt(
                    f"could not verify {what}: file {name!r} has {sizes[name]} bytes, not "
                    f"{wanted.size_bytes}; {remedy}"
                )
        names = sorted(
            (name for name in manifest.files if pages or not is_page_file(name)),
            key=lambda name: -sizes[name],
        )
        found = hash_files(
            names, checkpoint_path=checkpoint_path, extras_path=extras_path, on_bytes=on_bytes, sync=False
        )
    except ImageCorrupt:
        raise
    except ImageError as error:
        raise ImageCorrupt(f"could not verify {what}: {error}") from error
    except OSError as error:
        raise ImageCorrupt(f"could not verify {what}: {cause_of(error)}") from error
    for name, digest in found.items():
        if digest.sha256 != manifest.files[name].sha256:
            raise ImageCorrupt(f"could not verify {what}: the content of {name!r} was changed; {remedy}")
