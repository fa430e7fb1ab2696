"""Memory that travels before the freeze, between a source and a target that are threads of this test."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster import cargo
from cluster.beforehand import Beforehand
from cluster.channel import Channel, Lost, Refused
from cluster.messages import Answer, Parent
from cluster.serve import _Session  # pyright: ignore[reportPrivateUsage]
from engines.api import CheckpointRequest, DumpFailed, DumpStats
from shim.errors import ShimError
from shim.images.layout import CHECKPOINT
from shim.images.manifest import FileDigest
from shim.images.seal import check_files
from shim.images.store import Store
from tests.unit.images.test_store import manifest

PAGES_BYTES = 3 << 20


class Place:
    """Both sides. room: how often the target has room. passes: what each pre-dump writes, or how it fails."""

    def __init__(self, path: Path, passes: list[int | Exception], room: int) -> None:
        self.path = path
        self.passes = passes
        self.room = room
        self.asked: list[Path | None] = []
        ours, theirs = socket.socketpair()
        self.channel, self._theirs = Channel(ours, "b"), Channel(theirs, "a")
        self.store = Store(path / "store")
        self.stack = contextlib.ExitStack()
        there = cast(
            "Any", SimpleNamespace(node=SimpleNamespace(store=self.store), audit=lambda *_, **__: None)
        )
        self.session = _Session(there, self._theirs, self.stack)
        self.session._arriving = cast("Any", SimpleNamespace(check_space=self._check_space))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        here = SimpleNamespace(check_room=lambda _: None, engine=lambda *_: self)
        found = SimpleNamespace(
            root="", node=SimpleNamespace(config=SimpleNamespace(checkpoint_timeout_s=1.0))
        )
        source = SimpleNamespace(container_id="c", directory=path / "state", bundle_path=path)
        self.record = path / "record"
        self.record.mkdir()
        self.before = Beforehand(
            cast("Any", here),
            cast("Any", found),
            cast("Any", source),
            cast("Any", SimpleNamespace(path=self.record)),
        )

    def _check_space(self, _: int) -> None:
        self.room -= 1
        if self.room < 0:
            raise ShimError("its store has 0 MiB free")

    def _serve(self) -> None:
        with contextlib.suppress(Lost):
            while True:
                self.session.answer(self._theirs.receive(patient=True))

    def pre_dump(self, request: CheckpointRequest) -> DumpStats:
        """An engine's."""
        self.asked.append(request.parent_path)
        wrote = self.passes.pop(0)
        if isinstance(wrote, Exception):
            raise wrote
        self.dump(request.image_path, wrote)
        return DumpStats(frozen_s=0, total_s=0, image_bytes=0, pages_bytes=wrote)

    def dump(self, path: Path, n_bytes: int) -> None:
        """Write what CRIU writes: pages, something else, and a link to what went before."""
        path.mkdir(parents=True)
        (path / "pages-1.img").write_bytes(os.urandom(n_bytes % PAGES_BYTES))
        (path / "inventory.img").write_bytes(os.urandom(9))
        if self.before.path is not None:
            (path / "parent").symlink_to(os.path.relpath(self.before.path, path))

    def finish(self) -> tuple[Path, Path, dict[str, FileDigest]]:
        """The last dump, sent as it is when nobody runs; the image here, there, and its digests."""
        image, complete = self.record / "image", threading.Event()
        complete.set()
        self.dump(image / CHECKPOINT, 5)
        self.before.put_under(image / CHECKPOINT)
        digests = cargo.send_memory(self.channel, image, complete, self.before.sent)
        self.close()
        assert self.session._staged is not None
        return image, self.session._staged, digests

    def close(self) -> None:
        self.channel.close()
        self._thread.join()
        self._theirs.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    places: list[Place] = []

    def made(*passes: int | Exception, room: int = 9) -> Place:
        places.append(Place(tmp_path, list(passes), room))
        return places[-1]

    yield made
    for place in places:
        place.close()
        place.stack.close()


def tree(path: Path) -> dict[str, bytes]:
    """Files by name. A link or a device in it is an error."""
    assert not [each for each in path.rglob("*") if each.is_symlink()]
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


MUCH = (64 << 20) + 7
FAILED = DumpFailed("could not pre-dump container 'c': it did not", after="running")


@pytest.mark.parametrize(
    ("passes", "room", "depth", "said"),
    [
        ([MUCH, MUCH], 9, 2, ""),
        ([MUCH, 7], 9, 2, ""),
        ([7], 9, 1, ""),  # there was little to copy: another pass would find less
        ([FAILED], 9, 0, "it did not"),
        ([MUCH, FAILED], 9, 1, "it did not"),
        ([MUCH], 0, 0, "0 MiB free"),
        ([MUCH, MUCH], 1, 1, "0 MiB free"),
    ],
)
def test_both_nodes_have_the_same_image_whatever_became_of_a_pass(
    make: Any, passes: list[int | Exception], room: int, depth: int, said: str
) -> None:
    place: Place = make(*passes, room=room)
    warnings = place.before.copy(place.channel, "criu")
    assert [said in warning for warning in warnings] == ([True] if said else [])
    assert place.passes == []
    image, staged, digests = place.finish()
    here, there = tree(image), tree(staged)
    assert here == there
    assert here.keys() == digests.keys()
    assert max(name.count("parent/") for name in here) == depth
    assert place.before.n_bytes == sum(len(data) for name, data in here.items() if "parent/" in name)
    check_files(
        replace(manifest(), files=digests),
        checkpoint_path=staged / CHECKPOINT,
        extras_path=staged,
        pages=False,
        what="it",
    )


@pytest.mark.parametrize(
    "name", ["checkpoint/parent", "parent", "parent/x", "checkpoint/parent/x", "checkpoint/../parent"]
)
def test_what_a_parent_is_no_peer_says_by_name(make: Any, tmp_path: Path, name: str) -> None:
    place: Place = make()
    (tmp_path / "x").write_bytes(b"x")
    cargo.send(place.channel, "image", name, tmp_path / "x")
    with pytest.raises(Refused, match="none of an image"):
        place.channel.ask(Parent(), Answer)
    assert place.session._staged is None


def test_a_peer_does_not_choose_how_deep_directories_are(make: Any, tmp_path: Path) -> None:
    place: Place = make()
    (tmp_path / "x").write_bytes(b"x")
    for _ in range(4):
        cargo.send(place.channel, "image", "checkpoint/x.img", tmp_path / "x")
        place.channel.ask(Parent(), Answer)
    with pytest.raises(Refused, match="there are 4 before it"):
        place.channel.ask(Parent(), Answer)


def test_a_parent_takes_the_place_of_a_link_and_of_nothing_else(make: Any, tmp_path: Path) -> None:
    place: Place = make()
    place.before.path = tmp_path / "before"
    place.before.path.mkdir()
    (tmp_path / "checkpoint/parent").mkdir(parents=True)
    with pytest.raises(OSError, match="parent"):
        place.before.put_under(tmp_path / "checkpoint")
