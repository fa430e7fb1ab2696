"""The target's half of a migration into a pod that its own caller (containerd, for a kubelet) makes here.

That caller owns the container: its network, its root file system, its end. What is ours is the image, and the
promise (`shim.promise`) for which the caller's `create` waits before the source is frozen, and by which its
`start` lets the container run, or not. So nothing here is ever killed for being too late: it does not start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from cluster import away, wiring
from cluster.arrival import Arriving
from cluster.channel import Refused
from cluster.here import Here
from cluster.messages import Reserve
from cluster.records import IMAGE, STANDING, WISH, Arrival, Record
from shim import prospects, state
from shim.errors import ShimError, UnknownImage
from shim.images.layout import parse_reference
from shim.images.store import Image
from shim.promise import PATIENCE_S, Plan, Promise, Waiting

_LOOK_S = 0.01
_ASK_S = 1.0
_STARTED_S = 10.0


class Guest(Arriving):
    """See `Arriving`. The reference of the image is the one that the pod's annotation names."""

    def __init__(self, here: Here, record: Record) -> None:
        super().__init__(here, record)
        self.reference = parse_reference(self.plan.guest, namespace="")
        self.promise = Promise.of(here.node.store.path, self.reference)

    # --- before the freeze -----------------------------------------------------------------------------

    @classmethod
    def reserve(
        cls, here: Here, record: Record, peer: str, wanted: Reserve
    ) -> tuple[Arriving, tuple[str, ...]]:
        """Promise the container to whoever makes its pod here; for a trial only see whether that would do.

        Raises ShimError, EngineError, NetworkError; then nothing is left.
        """
        away.check_way(here, routed=wanted.routed)
        reference = parse_reference(wanted.guest, namespace="")
        store = here.node.store
        promise = Promise.of(store.path, reference)
        if store.has(reference) or promise.exists():
            raise ShimError(f"it has an image '{reference}' already, or waits for one; choose another name")
        record.make(
            Arrival(
                migration=wanted.migration,
                container_id=wanted.container_id,
                root="",
                directory="",
                peer=peer,
                engine=wanted.engine,
                netns="",
                identity=wanted.identity,
                owner="",
                guest=wanted.guest,
            )
        )
        try:
            record.write(STANDING, "reserved")
            arriving = cls(here, record)
        except BaseException:
            record.remove()
            raise
        try:
            here.engine(wanted.engine, here.config.root, record.path)
            prospects.stable(here.node.of_engine(wanted.engine).config)
            arriving.check_space(wanted.memory_bytes)
            if not wanted.trial:  # a pod that is made at this moment would hear that it is called off
                promise.make(Plan(migration=wanted.migration, name=wanted.container_name))
        except BaseException:
            arriving.undo()
            raise
        return arriving, ()

    def expect(self, tell: Callable[[], None]) -> None:
        """Wait until the caller's `create` waits, and look whether its pod can be given the addresses.

        tell: called every second. Raises ShimError, NetworkError, and what `tell` raises.
        """
        begun = told = time.monotonic()
        while (who := self.promise.waiting()) is None:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            if now > begun + PATIENCE_S:
                raise ShimError(
                    f"nobody has made a pod for it within {PATIENCE_S:g} s; make one with the annotations "
                    f"torpor.dev/restore-from: {self.reference.name} and torpor.dev/network: keep"
                )
            if now > told + _ASK_S:
                told = now
                tell()
        wiring.check_pod(self.identity, Path(who.netns))

    def mount(self) -> None:
        """The root file system is its caller's."""

    # --- the decision ----------------------------------------------------------------------------------

    def prepare(self) -> dict[str, float]:
        """Let the caller's `create` restore the image, and wait until it holds the container; ms by phase.

        Raises ShimError.
        """
        begun = time.monotonic()
        who = self.promise.waiting()
        if who is None:
            raise ShimError("the container that waited for it is gone; is its pod there?")
        (self.record.path / "who.json").write_bytes(msgspec.json.encode(who))
        digest = self.here.node.store.resolve(self.reference).digest
        self.promise.came(digest)
        # In this order: what has been held is there when nobody is at work any more.
        while self.promise.waiting() is not None:
            time.sleep(_LOOK_S)
        found = state.load(Path(who.directory))
        if found is None or found.phase != "held" or found.digest != digest:
            raise ShimError(self.promise.failure() or "its pod's container went away while it was restored")
        self.record.write(STANDING, "prepared")
        return {"restore": (time.monotonic() - begun) * 1000}

    def commit(self) -> dict[str, float]:
        """Permit its start, and wait a while for that; ms by phase. Raises Refused if it was not prepared.

        It is its caller's to start: should that fail, the image is there for the caller's next try.
        """
        if self.standing not in ("prepared", "committed", "running", "settled"):
            raise Refused(f"migration {self.record.migration} is not prepared here", lost=True)
        if self.standing in ("running", "settled"):
            return {}
        self.record.write(STANDING, "committed")
        begun = time.monotonic()
        self._translate()
        self.promise.decide(self.record.migration, "commit")
        while not self._has_run() and time.monotonic() < begun + _STARTED_S:
            time.sleep(_LOOK_S)
        self.record.write(STANDING, "running")
        return {"release": (time.monotonic() - begun) * 1000}

    def is_here(self) -> bool:
        """Whether the runtime has the container, running or not."""
        who = self._who()
        return who is not None and Path(who.root, who.container_id).exists()

    def _who(self) -> Waiting | None:
        try:
            return msgspec.json.decode((self.record.path / "who.json").read_bytes(), type=Waiting)
        except FileNotFoundError:
            return None

    def settle(self) -> None:
        """The source is gone. The promise and the image stay until the container has been started."""
        if self.standing != "running":
            return
        if self._is_over():
            self.leave()
        else:
            self.record.write(STANDING, "settled")
            (self.record.path / WISH).unlink(missing_ok=True)

    def bring_on(self) -> None:
        """What there is to be done now without anybody else. Raises ShimError, EngineError."""
        if self.standing == "settled" and self._is_over():
            self.leave()

    def _is_over(self) -> bool:
        """Whether it has been started, or was found to have been: its image is used up, or gone."""
        return self._image() is None or self._has_run()

    def _has_run(self) -> bool:
        image = self._image()
        return image is not None and self.here.node.store.consumed_by(image) is not None

    def _image(self) -> Image | None:
        """Its image, if the store has it: another one of the name is none of its business."""
        digest = self.record.read(IMAGE)
        try:
            return self.here.node.store.resolve(self.reference.with_digest(digest)) if digest else None
        except UnknownImage:
            return None

    def _remove_image(self) -> None:
        if (image := self._image()) is not None:
            self.here.node.store.remove(image.reference)

    def _is_at_work(self) -> bool:
        return self.promise.is_of(self.record.migration) and self.promise.waiting() is not None

    def undo(self) -> None:
        """It is not to run here. Idempotent. Raises EngineError, ShimError."""
        self.promise.decide(self.record.migration, "abort")
        who = self._who()
        if who is not None and self._has_run():  # it was decided for the other side, after an operator's word
            self.here.delete(self.plan.engine, who.root, who.container_id)
        deadline = time.monotonic() + self.here.node.config.restore_timeout_s
        while self._is_at_work() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)  # its `create` reads the image
        self.leave()

    def leave(self) -> None:
        """Nothing here waits for it any more, or it has been started: what is ours goes."""
        self._remove_image()
        self.promise.remove(self.record.migration)
        self.here.node.store.recover()
        self.record.remove()


def arriving_of(here: Here, record: Record) -> Arriving:
    """A container that is on its way here, or has come. Raises ShimError."""
    return (Guest if record.plan(Arrival).guest else Arriving)(here, record)
