"""A third party's engine: CRIU, with a checksum of every image file that is looked at before a restore."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from engines import registry
from engines.api import (
    CheckpointRequest,
    EngineSettings,
    ImageCorrupt,
    ImageNotFound,
    NotSupported,
    Phase,
    PhaseInfo,
    RestoreRequest,
)

SEAL = "seal.json"


def checksums(image_path: Path) -> dict[str, str]:
    """The SHA-256 of every file of an image but the seal."""
    files = [path for path in sorted(image_path.iterdir()) if path.is_file() and path.name != SEAL]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class SealedEngine:
    """See `engines.api.CheckpointEngine`. What is not said here is the CRIU engine's."""

    def __init__(self, settings: EngineSettings):
        self._criu = registry.create("criu", settings)
        self.name = "criu-sealed"
        self.capabilities = self._criu.capabilities - {"pre-dump"}
        self.probe = self._criu.probe
        self.release = self._criu.release
        self.undo = self._criu.undo
        self.discard = self._criu.discard

    def inspect(self, image_path: Path, /):
        self._look(image_path, f"could not inspect image '{image_path}'")
        return replace(self._criu.inspect(image_path), engine=self.name)

    def pre_dump(self, request: CheckpointRequest, /):
        words = f"could not pre-dump container '{request.container_id}'"
        raise NotSupported(f"{words}: a seal is for whole images; dump it in one go", after="running")

    def checkpoint(self, request: CheckpointRequest, /):
        def seal(phase: Phase, info: PhaseInfo):
            # `dumped` is the moment when the image is complete and the source can still go on.
            if phase == "dumped":
                (request.image_path / SEAL).write_text(json.dumps(checksums(request.image_path)))
            if request.on_phase:
                request.on_phase(phase, info)

        return self._criu.checkpoint(replace(request, on_phase=seal))

    def restore(self, request: RestoreRequest, /):
        self._look(request.image_path, f"could not restore container '{request.container_id}'")
        return self._criu.restore(request)

    def _look(self, image_path: Path, words: str):
        if not image_path.is_dir():
            raise ImageNotFound(f"{words}: there is no image at {image_path}; look at the path")
        try:
            sealed = json.loads((image_path / SEAL).read_text())
        except (OSError, ValueError) as error:
            raise ImageCorrupt(
                f"{words}: its seal is broken ({error}); dump again", after="stopped"
            ) from error
        changed = sorted(set(sealed.items()) ^ set(checksums(image_path).items()))
        if changed:
            raise ImageCorrupt(f"{words}: {changed[0][0]} was changed; dump again", after="stopped")
