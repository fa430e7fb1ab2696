"""The volume is another one, or somebody else uses it: what the image had open in it must be had again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.containers import PYTHON
from tests.truth import sources
from tests.truth.mounts import entry
from tests.truth.place import World
from tests.truth.scenario import Scenario, Source, as_it_is, counting


def _source(name: str, *before: str, **more: Any) -> Source:
    return Source(name=name, args=counting(*before, **more), edit=sources.with_volume)


_LINKED = _source(
    *("linked", "import os", "f = open('/vol/a', 'w+')", "f.write('kept')", "f.flush()"),
    *("os.link('/vol/a', '/vol/b')", "os.unlink('/vol/a')"),
    each=("f.seek(0)", "assert f.read() == 'kept'"),
)
_GHOST = _source(
    *(
        "ghost-below",
        "import os",
        "os.makedirs('/vol/sub')",
        "f = open('/vol/sub/x', 'w+')",
        "f.write('kept')",
    ),
    *("f.flush()", "os.unlink('/vol/sub/x')"),
    each=("f.seek(0)", "assert f.read() == 'kept'"),
)
_SOCKET = _source(
    "bound-in-volume", "import socket", "s = socket.socket(1)", "s.bind('/vol/s')", "s.listen()"
)
_PROGRAM = _source(
    *("program", "import os, shutil, subprocess", "shutil.copy('/bin/sleep', '/vol/sl')"),
    *("p = subprocess.Popen(['/vol/sl', '1000'])",),
    each=("assert p.poll() is None",),
)
_DATA = _source("data", "import shutil", "shutil.copy('/bin/sleep', '/vol/sl')", "f = open('/vol/sl', 'r+b')")
_TWICE = _source(
    "twice", "f = open('/vol/state', 'w+')", "f.write('s' * 10)", "f.flush()", "g = open('/vol/state')"
)


def _copy(world: World, *, without: str = "") -> Path:
    """The new container has a copy of the volume."""
    mount = entry(world, "/vol")
    made = world.bundle_path / "volume"
    made.mkdir(exist_ok=True)
    subprocess.run(["cp", "-a", f"{mount['source']}/.", made], check=True)
    for path in made.glob(without) if without else ():
        path.unlink()
    mount["source"] = str(made)
    return made


def _copied(world: World) -> None:
    _copy(world, without="link_remap*")


def _read_only(*options: str) -> Callable[[World], object]:
    def change(world: World) -> None:
        made = world.bundle_path / "volume"
        made.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tt", made], check=True)
        world.closers.append(lambda: subprocess.run(["umount", "-l", made], check=True))
        _copy(world)
        subprocess.run(["mount", "-o", f"remount,{','.join(options)}", made], check=True)

    return change


def _file_for_directory(world: World) -> None:
    made = _copy(world)
    (made / "sub").rmdir()
    (made / "sub").touch()


def _written(world: World) -> None:
    made = _copy(world)
    text = "import sys; f = open(sys.argv[1], 'r+b'); print(1, flush=True); input()"
    world.beside(PYTHON, "-IS", "-c", text, made / "sl")


def _executed(world: World) -> None:
    world.beside("sh", "-c", f"echo 1; exec '{entry(world, '/vol')['source']}/sl' 1000")


def _of(name: str, source: Source, change: Callable[[World], object] = as_it_is) -> Scenario:
    return Scenario(kind="volumes", name=name, source=source, change=change)


SCENARIOS = (
    _of("a file with one of two names removed", _LINKED),
    _of("a file with one of two names removed, another volume", _LINKED, _copied),
    _of("a deleted file of a volume, a file for its directory", _GHOST, _file_for_directory),
    _of("a deleted file of a volume that is read-only", _GHOST, _read_only("ro")),
    _of("a unix socket in a volume that is read-only", _SOCKET, _read_only("ro")),
    _of("a file open in a volume that is read-only", sources.VOLUME, _read_only("ro")),
    _of("a file open in a volume mounted read-only", sources.VOLUME, _read_only("bind", "ro")),
    _of("a file open twice in a volume that is read-only", _TWICE, _read_only("ro")),
    _of("a program in a volume", _PROGRAM),
    _of("a program in a volume that is read-only", _PROGRAM, _read_only("ro")),
    _of("a program that another has open for writing", _PROGRAM, _written),
    _of("an open file that another runs as a program", _DATA, _executed),
)
