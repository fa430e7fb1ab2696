"""Memory that travels before the freeze, where the engine and the kernel can tell what changes afterwards.

Each pass is sent as an image's engine files are. Once the target has all of it, it becomes the parent of what
comes from then on: on both nodes a directory `parent` among the engine's files, which is where CRIU looks for
what a later dump left out. The engine itself makes a link of that name; it never travels.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from cluster import cargo
from cluster.channel import Channel, Refused
from cluster.here import Here
from cluster.messages import Answer, Parent
from cluster.records import Record
from engines.api import CheckpointRequest, DumpStats, EngineError
from shim import bundle, state
from shim.checkpoint import Source
from shim.cli.node import Found
from shim.errors import ShimError
from shim.images import layout
from shim.images.manifest import FileDigest

_N_PASSES = 2
_LITTLE_BYTES = 8 << 20  # travels in less time than a pass takes


class Beforehand:
    """Copies of one container's memory.

    path: of the last one, None without any. sent: what the target has of them.
    """

    def __init__(self, here: Here, found: Found, source: Source, record: Record) -> None:
        self._here, self._found, self._source, self._record = here, found, source, record
        self._memory_bytes = 0
        self.path: Path | None = None
        self.sent: dict[str, FileDigest] = {}

    @property
    def n_bytes(self) -> int:
        """What the target has."""
        return sum(file.size_bytes for file in self.sent.values())

    def measure(self) -> int:
        """Resident memory of the container, in bytes: about the size of its image."""
        runtime_path = self._found.node.config.runtime_path
        self._memory_bytes = 0
        for pid in bundle.processes(runtime_path, self._found.root, self._source.container_id):
            with contextlib.suppress(OSError):
                self._memory_bytes += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
        return self._memory_bytes

    def can(self, engine: str) -> bool:
        """Whether it is worth while, and the engine says that this node allows it. After `measure`."""
        if self._memory_bytes <= _LITTLE_BYTES:
            return False
        found = self._here.engine(engine, self._found.root, self._source.directory).probe()
        return any(one.rule == f"{engine}.pre-dump" and one.severity == "ok" for one in found)

    def copy(self, channel: Channel, engine: str) -> list[str]:
        """Copy and send the memory while it runs; a sentence if not all went well, which does no harm.

        Raises Lost, OSError.
        """
        complete = threading.Event()
        complete.set()
        for number in range(_N_PASSES):
            image_path = self._record.path / f"before-{number}"
            image_path.mkdir(mode=0o700)
            checkpoint_path = image_path / layout.CHECKPOINT
            try:
                # For this one and what is dumped at last.
                self._here.check_room(2 * self._memory_bytes)
                stats = self._dump(engine, checkpoint_path)
            except (EngineError, ShimError) as error:
                return [_told(error)]
            self.put_under(checkpoint_path)
            sent = cargo.send_memory(channel, image_path, complete, self.sent)
            try:
                channel.ask(Parent(), Answer)
            except Refused as error:  # it has forgotten this one, but not those before
                self.path = self.path and checkpoint_path / layout.PARENT
                return [_told(error)]
            self.path, self.sent = checkpoint_path, _one_below(sent)
            if stats.pages_bytes <= _LITTLE_BYTES:
                break
        return []

    def _dump(self, engine: str, checkpoint_path: Path) -> DumpStats:
        source = self._source
        with state.locked(source.directory, wait_s=5.0, create=True):
            state.note_engine(source.directory, engine)
            return self._here.engine(engine, self._found.root, source.directory).pre_dump(
                CheckpointRequest(
                    container_id=source.container_id,
                    bundle_path=source.bundle_path,
                    image_path=checkpoint_path,
                    timeout_s=self._found.node.config.checkpoint_timeout_s,
                    parent_path=self.path,
                    leave_running=True,
                )
            )

    def put_under(self, checkpoint_path: Path) -> None:
        """Put the last copy in the place of the engine's link to it. Raises OSError."""
        if self.path is not None:
            link = checkpoint_path / layout.PARENT
            link.unlink()
            self.path.rename(link)


def _told(error: Exception) -> str:
    return f"less of its memory than could be was copied beforehand: {error}"


def _one_below(digests: dict[str, FileDigest]) -> dict[str, FileDigest]:
    """Digests of the engine's files under the names that they have as those of a parent."""
    top = f"{layout.CHECKPOINT}/"
    return {f"{top}{layout.PARENT}/{name.removeprefix(top)}": digest for name, digest in digests.items()}
