"""Open and mapped files, looked at on this node."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compat.elf import build_id
from compat.rules.case import Case, finding, is_bind, rule, specified_mounts
from engines.api import FileNeed, Finding, Needs


@rule(
    *("files.missing", "files.size", "files.mode", "files.build-id"),
    about="here",
    source="CRIU compares size and mode and fails; another build of the same size was seen to crash later",
)
def in_volumes(case: Case) -> Iterator[Finding]:
    """Files that tasks have open in what the spec binds in from elsewhere must be as they were. The root file
    system's own are looked at when the image's changes are in it. Restore over the same volumes.
    """
    return files(case.needs, case.new, case.rootfs_path, complete=False)


def files(
    needs: Needs, spec: Mapping[str, Any], rootfs_path: Path | None, *, complete: bool
) -> Iterator[Finding]:
    """Open and mapped files must be there with the same size and mode: CRIU refuses anything else. Of
    programs and libraries the build is compared too, which CRIU does not do: another one crashes later.

    complete: the image's changes are already in the root file system; else only what the spec binds in from
    elsewhere can be looked at.
    """
    specified = specified_mounts(spec, rootfs_path)
    sources = {path: Path(str(entry.get("source"))) for path, entry in specified.items() if is_bind(entry)}
    root = rootfs_path if complete else None
    destinations = sorted({mount.destination for mount in needs.mounts}, key=len, reverse=True)
    for need in needs.files:
        base = next((path for path in destinations if _beneath(need.path, path)), "/")
        source = sources.get(base) if base != "/" else root
        if source is not None:
            inside = need.path.removeprefix(base).lstrip("/")
            yield from _same_file(need, source / inside if inside else source, content=complete)


def _beneath(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top.rstrip('/')}/")


def _same_file(need: FileNeed, path: Path, *, content: bool) -> Iterator[Finding]:
    remedy = "restore over the container image and the volumes of the dump"
    try:
        found = path.lstat()
    except OSError as error:
        yield finding(
            "files.missing", "refuse", f"the image has '{need.path}' open: {error.strerror}", remedy
        )
        return
    if not stat.S_ISREG(found.st_mode):
        yield finding("files.missing", "refuse", f"'{need.path}' is no regular file here", remedy)
    elif need.size_bytes not in {-1, found.st_size}:
        yield finding(
            "files.size",
            "refuse",
            f"the image has '{need.path}' open with {need.size_bytes} bytes, here it has {found.st_size}",
            remedy,
        )
    elif need.mode not in {-1, stat.S_IMODE(found.st_mode)}:
        yield finding(
            "files.mode",
            "refuse",
            f"the image has '{need.path}' open with mode {need.mode:04o}, here it is "
            f"{stat.S_IMODE(found.st_mode):04o}",
            remedy,
        )
    elif content and need.build_id and not _may_be_build(need.build_id, path):
        yield finding(
            "files.build-id",
            "refuse",
            f"the image has '{need.path}' mapped, and here that is another build of the same size",
            remedy,
        )


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
