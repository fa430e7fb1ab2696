"""Images whose checkpoint was cut short after they got their name: they are pending until this has decided.

If the source is gone the image is all there is, and stays; if the source lives, the image goes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from engines import registry
from engines.api import DumpFailed, EngineError, EngineSettings, EngineUnavailable
from netmig.errors import NetworkError
from shim import bundle, log, state
from shim.config import Config, engine_settings
from shim.errors import Busy, NoContainer, ShimError, Unsettled
from shim.images import layout
from shim.images.documents import decode, encode
from shim.images.store import Image, Store
from shim.toolchain.find import find_tools


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """Whose checkpoint an image comes from, and which process takes it."""

    container_id: str
    root: str
    directory: str
    pid: int
    pid_start: str
    schema: int = 1


def pending(container_id: str, root: str, directory: Path) -> bytes:
    """What is noted in an image until its checkpoint is at its end.

    root: the runtime's --root. directory: torpor's state of the container.
    """
    return encode(
        _Pending(
            container_id=container_id,
            root=root,
            directory=str(directory),
            pid=os.getpid(),
            pid_start=state.start_time(os.getpid()),
        )
    )


def settle(config: Config, store: Store) -> None:
    """Decide about images whose checkpoint was killed after they got their name.

    If the source is gone the image is all there is, and stays; if it lives, the image goes. Those that are
    being taken now are left alone, and so are those whose source is held by another call, cannot be undone
    yet, or whose runtime does not tell: they wait, and cannot be used. Raises EngineError, ShimError.
    """
    for image in store.unsettled():
        try:
            data = (image.path / layout.PENDING).read_bytes()
        except FileNotFoundError:
            continue  # another call has settled it meanwhile
        noted = decode(data, _Pending, schema=1, what=f"the state of image '{image.reference}'")
        if state.start_time(noted.pid) == noted.pid_start:
            continue
        theirs = config.of_engine(image.manifest.engine.name)
        directory = Path(noted.directory)
        settings = engine_settings(theirs, find_tools(config.tools_path), noted.root, directory)
        try:
            # Else the undo would end the call that is at work there now.
            with state.locked(directory, wait_s=0, create=True, aside=True):
                undo_killed(noted.container_id, directory, settings, image.manifest.engine.name)
                with store.staging() as trash:
                    verdict = decide(store, image, trash, settings, noted.container_id)
        except (Busy, Unsettled):
            continue
        except (DumpFailed, EngineUnavailable) as error:  # of the undo: the checkpoints of others go on
            verdict = f"left: {error}"
        log.audit(config.store_path, "settle", image=str(image.reference), verdict=verdict)


def decide(store: Store, image: Image, trash: Path, settings: EngineSettings, container_id: str) -> str:
    """Take a pending image back if its source lives, else let it be used. trash: see `Store.withdraw`.

    Returns the verdict in words. Raises ImageError, ShimError; then it is pending still.
    """
    if lives(settings, container_id):
        store.withdraw(image, trash)
        return "withdrawn: its source lives"
    failed = conclude(store, image, settings.search_path)
    return "; ".join(("kept: its source is gone", *failed))


def conclude(store: Store, image: Image, search_path: str) -> tuple[str, ...]:
    """Bring a checkpoint to its end: the image may be used. Returns what failed beside it, in sentences.

    A container that sleeps with its connections is to find its address free and its peers waiting. CRIU's own
    lock keeps the peers waiting only for as long as the pod is there.
    """
    failed: tuple[str, ...] = ()
    if image.manifest.keep_tcp and not image.manifest.leave_running:
        from shim import leases, peers

        try:
            failed = peers.guard_sleeping(image.needs, search_path)
            leases.sleep(store, image)
        except (EngineError, NetworkError, ShimError, OSError) as error:
            failed += (f"its addresses may be given to another pod: {error}",)
    store.settled(image)  # last: whoever is killed before has it repeated by `settle`
    return failed


def lives(settings: EngineSettings, container_id: str) -> bool:
    """Whether the source of an image is there to run on. Raises Unsettled if its runtime does not tell."""
    try:
        found = bundle.runtime_state(settings.runtime_path, str(settings.root_path), container_id)
    except NoContainer:
        return False
    except ShimError as error:
        raise Unsettled(str(error)) from error
    return found.status != "stopped"


def undo_killed(container_id: str, directory: Path, settings: EngineSettings, engine: str) -> None:
    """Undo what a killed call left of a container. engine: whose call it was, if that is noted nowhere.

    The caller holds the container. Raises EngineError.
    """
    if any(directory.glob(state.JOURNALS)):
        found = state.load(directory)
        engine = state.engine_at_work(directory) or (found.engine if found else engine)
    registry.create(engine, settings).undo(container_id)
