"""The root file system is another one: what the tasks had open is there, or it is not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.truth import sources
from tests.truth.place import World
from tests.truth.scenario import Scenario, Source, as_it_is


def at(path: str, change: Callable[[Path], object]) -> Callable[[World], object]:
    """Change one path of the new root file system."""
    return lambda world: change(world.rootfs / path)


def grow(path: Path) -> None:
    """Append to a file."""
    with path.open("a") as file:
        file.write("more")


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _again(path: Path) -> None:
    """The same content in another file."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def _unlink_odd(world: World) -> None:
    odd = os.fsdecode(sources.ODD)
    (world.rootfs / "data" / odd / f"{odd}log").unlink()


def _empty(world: World) -> None:
    for path in (world.rootfs / "data").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _of(
    name: str, source: Source, change: Callable[[World], object] = as_it_is, *, short: bool = False
) -> Scenario:
    return Scenario(kind="files", name=name, source=source, change=change, short=short)


SCENARIOS = (
    _of("files open, none changed", sources.FILES, short=True),
    _of("an open file is another with the same content", sources.FILES, at("data/log", _again)),
    _of("a file that nobody has open was added", sources.FILES, at("data/new", Path.touch)),
    _of("a file that is open to append has grown", sources.FILES, at("data/more", grow)),
    _of("an open file is missing", sources.FILES, at("data/log", Path.unlink), short=True),
    _of("an open file has grown", sources.FILES, at("data/log", grow), short=True),
    _of("an open file was cut short", sources.FILES, at("data/log", lambda path: os.truncate(path, 5))),
    _of("an open file has another mode", sources.FILES, at("data/log", lambda path: path.chmod(0o600))),
    _of("an open file is a directory", sources.FILES, at("data/log", _directory)),
    _of("the place of a deleted file is missing", sources.FILES, at("data", shutil.rmtree)),
    _of("a library as it was", sources.LIBRARY),
    _of(
        "a library is another build of the same size",
        sources.LIBRARY,
        at("data/answer.so", lambda path: sources.library(path, 42)),
        short=True,
    ),
    _of("a library is missing", sources.LIBRARY, at("data/answer.so", Path.unlink)),
    _of("a library is longer", sources.LIBRARY, at("data/answer.so", grow)),
    _of("names that are no text, none changed", sources.ODD_NAMES, short=True),
    _of("a file whose name is no text is missing", sources.ODD_NAMES, _unlink_odd),
    _of("a mapped file as it was", sources.MAPPED),
    _of("a mapped file is missing", sources.MAPPED, at("data/map", Path.unlink)),
    _of("a mapped file was cut short", sources.MAPPED, at("data/map", lambda path: os.truncate(path, 4096))),
    _of("the working directory is there", sources.WORKING_DIRECTORY),
    _of("the working directory is missing", sources.WORKING_DIRECTORY, at("data/here", Path.rmdir)),
    _of("an open directory is missing", sources.DIRECTORY, at("data/here", Path.rmdir)),
    _of("an open FIFO is missing", sources.FIFO, at("data/fifo", Path.unlink)),
    _of("a listening unix socket, its file there", sources.UNIX_SOCKET),
    _of("a listening unix socket, its file gone", sources.UNIX_SOCKET, at("data/run/sock", Path.unlink)),
    _of("the directory of a unix socket is missing", sources.UNIX_SOCKET, at("data/run", shutil.rmtree)),
    _of("a watched directory is missing", sources.WATCH, at("data/here", Path.rmdir)),
    _of("an empty root file system, nothing open", sources.PLAIN, _empty),
)
