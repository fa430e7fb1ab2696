"""Reads CRIU's image files, with the message types of the pycriu that comes with the toolchain.

pycriu's own package imports everything it has, leaves `sys.path` changed and turns each entry into a
dictionary. Here only the message types that are asked for are imported, and its folder is on `sys.path` only
meanwhile. The framing (magic, then length and message, repeated) is read here, so that a truncated file is
an error and not a shorter list.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from engines.api import EngineUnavailable, ImageCorrupt, ImageNotFound

Message = Any
"""A protobuf message. pycriu has no type stubs: attributes are CRIU's field names."""

_TYPES: Mapping[str, tuple[str, str]] = {
    "INVENTORY": ("inventory_pb2", "inventory_entry"),
    "PSTREE": ("pstree_pb2", "pstree_entry"),
    "CORE": ("core_pb2", "core_entry"),
    "IDS": ("core_pb2", "task_kobj_ids_entry"),
    "CREDS": ("creds_pb2", "creds_entry"),
    "SECCOMP": ("seccomp_pb2", "seccomp_entry"),
    "MM": ("mm_pb2", "mm_entry"),
    "FILES": ("fdinfo_pb2", "file_entry"),
    "FDINFO": ("fdinfo_pb2", "fdinfo_entry"),
    "FS": ("fs_pb2", "fs_entry"),
    "FILE_LOCKS": ("file_lock_pb2", "file_lock_entry"),
    "REMAP_FPATH": ("remap_file_path_pb2", "remap_file_path_entry"),
    "MNTS": ("mnt_pb2", "mnt_entry"),
    "NETNS": ("netdev_pb2", "netns_entry"),
    "TTY_INFO": ("tty_pb2", "tty_info_entry"),
    "USERNS": ("userns_pb2", "userns_entry"),
    "PAGEMAP": ("pagemap_pb2", "pagemap_entry"),
    "CPUINFO": ("cpuinfo_pb2", "cpuinfo_entry"),
    "STATS": ("stats_pb2", "stats_entry"),
}
_HEADS: Mapping[str, tuple[str, str]] = {"PAGEMAP": ("pagemap_pb2", "pagemap_head")}
# A module that another thread has begun to load is in sys.modules already, and empty.
_LOADING = threading.Lock()
_MAX_BYTES = 1 << 30  # no image file but the pages is near that; a damaged one must not fill the memory


class ImageReader:
    """Reads the image files of one directory.

    python_path: a directory that holds the `pycriu` package, None if it is importable as it is.
    Raises ImageNotFound if there is no such directory, EngineUnavailable without pycriu.
    """

    def __init__(self, image_path: Path, python_path: Path | None) -> None:
        if not image_path.is_dir():
            raise ImageNotFound(
                f"could not read image '{image_path}': there is no such directory; name another"
            )
        self.path = image_path
        self._types = schema(python_path)

    def exists(self, name: str) -> bool:
        """Whether the file is there and no link."""
        try:
            return stat.S_ISREG((self.path / name).lstat().st_mode)
        except FileNotFoundError:
            return False

    def read(self, name: str, kind: str) -> list[Message]:
        """All entries of one image file, the head of a pagemap left out.

        name: of the file, for example "core-1.img". kind: its magic's name, for example "CORE".
        Raises ImageCorrupt if the file is missing, a link, cut short or of another kind.
        """
        return read_file(self.path / name, kind, self._types)

    def one(self, name: str, kind: str) -> Message:
        """The only entry of one image file. Raises ImageCorrupt."""
        entries = self.read(name, kind)
        if len(entries) != 1:
            raise _corrupt(self.path / name, f"it has {len(entries)} entries where one belongs")
        return entries[0]

    def open(self, name: str) -> int:
        """A descriptor of a file, no link followed. Raises ImageCorrupt if it is missing."""
        return _open(self.path / name)


class Schema:
    """pycriu's message types by image kind."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        magic = _load_alone(directory / "magic.py")
        self.numbers: Mapping[str, int] = magic.by_name

    def message(self, kind: str) -> Callable[[], Message]:
        """The type of an entry of this kind."""
        return self._type(*_TYPES[kind])

    def head(self, kind: str) -> Callable[[], Message] | None:
        """The type of the first entry where it differs from the rest."""
        return self._type(*_HEADS[kind]) if kind in _HEADS else None

    def _type(self, module_name: str, message: str) -> Callable[[], Message]:
        with _LOADING:
            module = sys.modules.get(module_name) or self._import(module_name)
        if Path(str(module.__file__)).parent != self._directory:
            raise EngineUnavailable(
                f"could not load pycriu: another '{module_name}' is imported already ({module.__file__}); "
                "remove that package"
            )
        return getattr(module, message)

    def _import(self, module_name: str) -> Any:
        # The generated modules import each other by their bare names.
        sys.path.insert(0, str(self._directory))
        try:
            return importlib.import_module(module_name)
        except ImportError as error:
            raise EngineUnavailable(
                f"could not load pycriu from '{self._directory}': {error}; run `torpor toolchain install`"
            ) from error
        finally:
            sys.path.remove(str(self._directory))


@cache
def schema(python_path: Path | None) -> Schema:
    """Message types of the pycriu under python_path, None to find it where Python looks.

    Raises EngineUnavailable if it is not there.
    """
    if python_path is not None:
        package = python_path / "pycriu"
    else:
        found = importlib.util.find_spec("pycriu")
        places = list(found.submodule_search_locations or ()) if found else []
        package = Path(places[0]) if places else Path("pycriu")
    directory = (package / "images").resolve()
    if not (directory / "magic.py").is_file():
        raise EngineUnavailable(
            f"could not load pycriu: there is none in '{python_path or 'the Python path'}'; "
            "run `torpor toolchain install`"
        )
    return Schema(directory)


def load_all(python_path: Path | None) -> None:
    """Load every message type, so that nobody waits for that later. Raises EngineUnavailable."""
    types = schema(python_path)
    for kind in _TYPES:
        types.message(kind)


def read_file(path: Path, kind: str, types: Schema) -> list[Message]:
    """All entries of one image file, the head of a pagemap left out. Raises ImageCorrupt."""
    with open(_open(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_BYTES:
            raise _corrupt(path, f"it is {size} bytes long")
        data = file.read()
    offset = _check_magic(path, data, kind, types)
    make, head = types.message(kind), types.head(kind)
    entries: list[Message] = []
    for payload in _payloads(path, data, offset):
        entry = (head or make)()
        try:
            entry.ParseFromString(payload)
        except Exception as error:  # protobuf's DecodeError, without importing protobuf for its name
            raise _corrupt(path, f"an entry does not parse ({error})") from None
        if head is None:
            entries.append(entry)
        head = None
    return entries


def text(name: str | bytes) -> str:
    """A name from an image, which protobuf gives as bytes where it is no UTF-8; those are kept."""
    return os.fsdecode(name)


def _check_magic(path: Path, data: bytes, kind: str, types: Schema) -> int:
    """Where the entries begin. Inventories have one magic, everything else has two."""
    want = types.numbers[kind]
    common = {types.numbers["IMG_COMMON"], types.numbers["IMG_SERVICE"]}
    offset, words = 0, struct.unpack_from("<2I", data) if len(data) >= 8 else (0, 0)
    found = words[0]
    if found in common:
        offset, found = 4, words[1]
    if found != want:
        raise _corrupt(path, f"it does not begin as a {kind} image does")
    return offset + 4


def _payloads(path: Path, data: bytes, offset: int) -> Iterator[memoryview]:
    view = memoryview(data)
    while offset < len(data):
        if offset + 4 > len(data):
            raise _corrupt(path, "it is cut short")
        (length,) = struct.unpack_from("<I", data, offset)
        offset += 4
        if offset + length > len(data):
            raise _corrupt(path, "it is cut short")
        yield view[offset : offset + length]
        offset += length


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _corrupt(path, error.strerror or str(error)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _corrupt(path, "it is no regular file")
    return descriptor


def _corrupt(path: Path, cause: str) -> ImageCorrupt:
    return ImageCorrupt(
        f"could not read image '{path.parent}': {path.name}: {cause}; "
        "take the checkpoint again, or copy it again"
    )


def _load_alone(path: Path) -> Any:
    """Run one file of pycriu as a module that nobody else sees (its name, `magic`, belongs to others)."""
    spec = importlib.util.spec_from_file_location("_torpor_criu_magic", path)
    if spec is None or spec.loader is None:
        raise EngineUnavailable(f"could not load '{path}'; run `torpor toolchain install`")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
