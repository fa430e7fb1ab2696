"""What an engine offers besides `engines.api` if it saves all containers of a pod in one image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from engines.api import Needs

SANDBOX = ""
"""The name under which a pod's pause container goes."""


@runtime_checkable
class PodEngine(Protocol):
    """An engine whose image of a container of a pod is an image of the pod.

    Such an image is restored container by container, the sandbox first, each with the same image; nothing
    runs before the last one.
    """

    def inspect_pod(self, image_path: Path, /) -> Mapping[str, Needs]:
        """What each container in the image asks for, by its name in the pod; empty if it is no pod's image.

        Raises ImageNotFound, ImageCorrupt.
        """
        ...

    def misfit(self, image_path: Path, spec: Mapping[str, Any], /) -> str:
        """Why an image cannot become the container of this specification, "" if it can: a pod's image only
        becomes a pod, each container in it the one of its name.

        Raises ImageNotFound, ImageCorrupt.
        """
        ...
