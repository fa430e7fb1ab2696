"""The target's half of a migration: room is made, the image is restored and held, and then it runs or goes.

It never runs without the decision of the source, or of an operator who was told that the source cannot be
asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from cluster import away, cargo, wiring
from cluster.channel import Refused
from cluster.here import Here
from cluster.messages import Reserve
from cluster.records import BOOT, IMAGE, STANDING, WISH, Arrival, Record
from compat import verdict
from compat.profile import this_boot
from engines.api import Needs
from netmig import identity as identities
from netmig.conntrack import Translations
from shim import bundle, prospects, restore, shape, state
from shim.annotations import Wish
from shim.errors import ShimError
from shim.images.apply import apply
from shim.images.layout import Reference
from shim.images.mounts import mount_at
from shim.start import start
from shim.streams import Streams

BASE_TAR = "base.tar"
TRANSLATIONS = "translations.json"
NETNS = Path("/run/netns")
_libc = ctypes.CDLL(None, use_errno=True)


class Arriving:
    """One container on its way here, or that has come. All methods but `reserve` may be repeated."""

    def __init__(self, here: Here, record: Record) -> None:
        self.here = here
        self.record = record
        self.plan = record.plan(Arrival)
        self.bundle_path = record.path / "bundle"
        self.rootfs_path = self.bundle_path / "rootfs"
        self.reference = Reference(namespace="", name=f"migration-{record.migration}")
        self.identity = identities.decode(self.plan.identity)
        self.netns_path = Path(self.plan.netns)
        self._plug: wiring.Plug | None = None
        self.warnings: tuple[str, ...] = ()  # of `commit`

    def close(self) -> None:
        """Let go of what this process holds of it; again does no harm."""
        if self._plug is not None:
            self._plug.close()
            self._plug = None

    @property
    def standing(self) -> str:
        """How far it has come: one of `records.STEPS`."""
        return self.record.read(STANDING)

    # --- before the freeze -----------------------------------------------------------------------------

    @classmethod
    def reserve(
        cls, here: Here, record: Record, peer: str, wanted: Reserve
    ) -> tuple[Arriving, tuple[str, ...]]:
        """Make everything ready but the root file system and the memory; warnings in sentences.

        Raises ShimError, NetworkError, EngineError with the reason; then nothing is left.
        """
        node = here.node.of_engine(wanted.engine)
        directory = node.directory(here.config.root, wanted.container_id)
        away.check_way(here, routed=wanted.routed)
        absence = away.absence_of(here, wanted.owner) if wanted.returning else None
        if wanted.returning and (absence is None or absence.plan.peer != peer):
            raise ShimError("it is not away from here; migrate it to its home")
        record.make(
            Arrival(
                migration=wanted.migration,
                container_id=wanted.container_id,
                root=here.config.root,
                directory=str(directory),
                peer=peer,
                engine=wanted.engine,
                netns=str(NETNS / f"torpor-{wanted.migration}"),
                identity=wanted.identity,
                owner=wanted.owner,
                away=wanted.routed and not wanted.returning,
                returns=absence.plan.migration if absence else "",
            )
        )
        try:
            record.write(STANDING, "reserved")
            arriving = cls(here, record)
            if here.status(wanted.engine, here.config.root, wanted.container_id):
                raise ShimError(f"it has a container '{wanted.container_id}' already; delete that one")
            spec = arriving._spec(_read(wanted.spec))
            arriving._make_bundle(spec)
        except BaseException:
            record.remove()
            raise
        try:
            if absence is not None:
                absence.keep()
                here.lease(arriving.identity, absence.keeper)  # its own when it has come
            elif not arriving.plan.away:
                here.lease(arriving.identity, wanted.owner)
            warnings = () if arriving.plan.away else here.config.unprotected
            warnings += wiring.make(
                arriving.identity,
                arriving.netns_path,
                away=arriving.plan.away,
                home=bool(arriving.plan.returns),
            )
            warnings += arriving._judge(spec, wanted)  # which looks at the namespace, too
            if not wanted.trial:
                arriving._clear()
                arriving._plug = arriving._opened()
        except BaseException:
            arriving.undo()
            raise
        return arriving, warnings

    def _spec(self, spec: bundle.Spec) -> bundle.Spec:
        """The container's specification for this node."""
        linux: dict[str, Any] = spec.setdefault("linux", {})
        for namespace in linux.get("namespaces") or ():
            if namespace.get("type") == "network":
                namespace["path"] = self.plan.netns
            elif namespace.get("path"):
                raise ShimError(
                    f"the container shares its {namespace['type']} namespace with another one, which does "
                    "not come along; migrate by image and a new pod"
                )
        if self.here.config.cgroup:
            linux["cgroupsPath"] = f"{self.here.config.cgroup}/{self.plan.container_id}"
        spec["root"] = {**spec.get("root", {}), "path": "rootfs"}
        for mount in spec.get("mounts") or ():
            binds = mount.get("type") == "bind" or {"bind", "rbind"} & set(mount.get("options") or ())
            if binds and not os.path.lexists(mount.get("source", "")):
                raise ShimError(
                    f"it has no '{mount.get('source')}', which the container mounts; put it there first"
                )
        return spec

    def _judge(self, spec: bundle.Spec, wanted: Reserve) -> tuple[str, ...]:
        """What can be said before there is an image. Raises ShimError."""
        node = self.here.node.of_engine(wanted.engine)
        engine = self.here.engine(wanted.engine, self.plan.root, self.plan.directory)
        needs = Needs(
            engine=engine.name,
            image_version="",
            tasks=(),
            namespaces={"network": "external"},
            terminal=bool(spec.get("process", {}).get("terminal")),
        )
        # Both now rather than while nobody runs: what is found is kept, and so is what is loaded.
        profile = prospects.stable(node.config)
        importlib.import_module("shim.peers")
        findings = verdict.judge(needs, spec, dump_host=wanted.host, node=profile)
        if refusals := [one for one in (*engine.probe(), *findings) if one.severity == "refuse"]:
            raise ShimError("; ".join(f"{one.message} [{one.rule}]; {one.remedy}" for one in refusals))
        self.check_space(wanted.memory_bytes)
        return tuple(one.message for one in findings if one.severity == "warn")

    def check_space(self, n_bytes: int) -> None:
        """Raises ShimError unless the store has room for an image, and the state for the rest."""
        self.here.check_room(0)
        self.here.node.store.ensure()
        space = os.statvfs(self.here.node.store.path)
        if space.f_bavail * space.f_frsize < n_bytes:
            raise ShimError(
                f"its store has {space.f_bavail * space.f_frsize >> 20} MiB free and the container needs "
                f"{n_bytes >> 20}; free some space"
            )

    def _clear(self) -> None:
        """Undo what a dead call for this id has left, now rather than while nobody runs. Raises ShimError."""
        directory = Path(self.plan.directory)
        with state.locked(directory, wait_s=5.0, create=True):
            if restore.clear(self.here.node.of_engine(self.plan.engine).config, self._target(directory)):
                raise ShimError(f"it has a container '{self.plan.container_id}' already; delete that one")

    def _make_bundle(self, spec: bundle.Spec) -> None:
        for name in ("base", "upper", "work", "bundle/rootfs"):
            (self.record.path / name).mkdir(mode=0o755, parents=True)
        (self.bundle_path / bundle.CONFIG).write_text(json.dumps(spec))

    def mount(self) -> None:
        """The root file system: what came of it before the freeze, and above that what the image holds."""
        path, tar = self.record.path, self.record.path / BASE_TAR
        if tar.exists():
            with tar.open("rb") as file:
                apply(path / "base", file, b"[]")
            tar.unlink()
        if self._is_mounted():
            return
        options = f"lowerdir={path / 'base'},upperdir={path / 'upper'},workdir={path / 'work'}"
        cargo.run("mount", "-t", "overlay", "overlay", "-o", options, str(self.rootfs_path))

    # --- the decision ----------------------------------------------------------------------------------

    def note(self, translations: Translations) -> None:
        """Keep the old node's translations for the moment of the commit. Raises OSError."""
        (self.record.path / TRANSLATIONS).write_bytes(msgspec.json.encode(translations))

    def prepare(self) -> dict[str, float]:
        """Restore the image that was committed under `reference`, and hold it; ms by phase.

        Raises ShimError, EngineError, NetworkError.
        """
        plan, node = self.plan, self.here.node.of_engine(self.plan.engine)
        begun = time.monotonic()
        image = node.store.resolve(self.reference)
        directory = Path(plan.directory)
        target = self._target(directory)
        spec = bundle.read_spec(self.bundle_path)
        wish = Wish(use="move", network="keep")
        with ThreadPoolExecutor(1) as beside, state.locked(directory, wait_s=5.0, create=True):
            if state.load(directory) is not None or self.is_here():
                raise ShimError(f"it has a container '{plan.container_id}' already; delete that one")
            state.note_standing(directory, self.record.path / STANDING)
            led = beside.submit(self._lead_in)
            streams = Streams(self.record.path / "output.log")
            try:
                restore.at_create(node.config, node.store, image, target, spec, wish)
            finally:
                streams.back()
            led.result()
        self.record.write(STANDING, "prepared")
        return {"restore": (time.monotonic() - begun) * 1000}

    def commit(self) -> dict[str, float]:
        """Plug it in and let it run; ms by phase. Raises Refused if it was not prepared.

        Whatever goes wrong after the decision can be tried again.
        """
        if self.standing not in ("prepared", "committed", "running", "settled"):
            raise Refused(f"migration {self.record.migration} is not prepared here", lost=True)
        if self.standing in ("running", "settled"):
            return {}
        if not self.is_here():
            if not self._has_run():
                raise Refused(
                    f"the container of migration {self.record.migration} is gone: was this node restarted?",
                    lost=True,
                )
            self.record.write(STANDING, "running")
            return {}
        self.record.write(BOOT, this_boot())
        self.record.write(STANDING, "committed")
        plan, node = self.plan, self.here.node.of_engine(self.plan.engine)
        begun = time.monotonic()
        self._translate()
        plug = self._plug or self._lead_in()
        self._end_absence(over=False)
        plug.put_in()
        plugged = time.monotonic()
        directory = Path(plan.directory)
        start(
            node.config, plan.container_id, directory, self.here.settings(plan.engine, plan.root, directory)
        )
        released = time.monotonic()
        self.record.write(STANDING, "running")
        return {"plug": (plugged - begun) * 1000, "release": (released - plugged) * 1000}

    def _translate(self) -> None:
        self.warnings = wiring.translate(self.identity, translations_of(self.record))

    def _opened(self) -> wiring.Plug:
        return wiring.Plug(self.identity, self.netns_path, away=self.plan.away)

    def _lead_in(self) -> wiring.Plug:
        self._plug = self._plug or self._opened()
        self._plug.lead_in()
        return self._plug

    def _end_absence(self, *, over: bool) -> None:
        """It has come home: nothing is sent on any more. over: it will not be again."""
        left = Record(self.here.config.away, self.plan.returns) if self.plan.returns else None
        if left is not None and left.exists():
            absence = away.Absence(self.here, left)
            absence.end() if over else absence.come_home()

    def is_here(self) -> bool:
        """Whether the runtime has the container, running or not."""
        return is_here(self.plan)

    def is_over(self) -> bool:
        """Whether its owner has deleted it, and its files may go. Raises ShimError if its node ended it."""
        if self.is_here():
            if self.record.read(BOOT) != this_boot():
                self.record.write(BOOT, this_boot())  # it was started anew
            return False
        if ended_with_its_node(self.record, self.plan):
            raise ShimError(what_is_left(self.record, self.plan))
        return True

    def _has_run(self) -> bool:
        """Whether it was let go once: then its image is used up."""
        store = self.here.node.store
        return store.has(self.reference) and store.consumed_by(store.resolve(self.reference)) is not None

    def settle(self) -> None:
        """The source is gone: the image has served."""
        if self.standing == "running":
            self._end_absence(over=True)
            wiring.tidy(self.netns_path)
            _sync(self.record.path)  # the source removes its own files when it has heard that this is settled
            self._remove_image()
            boot = self.record.read(BOOT) or this_boot()
            self.record.write(BOOT, boot, durable=True)
            self.record.write(STANDING, "settled", durable=True)
            (self.record.path / WISH).unlink(missing_ok=True)

    def bring_on(self) -> None:
        """What there is to be done now without anybody else. Raises EngineError, NetworkError, ShimError."""
        if self.standing == "settled" and self.is_over():
            self.leave()

    def undo(self) -> None:
        """Nothing of it is left on this node. Idempotent. Raises EngineError, NetworkError, ShimError."""
        plan, node = self.plan, self.here.node.of_engine(self.plan.engine)
        directory = Path(plan.directory)
        if directory.exists():
            with state.locked(directory, wait_s=5.0, create=True):
                found = state.load(directory)
                if found is not None and found.digest == self.record.read(IMAGE):  # or another has the id
                    self.here.delete(plan.engine, plan.root, plan.container_id)
                    with contextlib.suppress(FileNotFoundError):
                        restore.clear(node.config, self._target(directory))
                    found = None
                if found is None:
                    state.remove(directory)
        self.leave()

    def leave(self) -> None:
        """The container is gone from this node: so are its network, its image, its root file system."""
        self.disconnect()
        self.clear_up()

    def disconnect(self) -> None:
        """Its network and its leases here go: it may come again. Raises NetworkError, ShimError."""
        self.close()
        wiring.remove(self.identity, self.netns_path)
        if not self.plan.away:
            away.give_back(self.here, self.identity, self.plan.owner)

    def clear_up(self) -> None:
        """What is left of it, which is this arrival's alone, goes. Raises ShimError, OSError."""
        self._remove_image()
        self.unmount()
        self.here.node.store.recover()  # a process that was killed here may have left half an image
        self.record.remove()

    def _target(self, directory: Path) -> restore.Target:
        plan = self.plan
        return restore.Target(
            container_id=plan.container_id,
            root=plan.root,
            directory=directory,
            bundle_path=self.bundle_path,
            settings=self.here.settings(plan.engine, plan.root, directory),
        )

    def unmount(self) -> None:
        """Take the root file system away. Idempotent."""
        while self._is_mounted():
            cargo.run("umount", "--lazy", str(self.rootfs_path))

    def _is_mounted(self) -> bool:
        return mount_at(self.rootfs_path) is not None

    def _remove_image(self) -> None:
        store = self.here.node.store
        if store.has(self.reference):
            store.remove(self.reference)


def translations_of(record: Record) -> Translations:
    """The old node's, as noted in a migration of either side; none after a power cut, as in the kernel."""
    try:
        return msgspec.json.decode((record.path / TRANSLATIONS).read_bytes(), type=Translations)
    except (FileNotFoundError, msgspec.DecodeError):
        return ()


def _sync(path: Path) -> None:
    """Put the file system of a directory on its disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(descriptor)


def is_here(plan: Arrival) -> bool:
    """Whether the runtime has an arrived container, running or not."""
    return Path(plan.root, plan.container_id).exists()


def ended_with_its_node(record: Record, plan: Arrival) -> bool:
    """Whether an arrived container is gone because this node was restarted: all there is are its files."""
    return not plan.guest and record.read(BOOT) not in ("", this_boot()) and not is_here(plan)


def what_is_left(record: Record, plan: Arrival) -> str:
    """What there is to be said, and done, about one that has ended with its node."""
    return (
        f"container '{plan.container_id}' ended when this node was restarted; its files are kept in "
        f"{record.path}, 'upper' over 'base': take what you need and remove {record.path / BOOT}, and the "
        "agent clears up"
    )


def _read(data: bytes) -> bundle.Spec:
    """The config.json that the source has sent. Raises ShimError."""
    try:
        return shape.checked(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise ShimError(f"the container's config.json: {error}; correct it where the container is") from None
