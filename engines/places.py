"""Where paths of a container lie on the node. Links lead as the container sees them, so that none leads to
files of the node that the container does not have.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_MAX_LINKS = 40  # the kernel's own limit


class Places:
    """A container's root file system and what is mounted in it.

    root: where its files lie, None if that is not known. mounts: places inside, as `resolve` gives them, to
    where their files lie, None for what lies nowhere on the node.
    """

    def __init__(self, root: Path | None, mounts: Mapping[str, Path | None]) -> None:
        self._places = {**mounts, "/": root}
        self._tops = sorted(self._places, key=len, reverse=True)
        self._real: dict[str, str] = {}  # directories to where they really are

    def real(self, path: str) -> str:
        """A path with the links on the way to it followed, but not itself if it is one, as far as files are
        known. Raises OSError (ELOOP) where there are too many.
        """
        folder, name = os.path.split(path)
        if name in {"", ".", ".."}:
            folder, name = path, ""
        if folder not in self._real:
            self._real[folder] = _follow(folder, self.on_node)
        real = self._real[folder]
        return os.path.join(real, name) if name else real  # noqa: PTH118

    def top(self, path: str, *, beneath: bool = False) -> str:
        """The mount that a real path lies in. beneath: not the one that is on this very place."""
        tops = (top for top in self._tops if _within(path, top) and not (beneath and path == top))
        return next(tops, "/")

    def on_node(self, path: str, *, beneath: bool = False) -> Path | None:
        """Where a real path lies on the node, None if nowhere or unknown. beneath: see `top`."""
        top = self.top(path, beneath=beneath)
        place = self._places[top]
        inside = path.removeprefix(top).lstrip("/")
        return place / inside if place and inside else place


def resolve(root: Path | None, path: str) -> str:
    """Where a mount's destination really lies: runtimes follow links inside the root file system, and CRIU
    records the result (`/var/run/secrets` becomes `/run/secrets`). Without a root file system, or with too
    many links, the path as it is.
    """
    if root is not None:
        with contextlib.suppress(OSError):
            return _follow(path, lambda inside: root / inside.lstrip("/"))
    return os.path.normpath(path)


def source(mount: Mapping[str, Any]) -> Path | None:
    """Where the files of a specification's mount lie on the node, None if it binds nothing in."""
    path = str(mount.get("source") or "")
    # The runtime follows its links, and as the node sees them: whoever wrote the specification may name it.
    return Path(os.path.realpath(path)) if is_bind(mount) and path.startswith("/") else None


def is_bind(mount: Mapping[str, Any]) -> bool:
    """Whether a specification's mount shows something that exists elsewhere."""
    return mount.get("type") == "bind" or bool({"bind", "rbind"} & set(mount.get("options") or ()))


def _follow(path: str, place: Callable[[str], Path | None]) -> str:
    waiting = path.split("/")[::-1]
    found: list[str] = []
    links = 0
    while waiting:
        name = waiting.pop()
        if name == "..":
            found[-1:] = []
        elif name not in {"", "."}:
            target = _target(place("/" + "/".join([*found, name])))
            if target is None:
                found.append(name)
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            found = [] if target.startswith("/") else found
            waiting += target.split("/")[::-1]
    return "/" + "/".join(found)


def _target(place: Path | None) -> str | None:
    """What a link refers to, None if there is none."""
    try:
        return str(place.readlink()) if place else None
    except (OSError, ValueError):  # another file or none, or a name that no file can have
        return None


def _within(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top.rstrip('/')}/")
