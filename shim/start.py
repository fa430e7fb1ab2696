"""Letting a restored container run that was held until its caller said `start`."""

from __future__ import annotations

from pathlib import Path

from engines import registry
from engines.api import EngineSettings, ReleaseRequest
from shim import log, state
from shim.config import Config
from shim.errors import ShimError
from shim.state import ContainerState


def start(config: Config, container_id: str, directory: Path, settings: EngineSettings) -> bool:
    """Let a held container run; False if it is not held.

    The image is consumed before the first task runs: should the node die in between, the mark must be cleared
    by hand, but the job never runs twice. Raises AdmissionRefused if another container was started from the
    image meanwhile, EngineError.
    """
    with state.locked(directory, wait_s=5.0):
        found = state.load(directory)
        if found is None or found.phase != "held":
            return False
        try:
            if found.use == "move":
                _consume(config, found)
        except ShimError as error:
            log.audit(
                config.store_path, "refused", container=container_id, image=found.image, verdict=str(error)
            )
            raise
        engine = registry.create(found.engine, settings)
        engine.release(ReleaseRequest(container_id=container_id, timeout_s=config.restore_timeout_s))
        state.advance(directory, found, "running")
    log.audit(
        config.store_path,
        "start",
        container=container_id,
        image=found.image,
        digest=found.digest,
        verdict="running",
    )
    return True


def _consume(config: Config, found: ContainerState) -> None:
    from shim.images.layout import parse_reference
    from shim.images.store import Store  # half of all that there is to import; clones do without

    store = Store(config.store_path)
    store.consume(store.resolve(parse_reference(found.image, namespace="")), by=found.container_id)
